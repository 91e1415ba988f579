"""Traces in Mooncake form: arrivals, lengths, and equal blocks of prompts.

A prompt is a sequence of blocks, each named by a hash id: equal ids mean equal tokens. Mooncake's
blocks have 512 tokens. Other traces have other blocks (Bailian's 16), which the number of ids per
prompt shows. All functions here that make requests shorter, fewer or faster keep the sharing.
"""

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from kvrs.errors import ConfigError, TraceError
from kvrs_lab.traces.records import ReplayRequest

MOONCAKE_BLOCK_TOKENS = 512
# Mooncake's size comes first, as the default of an ambiguous trace.
BLOCK_TOKENS = (512, 16, 32, 64, 128, 256)
LENGTH_MAX = 1 << 24
_TIMESTAMP_MAX_MS = 1e12
# Eleven days.
LONGEST_TRACE_S = 1e6

# The first tokens of a block spell its id, so that different blocks differ by construction.
_SPELLING_TOKENS = 8
_SPELLING_FACTOR = (
    1 << 61
) - 1  # A prime above every vocabulary size, hence coprime to its powers.


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]  # One per block of the prompt; the last block may be partial.


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


_Length = Annotated[int, msgspec.Meta(ge=1, le=LENGTH_MAX)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=_TIMESTAMP_MAX_MS)]
    input_length: _Length
    output_length: _Length
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]
    chat_id: int | None = None  # In Bailian's traces, whose times are seconds.

    @property
    def arrival_s(self) -> float:
        return self.timestamp / 1000 if self.chat_id is None else self.timestamp

    def fits(self, block_tokens: int) -> bool:
        return len(self.hash_ids) == -(-self.input_length // block_tokens)


_DECODER = msgspec.json.Decoder(_Line)


def load_mooncake(path: Path) -> Trace:
    """Read a Mooncake JSONL file. Times become seconds, requests are sorted by arrival, and blank
    lines are skipped.

    Raises:
        TraceError: "file:line: reason" of the first bad line; an unreadable or empty file.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    found: list[tuple[int, _Line]] = []
    faults: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append((number, _parse_line(line)))
        except ValueError as error:
            faults.append((number, str(error)))
    block_tokens = max(BLOCK_TOKENS, key=lambda size: sum(line.fits(size) for _, line in found))
    faults += [
        (number, _misfit(line, block_tokens))
        for number, line in found
        if not line.fits(block_tokens)
    ]
    if faults:
        number, reason = min(faults)
        raise TraceError(f"{path}:{number}: {reason}")
    requests = [
        TraceRequest(line.arrival_s, line.input_length, line.output_length, tuple(line.hash_ids))
        for _, line in found
    ]
    if not requests:
        raise TraceError(f"{path}: no request in the file")
    return Trace(_by_arrival(requests), block_tokens)


def _parse_line(line: bytes) -> _Line:
    """Parse one line. Raises ValueError: the line is bad."""
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        raise ValueError(f"{where.rstrip('`')}: {reason}" if where else reason) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None


def _misfit(line: _Line, block_tokens: int) -> str:
    return (
        f"hash_ids: got {len(line.hash_ids)}; input_length {line.input_length} needs "
        f"{-(-line.input_length // block_tokens)}, one per block of {block_tokens} tokens"
    )


def window(trace: Trace, count: int, first: int = 0) -> Trace:
    """Take `count` requests from number `first` on; the first of them arrives at 0."""
    chosen = trace.requests[first : first + count]
    if len(chosen) < count:
        raise TraceError(
            f"the trace has {len(trace.requests)} requests, {first + count} were asked for"
        )
    start_s = chosen[0].arrival_s if chosen else 0.0
    return replace(
        trace,
        requests=tuple(
            replace(request, arrival_s=request.arrival_s - start_s) for request in chosen
        ),
    )


def jitter(trace: Trace, span_s: float, seed: int) -> Trace:
    """Delay every request by a random part of `span_s`, since some traces were logged in batches
    (Mooncake's: 3 s).
    """
    rng = random.Random(seed)
    moved = [
        replace(request, arrival_s=request.arrival_s + rng.random() * span_s)
        for request in trace.requests
    ]
    return window(replace(trace, requests=_by_arrival(moved)), len(moved))


def at_rate(trace: Trace, requests_per_s: float) -> Trace:
    """Stretch or compress time to this mean rate of requests, with the same shape of arrivals."""
    arrivals_s = [request.arrival_s for request in trace.requests]
    span_s = arrivals_s[-1] - arrivals_s[0]
    if span_s == 0 and len(arrivals_s) > 1:
        raise TraceError(
            f"all {len(arrivals_s)} requests arrive at the same moment: they have no rate"
        )
    factor = (len(arrivals_s) - 1) / requests_per_s / span_s if span_s else 1.0
    moved = (
        replace(request, arrival_s=(request.arrival_s - arrivals_s[0]) * factor)
        for request in trace.requests
    )
    return replace(trace, requests=tuple(moved))


def check_lasts(trace: Trace, stretched_by: str) -> None:
    """Check the last arrival. Raises ConfigError: too late, caused by `stretched_by`."""
    lasts_s = trace.requests[-1].arrival_s
    if not lasts_s <= LONGEST_TRACE_S:
        raise ConfigError(
            f"{stretched_by}, by which the last request arrives after {lasts_s:.3g} s; "
            f"allowed: at most {LONGEST_TRACE_S:g} s"
        )


def scale(
    trace: Trace,
    max_input_tokens: int,
    max_output_tokens: int,
    longest_input_tokens: int | None = None,
) -> Trace:
    """Shorten requests for a model with few positions, keeping what they share.

    Blocks shrink, all alike, to the largest whole number of tokens at which a prompt of
    `longest_input_tokens` (default: the longest of the trace) fits into `max_input_tokens`; a
    partial last block keeps its ratio, at least one token. Prompts beyond that length lose their
    last blocks. Outputs shrink by one ratio to `max_output_tokens`, at least one token.

    Raises:
        TraceError: even blocks of one token do not fit.
    """
    longest = longest_input_tokens or max(request.input_tokens for request in trace.requests)
    blocks = -(-longest // trace.block_tokens)
    block_tokens = min(trace.block_tokens, max_input_tokens // blocks)
    if block_tokens == 0:
        raise TraceError(
            f"a prompt of {blocks} blocks does not fit into {max_input_tokens} tokens; "
            f"allowed: at least {blocks}"
        )
    output_ratio = min(
        1.0, max_output_tokens / max(request.output_tokens for request in trace.requests)
    )
    return clip(_shrink(trace, block_tokens, output_ratio), max_input_tokens, max_output_tokens)


def scale_lengths(trace: Trace, factor: float) -> Trace:
    """Multiply all lengths by about `factor`, and keep shared prefixes: a block has a whole number
    of tokens, at least one.

    Raises:
        TraceError: the factor is not above 0 and up to 1.
    """
    if not 0 < factor <= 1:
        raise TraceError(f"length scale: got {factor}; allowed: above 0, up to 1")
    return _shrink(trace, max(1, round(trace.block_tokens * factor)), factor)


def clip(trace: Trace, max_input_tokens: int, max_output_tokens: int) -> Trace:
    """Cut long requests: prompts lose their last blocks, so that shared prefixes stay shared."""

    def clipped(request: TraceRequest) -> TraceRequest:
        tokens = min(request.input_tokens, max_input_tokens)
        ids = request.hash_ids[: -(-tokens // trace.block_tokens)]
        return TraceRequest(
            request.arrival_s, tokens, min(request.output_tokens, max_output_tokens), ids
        )

    return replace(trace, requests=tuple(map(clipped, trace.requests)))


def _shrink(trace: Trace, block_tokens: int, output_ratio: float) -> Trace:
    def shrunk(request: TraceRequest) -> TraceRequest:
        full, rest = divmod(request.input_tokens, trace.block_tokens)
        partial = max(1, round(rest * block_tokens / trace.block_tokens)) if rest else 0
        output = max(1, round(request.output_tokens * output_ratio))
        return TraceRequest(
            request.arrival_s, full * block_tokens + partial, output, request.hash_ids
        )

    return replace(trace, requests=tuple(map(shrunk, trace.requests)), block_tokens=block_tokens)


def prompt_token_ids(
    request: TraceRequest, block_tokens: int, vocab_size: int, seed: int, floor: int = 0
) -> list[int]:
    """The prompt's tokens, all in `[floor, vocab_size)`: a function of seed and hash ids alone, in
    every process.

    Equal hash ids give equal tokens. Different ids below `(vocab_size - floor) ** min(block_tokens,
    8)` give different blocks. Ids below `vocab_size - floor` differ in their first token, so that
    partial blocks differ too.
    """
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        tokens.extend(_block(hash_id, block_tokens, vocab_size - floor, seed, floor))
    return tokens[: request.input_tokens]


def replay_requests(
    trace: Trace, vocab_size: int, seed: int, floor: int = 0
) -> list[ReplayRequest]:
    """The trace as requests to a model with this vocabulary; `floor` excludes special ids."""
    return [
        ReplayRequest(
            request.arrival_s,
            tuple(prompt_token_ids(request, trace.block_tokens, vocab_size, seed, floor)),
            request.output_tokens,
        )
        for request in trace.requests
    ]


def _block(hash_id: int, block_tokens: int, letters: int, seed: int, floor: int) -> Iterator[int]:
    """Yield the id, spelt in base `letters` after an affine shuffle (a bijection), then tokens
    drawn from (seed, id).
    """
    assert letters >= 2, "a vocabulary of one token cannot tell blocks apart"
    spelling = min(block_tokens, _SPELLING_TOKENS)
    digits = (hash_id * _SPELLING_FACTOR + _number(f"{seed}")) % letters**spelling
    for _ in range(spelling):
        digits, letter = divmod(digits, letters)
        yield floor + letter
    drawn = hashlib.shake_256(f"{seed}:{hash_id}".encode()).digest(4 * (block_tokens - spelling))
    numbers = struct.unpack(f"<{len(drawn) // 4}I", drawn)
    yield from [number % letters + floor for number in numbers]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")


def _by_arrival(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    return tuple(sorted(requests, key=lambda request: request.arrival_s))
