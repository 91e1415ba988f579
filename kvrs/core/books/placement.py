"""The agent that stores a stream's checkpoint: that of another node which would restore it soonest
(LUMEN section 4.2, Eq. 1).

Restore pressure is a mean, so it says nothing about how many checkpoints an agent keeps: agents
that are nearly as good as the best one share the checkpoints of each serving node out, or one node
would restore all that a lost one had.

The ring is the order of the nodes' ids: it needs no membership protocol, and every proxy sees the
same one.
"""

from collections.abc import Sequence
from typing import TypeVar, assert_never

import msgspec

from kvrs.config.backup import Placement
from kvrs.ids import InstanceId, NodeId, along_ring

T = TypeVar("T")


class PlacementCandidate(msgspec.Struct, frozen=True, gc=False):
    """A row of the load table: an agent that is up. A stream has one of each agent made, so that
    they are many in a large cluster.
    """

    holder: InstanceId
    node: NodeId
    queueing_delay_s: float  # Until work that comes to its node now begins.
    reserved_bytes: int
    checkpoints: int  # Among which `reserved_bytes` are shared out.
    capacity_bytes: int
    host_to_device_bytes_per_s: float
    of_serving_bytes: int = 0  # Among `reserved_bytes`, for streams that the serving node decodes.


# In a larger cluster the checkpoint of a stream is placed among so many agents, so that a decision
# takes no longer there; those of the next stream are others.
CANDIDATES_MAX = 64

# A difference of less makes no restore noticeably later: about one decode step.
_NEAR_S = 0.02


def place(
    how: Placement,
    candidates: Sequence[PlacementCandidate],
    serving: NodeId,
    need_bytes: int,
    alpha: float,
    draw: int,
) -> PlacementCandidate | None:
    """The agent for a checkpoint of `need_bytes` of a stream that `serving` decodes, if any.

    Never the serving node, which may take both copies with it, and never one without room. `alpha`
    weighs restore pressure against queueing delay; `draw` is a fixed number of the stream, so that
    the answer is the same every time.
    """
    others = [candidate for candidate in candidates if candidate.node != serving]
    if not others:
        return None

    def steps(candidate: PlacementCandidate) -> tuple[bool, NodeId]:
        return along_ring(serving, candidate.node)

    match how:
        case Placement.LOAD:
            roomy = [other for other in others if _has_room(other, need_bytes)]
            loads_s = [load_s(other, need_bytes, alpha) for other in roomy]
            limit_s = min(loads_s, default=0.0) + _NEAR_S
            return min(
                (other for other, own_s in zip(roomy, loads_s, strict=True) if own_s <= limit_s),
                key=lambda other: (other.of_serving_bytes, other.reserved_bytes, steps(other)),
                default=None,
            )
        case Placement.FIXED:
            following = min(others, key=steps)
            return following if _has_room(following, need_bytes) else None
        case Placement.RANDOM:
            roomy = sorted((other for other in others if _has_room(other, need_bytes)), key=steps)
            return roomy[_mixed(draw) % len(roomy)] if roomy else None
        case _:
            assert_never(how)


def weighed(agents: Sequence[T], draw: int) -> Sequence[T]:
    """Those among which the checkpoint of the stream with this number is placed by load; over the
    streams every agent is among them as often.
    """
    step = -(-len(agents) // CANDIDATES_MAX)
    return agents[_mixed(draw) % step :: step] if step > 1 else agents


def load_s(candidate: PlacementCandidate, need_bytes: int, alpha: float) -> float:
    """LUMEN Eq. 1: queueing delay plus alpha times restore pressure, which is how long the mean
    checkpoint kept there, the new one included, takes from host memory into the device.
    """
    mean_bytes = (candidate.reserved_bytes + need_bytes) / (candidate.checkpoints + 1)
    return candidate.queueing_delay_s + alpha * mean_bytes / candidate.host_to_device_bytes_per_s


def _has_room(candidate: PlacementCandidate, need_bytes: int) -> bool:
    return candidate.reserved_bytes + need_bytes <= candidate.capacity_bytes


def _mixed(number: int) -> int:
    """SplitMix64's finalizer: a remainder of consecutive stream numbers would be a round robin."""
    mask = (1 << 64) - 1
    number = (number + 0x9E3779B97F4A7C15) & mask
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return number ^ (number >> 31)
