"""Traces as they are published: Mooncake JSONL, Azure LLM inference CSV, BurstGPT CSV. The format
is recognised by the first line.

The two CSV formats have no shared prefixes, so every prompt is made of blocks of its own.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from kvrs.errors import TraceError
from kvrs.traces.mooncake import (
    LENGTH_MAX,
    MOONCAKE_BLOCK_TOKENS,
    Trace,
    TraceRequest,
    load_mooncake,
)

# timestamp of the request, prompt tokens, output tokens
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_FIRST_LINE_MAX = 4096


def load_trace(path: Path, skip_bad_lines: bool = False) -> Trace:
    """Read a trace of any known format; times become seconds since the first request, requests are
    sorted by arrival.

    Raises:
        TraceError: "file:line: reason" of the first bad line (unless they are skipped); a file of
            no known format.
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
        return load_mooncake(path, skip_bad_lines)
    columns = {name.strip() for name in first.decode(errors="replace").split(",")}
    if columns.issuperset(_AZURE):
        return _load_csv(path, skip_bad_lines, _AZURE, _azure_time_s)
    if columns.issuperset(_BURSTGPT):
        return _load_csv(path, skip_bad_lines, _BURSTGPT, _seconds)
    raise TraceError(
        f"{path}:1: no trace of a known format, it begins {first[:60]!r}; allowed: "
        f"Mooncake (JSON lines), "
        f"Azure (CSV with {', '.join(_AZURE)}), BurstGPT (CSV with {', '.join(_BURSTGPT)})"
    )


def _load_csv(
    path: Path, skip_bad_lines: bool, columns: Sequence[str], time_of: Callable[[str], float]
) -> Trace:
    requests: list[TraceRequest] = []
    skipped, ids = 0, count()
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
                if not skip_bad_lines:
                    raise TraceError(f"{path}:{reader.line_num}: {error}") from None
                skipped += 1
    if not requests:
        raise TraceError(f"{path}: no request in the file ({skipped} bad lines skipped)")
    requests.sort(key=lambda request: request.arrival_s)
    start_s = requests[0].arrival_s
    moved = (
        TraceRequest(round(r.arrival_s - start_s, 6), r.input_tokens, r.output_tokens, r.hash_ids)
        for r in requests
    )
    return Trace(tuple(moved), skipped)


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
    """One request; ValueError with the reason where the row is bad."""
    if len(row) <= max(places):
        raise ValueError(f"{len(row)} columns; allowed: at least {max(places) + 1}")
    at, given, produced = (row[place].strip() for place in places)
    try:
        arrival_s = time_of(at)
    except ValueError:
        raise ValueError(f"{columns[0]}: got {at!r}; allowed: a time") from None
    tokens, output = _length(given, columns[1]), _length(produced, columns[2])
    blocks = -(-tokens // MOONCAKE_BLOCK_TOKENS)
    return TraceRequest(arrival_s, tokens, output, tuple(next(ids) for _ in range(blocks)))


def _length(text: str, column: str) -> int:
    # A failed request of BurstGPT has 0 response tokens: it cannot be replayed.
    if not text.isdecimal() or not 1 <= int(text) <= LENGTH_MAX:
        raise ValueError(f"{column}: got {text!r}; allowed: 1 to {LENGTH_MAX}")
    return int(text)


def _azure_time_s(text: str) -> float:
    """ISO form with seven digits of a second; the trace of 2024 adds a zone."""
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
