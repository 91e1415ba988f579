"""Sections `cluster.backend` and `cluster.distserve` of the configuration."""

from enum import StrEnum

from pydantic import Field

from kvrs.settings import Settings


class Backend(StrEnum):
    """Which engine the instances of a cluster are."""

    EMBEDDED = "embedded"  # Ours; `kvrs up` starts it.
    DISTSERVE = "distserve"  # With what `distserve_patches` adds. A node's prefill and decode instance are one server.
    VLLM = "vllm"  # As its project ships it; started by others.


class DistServeSettings(Settings):
    home: str | None = None  # A checkout of DistServe; none: the environment's DISTSERVE_HOME.
    flags: list[str] = Field(default_factory=list)  # DistServe's own, as on its command line; `--model` is `cluster.model`.
