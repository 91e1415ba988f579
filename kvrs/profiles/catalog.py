"""Profiles by name, as shipped with kvrs, or by path, as written by `kvrs profile`.

Profiles of different software generations differ by up to a factor of two on the same GPU, so a
table needs its labels: model, GPU, degree of tensor parallelism, engine, version, measured or
estimated, source.
"""

from dataclasses import replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import assert_never

import msgspec

from kvrs.errors import ConfigError, nearest
from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.profiles.schema import (
    DecodeFit,
    DecodeRows,
    ModelLoad,
    PrefillPoints,
    PrefillQuadratic,
    PrefillRows,
    Profile,
    ProfileLink,
    faults,
)
from kvrs.profiles.tables import DecodeGrid, DecodeTable, PrefillTable
from kvrs.protocol.geometry import KvGeometry

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
