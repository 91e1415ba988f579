"""The schedule of faults: finds the due faults of a list and their victims. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs_lab.faults.language import OF_A_LINK, Fault, Phase, Pick, VictimRole, When, Whom


@dataclass(frozen=True, slots=True)
class InstanceView:
    """State of an instance or agent that is up."""

    role: VictimRole
    node: NodeId
    # Streams that the instance works on; for an agent, streams with a reservation.
    inflight: int = 0
    # Streams that depend on the instance's work or pages.
    streams: Mapping[StreamId, Phase] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()  # Empty for a single process.
    stages: tuple[int, ...] = ()  # Stages in hosts.


@dataclass(frozen=True, slots=True)
class DueFault:
    fault: Fault
    # Instances and agents to hit; for a link, all at its two ends, which both send less.
    instances: tuple[InstanceId, ...]
    whom: str  # The victim's name: an instance, a node, or two nodes.
    inflight: int  # Streams in flight at the victim when the fault became due.
    streams: Mapping[StreamId, Phase]  # Streams that depended on the victim then.
    ranks: Mapping[InstanceId, int] = field(default_factory=dict)  # By victim that is hit in part.
    stages: Mapping[InstanceId, int] = field(default_factory=dict)  # By victim.


Choice = TypeVar("Choice")


class Chooser(Protocol):
    """The part of `random.Random` that a schedule uses."""

    def choice(self, candidates: Sequence[Choice], /) -> Choice: ...


class FaultSchedule:
    """The pending faults. Each is due once, and waits until a victim is up and busy enough."""

    def __init__(
        self, faults: list[Fault], seed: int, new_random: Callable[[int], Chooser]
    ) -> None:
        """Create a schedule; `new_random` makes a generator from a seed, like `random.Random`."""
        self._pending = list(faults)
        self._new_random = new_random
        self._rng = new_random(seed)

    @property
    def pending(self) -> tuple[Fault, ...]:
        return tuple(self._pending)

    def needs_load(self, elapsed_s: float, requests_sent: int) -> bool:
        """Return whether a pending fault has reached its time and request count, so that loads are
        needed.
        """
        return any(_time_has_come(fault.when, elapsed_s, requests_sent) for fault in self._pending)

    def due(
        self, elapsed_s: float, requests_sent: int, up: Mapping[InstanceId, InstanceView]
    ) -> list[DueFault]:
        """The faults to carry out now, in the order of the file.

        Args:
            elapsed_s: time since the start of the run.
            requests_sent: number of sent requests.
            up: every instance and agent that is up.
        """
        due: list[DueFault] = []
        for fault in list(self._pending):
            if not _time_has_come(fault.when, elapsed_s, requests_sent):
                continue
            # An instance dies once: two faults of the same moment have two victims.
            hit = {
                instance
                for other in due
                if other.fault.what not in OF_A_LINK
                for instance in other.instances
            }
            candidates = [
                group
                for group in possible_victims(fault.whom, up, hit)
                if _is_busy_enough(fault.when, group, up)
            ]
            if candidates:
                instances = self._choose(fault.whom, candidates, up)
                one_of_many = fault.whom.role is not None and fault.whom.pick is not Pick.ALL
                label = instances[0] if one_of_many else fault.whom.label
                load = (_inflight(instances, up), _streams(instances, up))
                ranks = self._parts(fault.whom.rank, {name: up[name].ranks for name in instances})
                stages = self._parts(
                    fault.whom.stage, {name: up[name].stages for name in instances}
                )
                due.append(DueFault(fault, instances, label, *load, ranks, stages))
                self._pending.remove(fault)
        return due

    def _parts(
        self, part: int | str | None, present: Mapping[InstanceId, tuple[int, ...]]
    ) -> dict[InstanceId, int]:
        """The rank or stage of each hit instance; empty: the whole instance."""
        if part is None:
            return {}
        if isinstance(part, int):
            return dict.fromkeys(present, part)
        return {name: self._rng.choice(parts) for name, parts in present.items()}

    def _choose(
        self,
        whom: Whom,
        candidates: list[tuple[InstanceId, ...]],
        up: Mapping[InstanceId, InstanceView],
    ) -> tuple[InstanceId, ...]:
        if whom.pick is Pick.RANDOM:
            rng = self._rng if whom.seed is None else self._new_random(whom.seed)
            return rng.choice(candidates)
        return max(candidates, key=lambda group: _inflight(group, up))


def _time_has_come(when: When, elapsed_s: float, requests_sent: int) -> bool:
    return elapsed_s >= (when.at_s or 0.0) and requests_sent >= (when.after_requests or 0)


def possible_victims(
    whom: Whom, up: Mapping[InstanceId, InstanceView], hit: Collection[InstanceId] = ()
) -> list[tuple[InstanceId, ...]]:
    """Groups of candidates that are not `hit` yet: single instances, a role, a whole node, or both
    ends of a link.
    """
    if whom.link is not None:
        ends = tuple(sorted(name for name, view in up.items() if view.node in whom.link))
        return [ends] if {up[name].node for name in ends} == set(whom.link) else []
    if whom.role is None and whom.node is not None:
        members = tuple(
            sorted(name for name, view in up.items() if view.node == whom.node and name not in hit)
        )
        return [members] if members else []
    meant = [name for name in sorted(up) if name not in hit and _is_meant(whom, name, up[name])]
    if whom.pick is Pick.ALL:
        return [tuple(meant)] if meant else []
    return [(name,) for name in meant]


def _is_meant(whom: Whom, instance: InstanceId, view: InstanceView) -> bool:
    for part, present in ((whom.rank, view.ranks), (whom.stage, view.stages)):
        if part is not None and (not present if part == "random" else part not in present):
            return False
    if whom.id is not None:
        return whom.id == instance
    does_both = view.role is VictimRole.BOTH and whom.role is not VictimRole.AGENT
    return (does_both or view.role is whom.role) and whom.node in (None, view.node)


def _is_busy_enough(
    when: When, group: tuple[InstanceId, ...], up: Mapping[InstanceId, InstanceView]
) -> bool:
    if _inflight(group, up) < (when.inflight_at_least or 0):
        return False
    if when.streams_at_least is None and when.phase is None:
        return True
    streams = _streams(group, up)
    if len(streams) < (when.streams_at_least or 0):
        return False
    return (
        when.phase is None
        or sum(phase is when.phase for phase in streams.values()) >= when.in_phase_at_least
    )


def _inflight(group: tuple[InstanceId, ...], up: Mapping[InstanceId, InstanceView]) -> int:
    return sum(up[name].inflight for name in group)


def _streams(
    group: tuple[InstanceId, ...], up: Mapping[InstanceId, InstanceView]
) -> dict[StreamId, Phase]:
    """Streams of all members; the instances of a pair may share a stream."""
    return {stream: phase for name in group for stream, phase in up[name].streams.items()}
