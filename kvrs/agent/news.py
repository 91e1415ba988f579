"""What a node's agent says of its node in gossip, and when it says it anew. Pure: `now_s` is an argument.

Every entry of a record travels to everybody, so one is written again only when a decision could come out differently, and not
more than once a second; what appears, dies or is replaced is written at once.

    instance   unknown --who it is--> up --report--> up ...      silent, or its connection ended: lost, with the cause
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvrs.gossip.facts import Fact, FailureFact, HolderFact, InstanceFact, Kind, LinkFact, SlotsFact
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.gpus import GpuHealth
from kvrs.protocol.instance import InstanceInfo, LinkReport, LoadReport

LOOK_S = 0.25  # How often the agent looks whether there is news.
SILENT_S = 5.0  # An instance that reports four times a second and says nothing for so long is lost, for all that can be seen.
_AGAIN_S = 1.0
_LATE_S = 0.5  # Looking so much too late, this process has not listened.
_NOTICEABLE = 0.2  # Part of a number.
_FEW = 4  # Of requests; a change by less decides nothing.
_SHORT_S = 0.02
_OLD_S = 30.0  # A link that was measured again is said to be, lest its bound sink for ever.
_MAX_CAUSE_CHARS = 128

Key = tuple[Kind, str]


class News(NamedTuple):
    written: list[tuple[str, Fact]]
    withdrawn: list[Key]


@dataclass(slots=True)
class _Instance:
    info: InstanceInfo | None = None
    load: LoadReport | None = None
    heard_s: float = 0.0
    lost: tuple[int, str, float] | None = None  # Epoch, cause, when.


@dataclass(slots=True)
class _Link:
    report: LinkReport
    measured_s: float


@dataclass(slots=True)
class _Said:
    fact: Fact
    at_s: float


class NodeNews:
    def __init__(self, instances: Iterable[InstanceId]) -> None:
        self._instances = {name: _Instance() for name in instances}
        self._links: dict[NodeId, _Link] = {}
        self._said: dict[Key, _Said] = {}
        self._looked_s: float | None = None

    # What the agent sees of its node's instances.

    def met(self, name: InstanceId, info: InstanceInfo, now_s: float) -> None:
        seen = self._instances[name]
        seen.info, seen.heard_s, seen.lost = info, now_s, None

    def reported(self, name: InstanceId, report: LoadReport, now_s: float) -> None:
        seen = self._instances[name]
        seen.load, seen.heard_s, seen.lost = report, now_s, None
        for link in report.links:
            # Each instance of the node measures by itself; who did so last is right.
            measured_s = now_s - link.age_s
            held = self._links.get(link.source)
            if held is None or measured_s >= held.measured_s:
                self._links[link.source] = _Link(link, measured_s)

    def lost(self, name: InstanceId, cause: str, now_s: float) -> None:
        seen = self._instances[name]
        if seen.info is not None and seen.lost is None:
            seen.lost = seen.info.epoch, cause[:_MAX_CAUSE_CHARS], now_s

    def look(
        self,
        slots: Mapping[InstanceId, tuple[int, float]],
        holder: tuple[str, HolderFact],
        gpus: Iterable[GpuHealth],
        now_s: float,
    ) -> News:
        """What is to be written into the node's record now, and what to be taken out."""
        self._end_silence(now_s)
        due: dict[Key, Fact] = {(Kind.HOLDER, holder[0]): holder[1]}
        due |= {(Kind.GPU, gpu.uuid): gpu for gpu in gpus}
        for name, seen in self._instances.items():
            if seen.info is not None and seen.load is not None and seen.lost is None:
                due[Kind.INSTANCE, name] = _instance_fact(seen.info, seen.load)
                free, wait_s = slots[name]
                due[Kind.SLOTS, name] = SlotsFact(free, wait_s)
            elif seen.lost is not None:
                epoch, cause, lost_s = seen.lost
                due[Kind.FAILURE, name] = FailureFact(epoch, cause, max(0.0, now_s - lost_s))
        for source, link in self._links.items():
            age_s = max(0.0, now_s - link.measured_s)
            due[Kind.LINK, source] = LinkFact(link.report.bytes_per_s, link.report.spread, age_s)
        written = [(key, fact) for key, fact in due.items() if self._is_news(key, fact, now_s)]
        withdrawn = [key for key in self._said if key not in due]
        for key in withdrawn:
            del self._said[key]
        for key, fact in written:
            self._said[key] = _Said(fact, now_s)
        return News([(name, fact) for (_, name), fact in written], withdrawn)

    def _end_silence(self, now_s: float) -> None:
        looked_s, self._looked_s = self._looked_s, now_s
        missed_s = 0.0 if looked_s is None else now_s - looked_s - LOOK_S
        for name, seen in self._instances.items():
            if missed_s > _LATE_S:
                # What was said meanwhile is still to be read.
                seen.heard_s += missed_s
            if now_s - seen.heard_s >= SILENT_S:
                self.lost(name, f"silent for {SILENT_S:g} s", now_s)

    def _is_news(self, key: Key, fact: Fact, now_s: float) -> bool:
        said = self._said.get(key)
        if said is None:
            return True
        match said.fact, fact:
            case InstanceFact() as old, InstanceFact() as new:
                if (old.role, old.epoch) != (new.role, new.epoch):
                    return True
                changed = _load_differs(old, new)
            case SlotsFact() as old, SlotsFact() as new:
                changed = _differ(old.free, new.free, _FEW) or (old.free > 0) != (new.free > 0)
            case HolderFact() as old, HolderFact() as new:
                changed = old.capacity_bytes != new.capacity_bytes or _differ(old.reserved_bytes, new.reserved_bytes, 1 << 20)
            case LinkFact() as old, LinkFact() as new:
                believed_age_s = old.age_s + now_s - said.at_s
                changed = _differ(old.bytes_per_s, new.bytes_per_s, 0) or _differ(old.spread, new.spread, new.bytes_per_s / 20)
                changed |= believed_age_s - new.age_s > _OLD_S
            case FailureFact() as old, FailureFact() as new:
                return old.epoch != new.epoch
            case _:
                return said.fact != fact
        return changed and now_s - said.at_s >= _AGAIN_S


def _instance_fact(info: InstanceInfo, load: LoadReport) -> InstanceFact:
    return InstanceFact(info.role, load.epoch, load.queued, load.running, load.queue_delay_s, load.free_pages)


def _load_differs(old: InstanceFact, new: InstanceFact) -> bool:
    return (
        _differ(old.queued, new.queued, _FEW)
        or _differ(old.running, new.running, _FEW)
        or _differ(old.queue_delay_s, new.queue_delay_s, _SHORT_S)
        or _differ(old.free_pages, new.free_pages, 0)
    )


def _differ(old: float, new: float, floor: float) -> bool:
    return abs(old - new) > max(floor, _NOTICEABLE * max(old, new))
