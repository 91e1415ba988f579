"""What a node says of the health of its GPUs."""

from enum import StrEnum
from typing import Annotated

import msgspec


class GpuState(StrEnum):
    """In the order of their gravity."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # Serves, but slower than it should, or with a repair due.
    FAILING = "failing"  # Lost, or likely to take along what runs on it.


class GpuHealth(msgspec.Struct, frozen=True, array_like=True):
    uuid: Annotated[str, msgspec.Meta(max_length=128)]  # The board's own name: indexes change when a board is lost.
    index: Annotated[int, msgspec.Meta(ge=0)]  # At the start of whoever says this.
    state: GpuState
    reason: Annotated[str, msgspec.Meta(max_length=128)]  # What brought it into this state; of a healthy one, empty.
    # By the clock of the node that says it; whoever hears of it from another node goes by the age of the message.
    since_s: float
