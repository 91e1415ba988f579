"""Profiles by name, as shipped with kvrs, or by path, as written by `kvrs profile`.

Profiles of different software generations differ by up to a factor of two on the same GPU, so a
table needs its labels: model, GPU, degree of tensor parallelism, engine, version, measured or
estimated, source.

Schema of a profile file: the tables of one model on one GPU with one engine, and the source of
every number.

Shipped profiles and those of `kvrs profile` share this schema.

Writer of the profile files of `kvrs profile`.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from math import gcd, isfinite
from pathlib import Path
from typing import Annotated, Literal, assert_never

import msgspec
from msgspec import Meta

from kvrs.errors import ConfigError, nearest
from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.profiles.tables import DecodeGrid, DecodeTable, PrefillTable
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


MAX_FILE_BYTES = 8 << 20
_LINKS = "links.json"  # Name of the file with the links, in the folder of the profiles.


def names() -> list[str]:
    files = (file.name for file in _folder().iterdir())
    return sorted(
        name.removesuffix(".json") for name in files if name.endswith(".json") and name != _LINKS
    )


@cache
def profile(name: str) -> Profile:
    """Return the profile shipped under a name, or read the user's file if `name` is a path (it has
    a `/` or ends in `.json`).

    Raises:
        ConfigError: no such profile, or a wrong file; the message names path and reason.
    """
    if "/" in name or name.endswith(".json"):
        return _read(Path(name))
    # The name is checked against the listing before a path is made of it: a name must not leave the
    # folder.
    if name not in names():
        near = nearest(name, names())
        allowed = f"a name{near} (kvrs docs profiles)" if near else ", ".join(names())
        raise ConfigError(f"got {name!r}; allowed: a path to a profile, or {allowed}")
    found = msgspec.json.decode(_folder().joinpath(f"{name}.json").read_bytes(), type=Profile)
    assert found.label == name, f"{name}.json is labelled {found.label}"
    assert not list(faults(found)), list(faults(found))
    return found


@cache
def prefill_table(name: str) -> PrefillTable:
    """Return the profile's prefill table, with the engine's own time added to each step. Raises
    ConfigError: see `profile`.
    """
    found = profile(name)
    table = _prefill_table(found).plus(found.engine_step_s)
    return replace(table, is_estimated=found.kind == "estimated")


def _prefill_table(found: Profile) -> PrefillTable:
    match found.prefill:
        case PrefillPoints(seconds=seconds, cached=cached):
            line = PrefillTable.from_points(found.label, found.source, seconds)
            if cached is None:
                return line
            # Two rows of the grid suffice: it is bilinear, and so is the time for cached tokens, a
            # product of both lengths.
            far = [
                value
                + j * line.step_tokens * cached.max_cached_tokens * cached.seconds_per_token_pair
                for j, value in enumerate(line.seconds)
            ]
            grid = PrefixGrid(line.step_tokens, cached.max_cached_tokens, [line.seconds, far])
            return PrefillTable.from_grid(
                found.label, found.source, grid, covered_from_tokens=line.covered_from_tokens
            )
        case PrefillQuadratic(coefficients_ms=coefficients_ms, max_tokens=max_tokens):
            return PrefillTable.from_quadratic(
                found.label, found.source, coefficients_ms, max_tokens=max_tokens
            )
        case PrefillRows(
            new_step_tokens=new_step_tokens, cached_step_tokens=cached_step_tokens, rows=rows
        ):
            return PrefillTable.from_grid(
                found.label, found.source, PrefixGrid(new_step_tokens, cached_step_tokens, rows)
            )
        case _:
            assert_never(found.prefill)


@cache
def decode_table(name: str) -> DecodeTable | DecodeGrid:
    """Return the profile's decode table. Raises ConfigError: see `profile`; or the profile has no
    decode table.
    """
    found = profile(name)
    match found.decode:
        case DecodeFit(large_from_batch=large_from_batch, small_ms=small_ms, large_ms=large_ms):
            return DecodeTable(found.label, found.source, large_from_batch, small_ms, large_ms)
        case DecodeRows(batches=batches, contexts=contexts, rows=rows):
            return DecodeGrid(found.label, found.source, batches, contexts, rows)
        case None:
            having = [other for other in names() if profile(other).decode is not None]
            raise ConfigError(f"{name!r} has no decode table; allowed: {', '.join(having)}")
        case _:
            assert_never(found.decode)


def engine_step_s(name: str) -> float:
    """Return the engine's own seconds per step, which the decode table leaves out. Raises
    ConfigError: see `profile`.
    """
    return profile(name).engine_step_s


def load_s(name: str) -> float:
    """Return the seconds that loading the model's weights takes. Raises ConfigError: see `load`."""
    return (found := load(name)).weight_bytes / found.bytes_per_s


def load(name: str) -> ModelLoad:
    """Return the profile's facts about loading the model's weights into its GPU. Raises
    ConfigError: see `profile`; or the profile has no load time.
    """
    found = profile(name).load
    if found is None:
        having = [other for other in names() if profile(other).load is not None]
        raise ConfigError(f"{name!r} has no load time; allowed: {', '.join(having)}")
    return found


def kv_geometry(name: str) -> KvGeometry:
    """Return the shape of the KV cache of the profile's model. Raises ConfigError: see
    `profile`.
    """
    return profile(name).geometry


@cache
def links() -> dict[str, ProfileLink]:
    """Links shipped with kvrs, by label."""
    found = msgspec.json.decode(_folder().joinpath(_LINKS).read_bytes(), type=list[ProfileLink])
    return {link.label: link for link in found}


def parse_profile(text: bytes, place: str) -> Profile:
    """Decode a profile file; errors call the file `place`.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        found = msgspec.json.decode(text, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: not a profile: {error}") from None
    if wrong := [f"{place}: {fault}" for fault in faults(found)]:
        raise ConfigError(wrong)
    return found


def _read(path: Path) -> Profile:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: got {path.stat().st_size} bytes; allowed: at most {MAX_FILE_BYTES}"
            )
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{str(path)!r}: {reason}; allowed: a profile file, or {', '.join(names())}"
        ) from None
    return parse_profile(text, str(path))


def _folder() -> Traversable:
    return resources.files("kvrs.profiles") / "data"


def faults_of_out(out: Path) -> list[str]:
    """Return the reasons why no profile can be written to `out`, which are checked before
    measuring.
    """
    if out.suffix != ".json" or out.is_dir():
        return [
            f"--out: got {out}; allowed: a name that ends in .json, by which `profiles.prefill` "
            f"knows it"
        ]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            return []
    except OSError as error:
        return [f"--out: {out.parent}: {error.strerror}"]


def write_profile(profile: Profile, out: Path) -> Path:
    """Write the file atomically; return its path."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
    parse_profile(text, str(out))
    temporary = out.with_name(f"{out.name}.new")
    temporary.write_bytes(text)
    temporary.replace(out)
    return out
