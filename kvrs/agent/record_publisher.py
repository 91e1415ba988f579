"""Selects the facts that a node's agent publishes about its node in gossip. Pure: `now_s` is an
argument.

Every entry of a record is replicated to all nodes, so an entry is written again only when a
decision could come out differently, and at most once per second. A new, lost or replaced instance
is published at once.

    instance   unknown --report--> up --no report, or its connection ended--> lost
                                   ^---------------- report -------------------'
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvrs.gossip.facts import (
    Fact,
    FactKind,
    FailureFact,
    HolderFact,
    InstanceFact,
    LinkFact,
    SlotsFact,
)
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import GpuHealth, LinkReport, LoadReport, Role

POLL_INTERVAL_S = 0.25  # Period at which `RecordPublisher.changes` is called.
# Time without a report after which an instance, which reports four times per second, is lost.
REPORT_TIMEOUT_S = 5.0
_REWRITE_INTERVAL_S = 1.0  # Least interval between two writes of one entry.
# If a call of `changes` is late by more, this process was stopped, and instances were not silent in
# that time.
_STALL_S = 0.5
# A changed number is published only if it differs by more than this share of the larger value, and
# by more than the absolute change for numbers of its kind.
_MIN_CHANGE_SHARE = 0.2
_MIN_CHANGE_REQUESTS = 4
_MIN_CHANGE_DELAY_S = 0.02
_MIN_CHANGE_BYTES = 1 << 20
# A link that was measured again is published after this time even if its rate is the same, because
# the lower bound of a rate falls with the age of its measurement.
_LINK_REFRESH_S = 30.0
_MAX_CAUSE_CHARS = 128

Key = tuple[FactKind, str]


class RecordChanges(NamedTuple):
    written: list[tuple[str, Fact]]
    withdrawn: list[Key]


@dataclass(slots=True)
class _Instance:
    role: Role
    load: LoadReport | None = None  # Load in the last report; None: the instance was never reached.
    last_report_s: float = 0.0
    # Cause and time of the instance's loss; None: it is not lost.
    lost: tuple[str, float] | None = None


class RecordPublisher:
    """Selects the facts of one node to publish, by what is known of its instances and links and
    what was published before.
    """

    def __init__(self) -> None:
        self._instances: dict[InstanceId, _Instance] = {}
        # Latest report of the link from each node, and the time of its measurement.
        self._links: dict[NodeId, tuple[LinkReport, float]] = {}
        # Published facts, and the times at which they were written.
        self._published: dict[Key, tuple[Fact, float]] = {}
        self._polled_s: float | None = None

    # The agent reports its observations by the methods below.

    def add(self, name: InstanceId, role: Role) -> bool:
        """Add an instance; return False if it was added before."""
        is_new = name not in self._instances
        self._instances.setdefault(name, _Instance(role))
        return is_new

    def on_report(self, name: InstanceId, report: LoadReport, now_s: float) -> None:
        instance = self._instances[name]
        instance.load, instance.last_report_s, instance.lost = report, now_s, None
        for link in report.links:
            # Each instance of the node measures the link by itself; the latest measurement is
            # published.
            measured_s = now_s - link.age_s
            held = self._links.get(link.source)
            if held is None or measured_s >= held[1]:
                self._links[link.source] = link, measured_s

    def on_lost(self, name: InstanceId, cause: str, now_s: float) -> None:
        instance = self._instances[name]
        if instance.load is not None and instance.lost is None:
            instance.lost = cause[:_MAX_CAUSE_CHARS], now_s

    def changes(
        self,
        slots: Mapping[InstanceId, tuple[int, float]],
        holder: tuple[str, HolderFact],
        gpus: Iterable[GpuHealth],
        now_s: float,
    ) -> RecordChanges:
        """Return the facts to write into the node's record now, and the keys of entries to withdraw
        from it.
        """
        self._time_out(now_s)
        due: dict[Key, Fact] = {(FactKind.HOLDER, holder[0]): holder[1]}
        due |= {(FactKind.GPU, gpu.uuid): gpu for gpu in gpus}
        for name, instance in self._instances.items():
            if (load := instance.load) is None:
                continue
            if instance.lost is not None:
                cause, lost_s = instance.lost
                due[FactKind.FAILURE, name] = FailureFact(load.epoch, cause, now_s - lost_s)
            else:
                numbers = load.queued, load.running, load.queue_delay_s, load.free_pages
                due[FactKind.INSTANCE, name] = InstanceFact(instance.role, load.epoch, *numbers)
                due[FactKind.SLOTS, name] = SlotsFact(*slots[name])
        for source, (link, measured_s) in self._links.items():
            age_s = max(0.0, now_s - measured_s)
            due[FactKind.LINK, source] = LinkFact(link.bytes_per_s, link.spread, age_s)
        withdrawn = [key for key in self._published if key not in due]
        for key in withdrawn:
            del self._published[key]
        due = {key: fact for key, fact in due.items() if self._is_due(key, fact, now_s)}
        self._published |= {key: (fact, now_s) for key, fact in due.items()}
        return RecordChanges([(name, fact) for (_, name), fact in due.items()], withdrawn)

    def _time_out(self, now_s: float) -> None:
        polled_s, self._polled_s = self._polled_s, now_s
        missed_s = 0.0 if polled_s is None else now_s - polled_s - POLL_INTERVAL_S
        for name, instance in self._instances.items():
            if missed_s > _STALL_S:
                # Reports that came while this process was stopped are still unread.
                instance.last_report_s += missed_s
            if now_s - instance.last_report_s >= REPORT_TIMEOUT_S:
                self.on_lost(name, f"silent for {REPORT_TIMEOUT_S:g} s", now_s)

    def _is_due(self, key: Key, fact: Fact, now_s: float) -> bool:
        if key not in self._published:
            return True
        published, at_s = self._published[key]
        match published, fact:
            case InstanceFact() as old, InstanceFact() as new:
                if (old.role, old.epoch) != (new.role, new.epoch):
                    return True
                changed = (
                    _differ(old.queued, new.queued, _MIN_CHANGE_REQUESTS)
                    or _differ(old.running, new.running, _MIN_CHANGE_REQUESTS)
                    or _differ(old.queue_delay_s, new.queue_delay_s, _MIN_CHANGE_DELAY_S)
                    or _differ(old.free_pages, new.free_pages, 0)
                )
            case SlotsFact() as old, SlotsFact() as new:
                changed = _differ(old.free, new.free, _MIN_CHANGE_REQUESTS) or (old.free > 0) != (
                    new.free > 0
                )
            case HolderFact() as old, HolderFact() as new:
                changed = old.capacity_bytes != new.capacity_bytes or _differ(
                    old.reserved_bytes, new.reserved_bytes, _MIN_CHANGE_BYTES
                )
            case LinkFact() as old, LinkFact() as new:
                changed = (
                    _differ(old.bytes_per_s, new.bytes_per_s, 0)
                    or _differ(old.spread, new.spread, new.bytes_per_s / 20)
                    or old.age_s + now_s - at_s - new.age_s > _LINK_REFRESH_S
                )
            case FailureFact() as old, FailureFact() as new:
                return old.epoch != new.epoch
            case _:
                return published != fact
        return changed and now_s - at_s >= _REWRITE_INTERVAL_S


def _differ(old: float, new: float, floor: float) -> bool:
    return abs(old - new) > max(floor, _MIN_CHANGE_SHARE * max(old, new))
