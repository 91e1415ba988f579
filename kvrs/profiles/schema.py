"""Schema of a profile file: the tables of one model on one GPU with one engine, and the source of
every number.

Shipped profiles and those of `kvrs profile` share this schema.
"""

from collections.abc import Iterator, Mapping
from math import gcd, isfinite
from typing import Annotated, Literal, assert_never

import msgspec
from msgspec import Meta

from kvrs.protocol.geometry import KvGeometry

Coefficients = tuple[float, float, float]
Positive = Annotated[int, Meta(ge=1, le=1 << 24)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Rate = Annotated[float, Meta(gt=0)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 24)]
Text = Annotated[str, Meta(min_length=1, max_length=2000)]
Kind = Literal["measured", "estimated"]

# Most points of a table's uniform grid, which would be needlessly large for steps of one token over
# a long context.
MAX_GRID_POINTS = 1 << 17


class CachedTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Additional prefill time behind cached tokens: `seconds_per_token_pair * new * cached`, since
    every new token attends to every cached token.
    """

    seconds_per_token_pair: Annotated[float, Meta(ge=0)]
    max_cached_tokens: Positive


class PrefillPoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="points"):
    # Prefill time in seconds by number of tokens; the numbers may lie at any distances.
    seconds: dict[Tokens, Seconds]
    cached: CachedTerm | None = None


class PrefillQuadratic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="quadratic"):
    coefficients_ms: Coefficients
    max_tokens: Positive  # Longest prompt that the fit is valid for.


class PrefillRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="grid"):
    """`rows[i][j]`: seconds of `j * new_step_tokens` new tokens behind `i * cached_step_tokens`
    cached tokens.
    """

    new_step_tokens: Positive
    cached_step_tokens: Positive
    rows: list[list[Seconds]]


class DecodeFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fit"):
    """DistServe's decode model (Zhong et al., OSDI 2024, and its simulator): `a + b * (sum of
    context tokens) + c * batch` in milliseconds, in two regimes of the batch size.
    """

    large_from_batch: int
    small_ms: Coefficients
    large_ms: Coefficients


class DecodeRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="grid"):
    """`rows[i][j]`: seconds of one step of `batches[i]` sequences with `contexts[j]` tokens of
    context each.
    """

    batches: list[Positive]
    contexts: list[Positive]
    rows: list[list[Seconds]]


class TransferTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of a transfer by the alpha-beta model: `seconds(bytes) = alpha_s + bytes /
    bytes_per_s`.
    """

    alpha_s: Seconds
    bytes_per_s: Rate


class ProfileLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bandwidth and latency of one kind of link between GPUs or nodes."""

    label: Text
    gpu: Text
    scope: Literal["intra_node", "inter_node", "loopback"]
    kind: Kind
    source: Text
    transfer: TransferTime


class ModelLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time to load the weights into the GPU: an estimate, since no source measured it."""

    weight_bytes: Annotated[int, Meta(ge=1)]
    bytes_per_s: Rate
    source: Text


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A profile file. Values that its source does not state are null, never guessed."""

    label: Text
    model: Text
    dtype: Text
    gpu: Text | None
    tp: Positive | None
    engine: Text
    version: str | None
    kind: Kind
    source: Text
    geometry: KvGeometry
    prefill: PrefillPoints | PrefillQuadratic | PrefillRows
    cpu: Text | None = None
    geometry_source: Text | None = None
    decode: DecodeFit | DecodeRows | None = None
    load: ModelLoad | None = None
    # Seconds per step beyond the tables' times, for scheduling, sampling and sending.
    engine_step_s: Seconds = 0.0


def faults(profile: Profile) -> Iterator[str]:
    """Yield the faults of a profile whose types are right: a line each, with path, value and
    allowed values.
    """
    yield from _prefill_faults(profile.prefill)
    match profile.decode:
        case DecodeFit(small_ms=small, large_ms=large, large_from_batch=first):
            for name, fit, least in (("small_ms", small, 1), ("large_ms", large, max(1, first))):
                a, b, c = fit
                # Each further sequence adds at least one token of context, so `b + c` must not be
                # negative.
                if not all(map(isfinite, fit)) or min(b, b + c, a + (b + c) * least) < 0:
                    yield (
                        f"$.decode.{name}: got {fit}; allowed: a time that is not negative and "
                        f"never falls"
                    )
        case DecodeRows(batches=batches, contexts=contexts, rows=rows):
            for name, axis in (("batches", batches), ("contexts", contexts)):
                if len(axis) < 2 or sorted(set(axis)) != axis:
                    yield f"$.decode.{name}: got {axis}; allowed: at least 2 numbers that rise"
            yield from _shape_faults("$.decode.rows", rows, len(batches), len(contexts))
        case None:
            pass
        case _:
            assert_never(profile.decode)


def _prefill_faults(prefill: PrefillPoints | PrefillQuadratic | PrefillRows) -> Iterator[str]:
    match prefill:
        case PrefillPoints(seconds=seconds):
            yield from _point_faults(seconds)
        case PrefillQuadratic(coefficients_ms=(a, b, c), max_tokens=longest):
            if min(a, b, a + b * longest + c * longest**2, b + 2 * c * longest) < 0 or not all(
                map(isfinite, (a, b, c))
            ):
                yield (
                    f"$.prefill.coefficients_ms: got {(a, b, c)}; allowed: a time that is "
                    f"not negative and never falls"
                )
        case PrefillRows(rows=rows):
            width = len(rows[0]) if rows else 0
            if len(rows) < 2 or width < 2:
                yield (
                    f"$.prefill.rows: got {len(rows)} rows of {width} numbers; allowed: at "
                    f"least 2 rows of at least 2"
                )
            elif len(rows) * width > MAX_GRID_POINTS:
                yield (
                    f"$.prefill.rows: got {len(rows) * width} numbers; allowed: at most "
                    f"{MAX_GRID_POINTS}"
                )
            yield from _shape_faults("$.prefill.rows", rows, len(rows), width)
        case _:
            assert_never(prefill)


def _point_faults(seconds: Mapping[int, float]) -> Iterator[str]:
    if len(seconds) < 2:
        yield f"$.prefill.seconds: got {len(seconds)} points; allowed: at least 2"
    elif (points := max(seconds) // gcd(*seconds)) > MAX_GRID_POINTS:
        yield (
            f"$.prefill.seconds: the lengths make a grid of {points} steps of "
            f"{gcd(*seconds)} tokens; "
            f"allowed: at most {MAX_GRID_POINTS} (take lengths with a common divisor)"
        )


def _shape_faults(path: str, rows: list[list[float]], height: int, width: int) -> Iterator[str]:
    if len(rows) != height:
        yield f"{path}: got {len(rows)} rows; allowed: {height}"
    for index, row in enumerate(rows):
        if len(row) != width:
            yield f"{path}[{index}]: got {len(row)} numbers; allowed: {width}"
