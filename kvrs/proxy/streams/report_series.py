"""Series of what workers report with their loads: one row each, also of a feature that reports more
than those before it.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvrs.core.model.member import Member
from kvrs.ids import InstanceId
from kvrs.protocol.instance import PREFIX, LoadReport
from kvrs.protocol.page_messages import TrafficClass
from kvrs.protocol.stages import StageInfo

KV_KINDS = (*(traffic.label for traffic in TrafficClass), PREFIX)

Labels = tuple[str, ...]  # Values of the labels behind `worker`.
Found = float | Mapping[Labels, float] | None  # None: the report has nothing of it.


class Reported(NamedTuple):
    """One series: its values in a report, by its labels if it has some."""

    name: str
    help: str
    read: Callable[[LoadReport], Found]
    labels: tuple[str, ...] = ()
    has_role: bool = False  # Its one label is the role of the worker.
    in_groups: bool = False  # Only workers of a group have it.
    of_engine: bool = False  # Only the embedded engine reports it.
    from_start: tuple[Labels, ...] = ()  # It is 0 for these before the first report.

    def values(self, known: Member) -> Mapping[Labels, float]:
        if known.load is None or (self.in_groups and known.group is None):
            return {}
        found = self.read(known.load)
        if found is None:
            return {}
        if isinstance(found, Mapping):
            return found
        return {(known.role,) if self.has_role else (): found}

    @property
    def all_labels(self) -> Labels:
        return ("worker", "role") if self.has_role else ("worker", *self.labels)


def _ring(load: LoadReport, read: Callable[[StageInfo], int]) -> Mapping[Labels, float]:
    """By stages that bring parts of their pages to those of other instances, or should do so."""
    return {
        (str(each.stage),): read(each)
        for each in load.stages
        if each.replica_to or each.unprotected
    }


def _hand_off_faults(load: LoadReport) -> Found:
    if (report := load.hand_offs) is None:
        return None
    return {
        ("failed",): report.failed_transfers,
        ("expired",): report.expired,
        ("late",): report.late_notices,
    }


def _drafts(load: LoadReport) -> Found:
    if (drafts := load.speculation) is None:
        return None
    return {
        (drafts.source, "accepted"): drafts.accepted,
        (drafts.source, "rejected"): max(0, drafts.proposed - drafts.accepted),
        (drafts.source, "stale"): drafts.stale,
    }


def _replicas(load: LoadReport, pages: int) -> Found:
    return pages if load.replica_pages + load.replica_dropped_pages else None


# A gauge has no sample of a worker whose report has no value for it, or that is down: the last one
# would be taken for its load.
GAUGES = (
    Reported(
        "kvrs_worker_queued_requests",
        "Requests of all proxies in the queue of the worker.",
        lambda load: load.queued,
        has_role=True,
    ),
    Reported(
        "kvrs_worker_free_pages",
        "KV pages of the worker that are free.",
        lambda load: load.free_pages,
        has_role=True,
    ),
    Reported(
        "kvrs_worker_queue_seconds",
        "Time that a request which arrives now waits at the worker, by its own prediction.",
        lambda load: load.queue_delay_s,
        has_role=True,
    ),
    Reported(
        "kvrs_worker_degree",
        "Ranks that compute, of a worker that has several.",
        lambda load: load.degree if load.full_degree else None,
        has_role=True,
        of_engine=True,
    ),
    Reported(
        "kvrs_worker_full_degree",
        "Ranks that a worker of several was configured with.",
        lambda load: load.full_degree or None,
        has_role=True,
        of_engine=True,
    ),
    Reported(
        "kvrs_instance_expert_skew",
        "Load of the rank with most to do over the mean one, for experts chosen lately.",
        lambda load: None if load.experts is None else load.experts.skew,
        has_role=True,
        of_engine=True,
    ),
    Reported(
        "kvrs_instance_expert_copies",
        "Copies of experts, beside their owners'.",
        lambda load: None if load.experts is None else load.experts.copies,
        has_role=True,
        of_engine=True,
    ),
    Reported(
        "kvrs_checkpoint_lag_pages",
        "Full pages of protected streams that the worker has not sent to an agent yet.",
        lambda load: load.checkpoint_lag_pages,
    ),
    Reported(
        "kvrs_replica_pages",
        "Pages that the worker keeps for other ones.",
        lambda load: _replicas(load, load.replica_pages),
        of_engine=True,
    ),
    Reported(
        "kvrs_replica_lag_pages",
        "Full pages of which the stage's part is not at its target yet.",
        lambda load: _ring(load, lambda stage: stage.replica_lag_pages),
        labels=("stage",),
        of_engine=True,
    ),
    Reported(
        "kvrs_lent_pages",
        "Pages of its stages that the worker lends others.",
        lambda load: sum(each.pages for each in load.lends),
        in_groups=True,
        of_engine=True,
    ),
    Reported(
        "kvrs_borrowed_stages",
        "Stages of the worker that the host of another one computes.",
        lambda load: sum(each.donor is not None for each in load.stages),
        in_groups=True,
        of_engine=True,
    ),
)
# Counted by the worker since its start.
TOTALS = (
    Reported(
        "kvrs_worker_rank_deaths",
        "Ranks that a worker of several has lost, and goes on without.",
        lambda load: load.rank_deaths if load.full_degree else None,
        of_engine=True,
    ),
    Reported(
        "kvrs_worker_kv_bytes",
        "KV that the worker has fetched, for recoveries, hand-offs or new prompts, or has sent as "
        "checkpoints.",
        lambda load: {(kind,): load.kv_bytes.get(kind, 0) for kind in KV_KINDS},
        labels=("kind",),
        from_start=tuple((kind,) for kind in KV_KINDS),
    ),
    Reported(
        "kvrs_draft_tokens",
        "Drafts that came to the worker's engine: accepted, rejected, or stale when it was their "
        "turn.",
        _drafts,
        labels=("source", "outcome"),
    ),
    Reported(
        "kvrs_hand_off_faults",
        "Hand-offs of vLLM by NIXL's counters: failed, never read, or read behind their lease.",
        _hand_off_faults,
        labels=("kind",),
    ),
    Reported(
        "kvrs_expert_rebalances",
        "Changes of copies of experts on the worker's ranks.",
        lambda load: None if load.experts is None else load.experts.rebalances,
        of_engine=True,
    ),
    Reported(
        "kvrs_damaged_pages",
        "Damaged pages that the worker has fetched.",
        lambda load: load.damaged_pages,
        from_start=((),),
    ),
    Reported(
        "kvrs_adopted_pages",
        "Pages that streams of the worker went on with out of a donor's replicas.",
        lambda load: load.adopted_pages if _ring(load, lambda stage: 0) else None,
        of_engine=True,
    ),
)


class Total:
    """A counter that follows totals of other processes, which begin again at 0 with these."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: dict[Labels, float] = {}

    def follow(self, total: float, *labels: str) -> None:
        counter = self._counter.labels(*labels) if labels else self._counter
        last = self._last.get(labels, 0)
        counter.inc(total - last if total >= last else total)
        self._last[labels] = total


class ReportSeries:
    """The series of both tables. Counters of a worker that is removed stay."""

    def __init__(self, common: CollectorRegistry, of_engine: CollectorRegistry) -> None:
        """`of_engine`: for rows that only the embedded engine reports."""

        def registry(row: Reported) -> CollectorRegistry:
            return of_engine if row.of_engine else common

        self._gauges = [
            (row, Gauge(row.name, row.help, row.all_labels, registry=registry(row)))
            for row in GAUGES
        ]
        self._totals = [
            (row, Total(Counter(row.name, row.help, row.all_labels, registry=registry(row))))
            for row in TOTALS
        ]
        self._shown: dict[tuple[str, InstanceId], tuple[Labels, ...]] = {}

    def add(self, worker: InstanceId) -> None:
        for row, total in self._totals:
            for labels in row.from_start:
                total.follow(0, worker, *labels)

    def remove(self, worker: InstanceId) -> None:
        for row, gauge in self._gauges:
            for labels in self._shown.pop((row.name, worker), ()):
                gauge.remove(worker, *labels)

    def measure(self, known: Member) -> None:
        for row, gauge in self._gauges:
            values = row.values(known)
            for labels in self._shown.get((row.name, known.id), ()):
                if labels not in values:
                    gauge.remove(known.id, *labels)
            self._shown[row.name, known.id] = tuple(values)
            for labels, value in values.items():
                gauge.labels(known.id, *labels).set(value)
        for row, total in self._totals:
            for labels, value in row.values(known).items():
                total.follow(value, known.id, *labels)
