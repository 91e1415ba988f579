"""The tables that come with kvrs, by name; every one says what it was measured or estimated on.

Profiles of different software generations differ by up to a factor of two on the same GPU, so a table without its
labels is worth little: model, GPU, degree of tensor parallelism, engine, version, measured or estimated, source.
"""

from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Literal

import msgspec

from kvrs.errors import ConfigError
from kvrs.profiles.tables import DecodeTable, PrefillTable
from kvrs.protocol.geometry import KvGeometry

Coefficients = tuple[float, float, float]


class PrefillPoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="points"):
    seconds: dict[int, float]  # By tokens.


class PrefillQuadratic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="quadratic"):
    coefficients_ms: Coefficients
    max_tokens: int  # The longest prompt that the fit stands for.


class DecodeFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    large_from_batch: int
    small_ms: Coefficients
    large_ms: Coefficients


class ModelLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the weights take to get into the GPU: an estimate, since no source of ours measured it."""

    weight_bytes: int
    bytes_per_s: float
    source: str


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data file. What its source does not state is null, never guessed."""

    label: str
    model: str
    dtype: str
    gpu: str
    tp: int | None
    engine: str
    version: str | None
    kind: Literal["measured", "estimated"]
    source: str
    geometry: KvGeometry
    prefill: PrefillPoints | PrefillQuadratic
    decode: DecodeFit | None = None
    load: ModelLoad | None = None


def names() -> list[str]:
    return sorted(file.name.removesuffix(".json") for file in _folder().iterdir() if file.name.endswith(".json"))


@cache
def profile(name: str) -> Profile:
    """The whole data file.

    Raises:
        ConfigError: there is none of this name.
    """
    # Compared with the listing, never joined to a path first: a name is not a way out of the folder.
    if name not in names():
        raise ConfigError([f"profiles: got {name!r}; allowed: {', '.join(names())}"])
    found = msgspec.json.decode(_folder().joinpath(f"{name}.json").read_bytes(), type=Profile)
    assert found.label == name, f"{name}.json is labelled {found.label}"
    return found


@cache
def prefill_table(name: str) -> PrefillTable:
    """Raises ConfigError: there is no profile of this name."""
    found = profile(name)
    match found.prefill:
        case PrefillPoints(seconds=seconds):
            return PrefillTable.from_points(name, found.source, seconds)
        case PrefillQuadratic(coefficients_ms=coefficients_ms, max_tokens=max_tokens):
            return PrefillTable.from_quadratic(name, found.source, coefficients_ms, max_tokens=max_tokens)


@cache
def decode_table(name: str) -> DecodeTable:
    """Raises ConfigError: there is no profile of this name, or it says nothing of decode."""
    found = profile(name)
    if found.decode is None:
        having = [other for other in names() if profile(other).decode is not None]
        raise ConfigError([f"profiles: {name!r} has no decode table; allowed: {', '.join(having)}"])
    fit = found.decode
    return DecodeTable(name, found.source, fit.large_from_batch, fit.small_ms, fit.large_ms)


def load_s(name: str) -> float:
    """Time to load the model's weights. Raises ConfigError: there is no profile of this name, or it does not say."""
    load = profile(name).load
    if load is None:
        having = [other for other in names() if profile(other).load is not None]
        raise ConfigError([f"profiles: {name!r} does not say how long its model loads; allowed: {', '.join(having)}"])
    return load.weight_bytes / load.bytes_per_s


def kv_geometry(name: str) -> KvGeometry:
    """The KV cache of the profile's model. Raises ConfigError: there is no profile of this name."""
    return profile(name).geometry


def _folder() -> Traversable:
    return resources.files("kvrs.profiles") / "data"
