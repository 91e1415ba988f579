"""The choice of the agent for a stream's checkpoint: the agent of another node that would restore
the stream soonest (LUMEN section 4.2, Eq. 1).

Restore pressure is a mean over an agent's checkpoints, and does not grow with their number. So that
one node need not restore all streams of a lost node, the agents within `_NEAR_S` of the best one
share the checkpoints of each serving node.

The ring is the order of the node ids: it is the same at every proxy without a membership protocol.
"""

from collections.abc import Sequence
from typing import TypeVar, assert_never

import msgspec

from kvrs.config.backup import Placement
from kvrs.ids import InstanceId, NodeId, along_ring

T = TypeVar("T")


class PlacementCandidate(msgspec.Struct, frozen=True, gc=False):
    """An agent that is up: one row of the load table of LUMEN section 4.2."""

    holder: InstanceId
    node: NodeId
    queueing_delay_s: float  # Wait of new work at the agent's node.
    reserved_bytes: int
    checkpoints: int  # Number of checkpoints in `reserved_bytes`.
    capacity_bytes: int
    host_to_device_bytes_per_s: float
    of_serving_bytes: int = 0  # The part of `reserved_bytes` for streams of the serving node.


# The largest number of agents that are considered for one stream: it bounds the time of a decision.
CANDIDATES_MAX = 64

# Agents whose loads differ by less (in seconds), about one decode step, count as equal.
_NEAR_S = 0.02


def place(
    how: Placement,
    candidates: Sequence[PlacementCandidate],
    serving: NodeId,
    need_bytes: int,
    alpha: float,
    draw: int,
) -> PlacementCandidate | None:
    """Choose the agent for a checkpoint of `need_bytes` of a stream that `serving` decodes.

    Agents on the serving node, whose loss would take both copies, and agents without room are left
    out. `alpha` weighs restore pressure against queueing delay; `draw` is the stream's number, so
    that the choice is deterministic.
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
    """Return at most `CANDIDATES_MAX` agents for the stream with number `draw`; over many streams
    every agent is returned equally often.
    """
    step = -(-len(agents) // CANDIDATES_MAX)
    return agents[_mixed(draw) % step :: step] if step > 1 else agents


def load_s(candidate: PlacementCandidate, need_bytes: int, alpha: float) -> float:
    """Return the load by LUMEN Eq. 1: queueing delay + alpha * restore pressure.

    Restore pressure is the time to copy the agent's mean checkpoint, the new one included, from
    host memory to the device.
    """
    mean_bytes = (candidate.reserved_bytes + need_bytes) / (candidate.checkpoints + 1)
    return candidate.queueing_delay_s + alpha * mean_bytes / candidate.host_to_device_bytes_per_s


def _has_room(candidate: PlacementCandidate, need_bytes: int) -> bool:
    return candidate.reserved_bytes + need_bytes <= candidate.capacity_bytes


def _mixed(number: int) -> int:
    """Hash a stream number with SplitMix64's finalizer, so that consecutive numbers do not choose
    agents in turn.
    """
    mask = (1 << 64) - 1
    number = (number + 0x9E3779B97F4A7C15) & mask
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return number ^ (number >> 31)
