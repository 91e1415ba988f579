"""Health of a node's GPUs, as agents report it."""

from enum import StrEnum
from typing import Annotated

import msgspec


class GpuState(StrEnum):
    """Health of a GPU, in rising severity."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # Serves, but slower than it should, or with a repair due.
    FAILING = "failing"  # Lost, or likely to take along what runs on it.


class GpuHealth(msgspec.Struct, frozen=True, array_like=True):
    # The board's own name: indexes change when a board is lost.
    uuid: Annotated[str, msgspec.Meta(max_length=128)]
    index: Annotated[int, msgspec.Meta(ge=0)]  # At the start of the agent.
    state: GpuState
    # Cause of the state; empty if healthy.
    reason: Annotated[str, msgspec.Meta(max_length=128)]
    # By the clock of the reporting node; other nodes use the age of the message.
    since_s: float
