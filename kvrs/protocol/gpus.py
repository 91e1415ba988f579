"""Health of a node's GPUs, as agents report it."""

from enum import StrEnum
from typing import Annotated

import msgspec


class GpuState(StrEnum):
    """Health of a GPU; later values are worse."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # The GPU serves, but slower than it should, or a repair is due.
    FAILING = "failing"  # The GPU is lost, or is likely to fail with the processes on it.


class GpuHealth(msgspec.Struct, frozen=True, array_like=True):
    # NVML's identifier of the board, which stays the same while indexes change as boards are lost.
    uuid: Annotated[str, msgspec.Meta(max_length=128)]
    index: Annotated[int, msgspec.Meta(ge=0)]  # Index that the board had when the agent started.
    state: GpuState
    # Cause of the state; empty if healthy.
    reason: Annotated[str, msgspec.Meta(max_length=128)]
    # Time at which `state` last changed, by the clock of the reporting node; other nodes compute
    # the age of the change from the message's age.
    since_s: float
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # Kind of the GPU; empty: not reported.
