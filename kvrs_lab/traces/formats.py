"""Loaders of published traces: Mooncake JSONL, CSV of the Azure LLM inference trace, of BurstGPT,
Vidur and Splitwise-sim, and plain CSV of arrival, input and output. The first line shows the
format.

Only Mooncake's form has shared prefixes. In other traces every prompt consists of its own blocks.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from kvrs.errors import TraceError
from kvrs_lab.traces.mooncake import (
    LENGTH_MAX,
    MOONCAKE_BLOCK_TOKENS,
    Trace,
    TraceRequest,
    load_mooncake,
)

_FIRST_LINE_MAX = 4096
Columns = tuple[str, str, str]


def load_trace(path: Path) -> Trace:
    """Read a trace of any known format. Times become seconds since the first request, and requests
    are sorted by arrival.

    Raises:
        TraceError: "file:line: reason" of the first bad line; a file of no known format.
    """
    try:
        with path.open("rb") as file:
            first = (
                file.read(_FIRST_LINE_MAX)
                .lstrip(b"\xef\xbb\xbf \t\r\n")
                .partition(b"\n")[0]
                .strip()
            )
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if first.startswith(b"{"):
        return load_mooncake(path)
    columns = {name.strip() for name in first.decode(errors="replace").split(",")}
    for _, known, time_of in _CSV:
        if columns.issuperset(known):
            return _load_csv(path, known, time_of)
    forms = ", ".join(f"{name} (CSV with {', '.join(known)})" for name, known, _ in _CSV)
    raise TraceError(
        f"{path}:1: no trace of a known format, it begins {first[:60]!r}; allowed: "
        f"Mooncake (JSON lines), {forms}"
    )


def _load_csv(path: Path, columns: Sequence[str], time_of: Callable[[str], float]) -> Trace:
    requests: list[TraceRequest] = []
    ids = count()
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader)]
        places = [header.index(name) for name in columns]
        for row in _rows(reader, path):
            if not row:
                continue
            try:
                requests.append(_parse_row(row, places, columns, time_of, ids))
            except ValueError as error:
                raise TraceError(f"{path}:{reader.line_num}: {error}") from None
    return _trace(path, requests)


def _trace(path: Path, requests: list[TraceRequest]) -> Trace:
    """Sort the requests by arrival, with times since the first request."""
    if not requests:
        raise TraceError(f"{path}: no request in the file")
    requests.sort(key=lambda request: request.arrival_s)
    start_s = requests[0].arrival_s
    moved = (
        TraceRequest(round(r.arrival_s - start_s, 6), r.input_tokens, r.output_tokens, r.hash_ids)
        for r in requests
    )
    return Trace(tuple(moved))


def _request(arrival_s: float, tokens: int, output: int, ids: Iterator[int]) -> TraceRequest:
    blocks = -(-tokens // MOONCAKE_BLOCK_TOKENS)
    return TraceRequest(arrival_s, tokens, output, tuple(next(ids) for _ in range(blocks)))


def _rows(reader: Any, path: Path) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num}: not valid CSV: {error}") from None


def _parse_row(
    row: Sequence[str],
    places: Sequence[int],
    columns: Sequence[str],
    time_of: Callable[[str], float],
    ids: Iterator[int],
) -> TraceRequest:
    """Parse one request. Raises ValueError: the row is bad."""
    if len(row) <= max(places):
        raise ValueError(f"{len(row)} columns; allowed: at least {max(places) + 1}")
    at, given, produced = (row[place].strip() for place in places)
    try:
        arrival_s = time_of(at)
    except ValueError:
        raise ValueError(f"{columns[0]}: got {at!r}; allowed: a time") from None
    tokens, output = _length(given, columns[1]), _length(produced, columns[2])
    return _request(arrival_s, tokens, output, ids)


def _length(text: str, column: str) -> int:
    # A failed BurstGPT request has 0 response tokens and cannot be replayed.
    if not text.isdecimal() or not 1 <= int(text) <= LENGTH_MAX:
        raise ValueError(f"{column}: got {text!r}; allowed: 1 to {LENGTH_MAX}")
    return int(text)


def _azure_time_s(text: str) -> float:
    """Parse ISO form with seven digits of a second; the trace of 2024 adds a zone."""
    moment, dot, fraction = text.partition(".")
    digits, sign, zone = fraction.partition("+")
    seconds = float(f"0.{digits}") if dot else 0.0
    found = datetime.fromisoformat(f"{moment}{sign}{zone}")
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() + seconds


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


# Name, columns (arrival, prompt tokens, output tokens), and parser of an arrival.
_CSV: tuple[tuple[str, Columns, Callable[[str], float]], ...] = (
    ("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_time_s),
    ("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), _seconds),
    ("Vidur", ("arrived_at", "num_prefill_tokens", "num_decode_tokens"), _seconds),
    ("Splitwise-sim", ("arrival_timestamp", "prompt_size", "token_size"), _seconds),
    ("a plain trace", ("arrival", "input", "output"), _seconds),
)
