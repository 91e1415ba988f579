"""Health of a node's GPUs, as agents report it."""

from enum import StrEnum
from typing import Annotated

import msgspec


class GpuState(StrEnum):
    """Health of a GPU, in rising severity."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # The GPU serves, but slower than it should, or a repair is due.
    FAILING = "failing"  # The GPU is lost, or is likely to fail with the processes on it.


class GpuHealth(msgspec.Struct, frozen=True, array_like=True):
    # The board's own name: indexes change when a board is lost.
    uuid: Annotated[str, msgspec.Meta(max_length=128)]
    index: Annotated[int, msgspec.Meta(ge=0)]  # Index of the board at the start of the agent.
    state: GpuState
    # Cause of the state; empty if healthy.
    reason: Annotated[str, msgspec.Meta(max_length=128)]
    # Time of the last change by the reporting node's clock; other nodes use the message's age.
    since_s: float
