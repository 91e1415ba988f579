"""Sections `cluster.engine` and `elastic` of the configuration: the embedded engine, and its
instances of several ranks. Imports no torch, so that the proxy can read the file too.
"""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from kvrs.config.settings import Settings


class BatchSettings(Settings):
    """Settings that the scheduler reads."""

    page_size_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens per KV page; a power of two."""
    pages: int = Field(default=2048, ge=2, le=1 << 24)
    """KV pages of one instance."""
    max_batch_tokens: int = Field(default=256, ge=1, le=1 << 20)
    """Most tokens computed per step: decode first, then chunks of prefill."""
    max_running: int = Field(default=64, ge=1, le=1 << 16)
    """Most sequences that own pages at a time."""
    max_model_len: int = Field(default=2048, ge=2, le=1 << 24)
    """Most tokens of prompt and output together."""


class EngineSettings(BatchSettings):
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu or cuda."""
    pace: str | None = None
    """Name of a profile: the engine sleeps so that each step takes that profile's time. Tokens and
    KV are real; only the pace is another GPU's.
    """
    disk_bytes_per_s: float | None = Field(default=None, gt=0)
    """Rate at which weights are read, including those of a draft model, which come first; with
    `pace`, those of the profile's model. Ranks of one process that read at the same time share it.
    null: as fast as the disk allows, in simulations 2 GB/s.
    """
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the weights of the generated model."""

    @field_validator("page_size_tokens")
    @classmethod
    def _fills_vectors(cls, page_size_tokens: int) -> int:
        # Keys are computed in blocks of whole pages, which must fill whole SIMD vectors.
        if page_size_tokens & (page_size_tokens - 1):
            raise PydanticCustomError("page_size", "allowed: a power of two from 1 to 1024")
        return page_size_tokens


class ExpertSettings(Settings):
    """Section `elastic.experts`: models with mixtures of experts on several ranks."""

    layout: Literal["whole", "split"] = "whole"
    """whole: a rank has as few experts as possible, and complete ones if shares allow it. split:
    each rank has a part of every expert, so that all ranks have equal work whatever experts are
    chosen; for models whose experts are wide enough to be divided.
    """
    room_share: float = Field(default=0.1, ge=0, le=8)
    """Memory of a rank for copies of experts that are chosen often, relative to its own weights.
    Ranks share the rows of these experts if that makes the busiest ranks faster. Results do not
    depend on it. Not for instances with `stage_hosts`. 0: no copies.
    """


# The planner divides weights among the ranks that are left, or join.
Planner = Literal["on_demand", "cmm"]


class ElasticSettings(Settings):
    enabled: bool = True
    """An instance that loses one of several ranks continues with the others, in the same process
    and with the same streams, and grows back. false: a lost rank ends its instance.
    """
    spread_heads: bool = False
    """For KV heads that cannot be divided evenly, each rank computes them for its own share of the
    streams, so that with at least as many streams as ranks all ranks have equal work. Every rank
    then has the weights of these heads; without room for these, the setting has no effect. false:
    some of the ranks compute these heads for all streams.
    """
    planner: Planner = "on_demand"
    """How weights are divided again when ranks are lost, leave or join. on_demand: a rank keeps its
    weights, and lost ones are distributed to all (RaidServe). cmm: each rank gets an even share of
    consecutive units, copied from ranks that have it and otherwise read (AnchorTP's Continuous
    Minimal Migration). Both read the same bytes; cmm usually copies more.
    """
    min_ranks: int = Field(default=1, ge=1, le=4096)
    """Fewest ranks with which an instance serves; with fewer it starts the lost ones again, or
    ends. At most the ranks of the smallest instance that has several ranks.
    """
    least_gain: float = Field(default=0.1, ge=0, le=1)
    """Least gain for which a stage is lent: min(1, (1 - busy share of the donor's stage) / busy
    share of the lost one).
    """
    experts: ExpertSettings = ExpertSettings()
    """Mixtures of experts on several ranks."""
