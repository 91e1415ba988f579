"""Targets of the victims of one event (LUMEN section 4.3, locality-aware recovery scheduling): to
their KV, then rebalanced away from overloaded targets.

The load of a target is its number of streams. Loads are those of the caller; nothing is booked.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec

from kvrs.config.policy import Dispatch
from kvrs.ids import InstanceId, StreamId


class Victim(msgspec.Struct, frozen=True):
    stream: StreamId
    homes: tuple[InstanceId, ...] = ()  # Targets on the node of its holder.
    held_pages: int = 0  # Of its history, at that holder.
    excluded_epochs: frozenset[InstanceId] = frozenset()  # Instances that failed it.


def assign(
    how: Dispatch, victims: Sequence[Victim], loads: Mapping[InstanceId, int]
) -> dict[StreamId, InstanceId]:
    """A target for each victim that has any; `loads` names the targets, without the victims."""
    loads = dict(loads)
    assigned: dict[StreamId, InstanceId] = {}
    # Victims with a holder are placed first, so that the others fill what is left.
    for victim in victims if how is not Dispatch.LEAST_LOADED else ():
        if victim.homes and (homes := _open(victim, loads, victim.homes)):
            _send(victim, _least(homes, loads), assigned, loads)
    for victim in victims:
        if victim.stream not in assigned and (allowed := _open(victim, loads, loads)):
            _send(victim, _least(allowed, loads), assigned, loads)
    if how is Dispatch.REBALANCE:
        _rebalance(victims, assigned, loads)
    return assigned


def ceiling(victims: int, loads: Mapping[InstanceId, int]) -> int:
    """The mean load once so many victims are placed, rounded up (LUMEN section 4.3); without any
    target 0.
    """
    return -(-(sum(loads.values()) + victims) // len(loads)) if loads else 0


def _rebalance(
    victims: Sequence[Victim], assigned: dict[StreamId, InstanceId], loads: dict[InstanceId, int]
) -> None:
    """From the most loaded target first, smallest checkpoint first, to the least loaded; each
    victim moves at most once.

    It ends when no target that has victims to give is above the ceiling of the mean, or no move
    would help.
    """
    limit = ceiling(0, loads)
    movable: dict[InstanceId, list[Victim]] = {}
    for victim in sorted(victims, key=attrgetter("held_pages"), reverse=True):
        if victim.stream in assigned:
            movable.setdefault(assigned[victim.stream], []).append(victim)
    while True:
        overloaded = [
            target for target, there in movable.items() if there and loads[target] > limit
        ]
        if not overloaded:
            return
        source = max(overloaded, key=lambda target: (loads[target], target))
        victim = movable[source].pop()
        target = _least(_open(victim, loads, loads), loads)
        if loads[target] + 1 < loads[source]:
            loads[source] -= 1
            _send(victim, target, assigned, loads)


def _send(
    victim: Victim,
    target: InstanceId,
    assigned: dict[StreamId, InstanceId],
    loads: dict[InstanceId, int],
) -> None:
    assigned[victim.stream] = target
    loads[target] += 1


def _open(
    victim: Victim, loads: Mapping[InstanceId, int], among: Iterable[InstanceId]
) -> list[InstanceId]:
    return [target for target in among if target in loads and target not in victim.excluded_epochs]


def _least(targets: Iterable[InstanceId], loads: Mapping[InstanceId, int]) -> InstanceId:
    """A loop, since it is run for each victim and `min` with a key takes five times as long."""
    best: InstanceId | None = None
    least = 0
    for target in targets:
        load = loads[target]
        if best is None or load < least or (load == least and target < best):
            best, least = target, load
    assert best is not None
    return best
