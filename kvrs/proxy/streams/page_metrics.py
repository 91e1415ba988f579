"""Metrics of pages that workers keep for others or lend, and of the kvrs connectors in vLLM."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvrs.core.model.member import Member
from kvrs.ids import InstanceId
from kvrs.protocol.instance import ConnectorReport, LoadReport


class Total:
    """A counter that follows totals of other processes, which begin again at 0 with these."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: dict[tuple[str, ...], int] = {}

    def follow(self, total: int, *labels: str) -> None:
        counter = self._counter.labels(*labels) if labels else self._counter
        last = self._last.get(labels, 0)
        counter.inc(total - last if total >= last else total)
        self._last[labels] = total


class ReplicaMetrics:
    """Pages that workers keep for other ones; those that keep none have no series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pages = Gauge(
            "kvrs_replica_pages",
            "Pages that the worker keeps for other ones.",
            ["worker"],
            registry=registry,
        )
        self._dropped = Total(
            Counter(
                "kvrs_replica_dropped_pages",
                "Pages of other workers that the worker gave up for its own streams.",
                ["worker"],
                registry=registry,
            )
        )

        self._ring = RingMetrics(registry)

    def remove(self, worker: InstanceId) -> None:
        self._pages.remove(worker)
        self._ring.remove(worker)

    def measure(self, worker: InstanceId, load: LoadReport | None) -> None:
        self._ring.measure(worker, load)
        if load is None or not load.replica_pages + load.replica_dropped_pages:
            self._pages.remove(worker)
            return
        self._pages.labels(worker).set(load.replica_pages)
        self._dropped.follow(load.replica_dropped_pages, worker)


class LendingMetrics:
    """Stages that workers borrow and pages that they lend; those without a group have no series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry, labelnames=["worker"])
        self._lent = gauge("kvrs_lent_pages", "Pages of its stages that the worker lends others.")
        self._borrowed = gauge(
            "kvrs_borrowed_stages", "Stages of the worker that the host of another one computes."
        )

    def remove(self, worker: InstanceId) -> None:
        for gauge in (self._lent, self._borrowed):
            gauge.remove(worker)

    def measure(self, known: Member) -> None:
        load = known.load
        if load is None or known.group is None:
            self.remove(known.id)
            return
        self._lent.labels(known.id).set(sum(each.pages for each in load.lends))
        borrowed = sum(each.donor is not None for each in load.stages)
        self._borrowed.labels(known.id).set(borrowed)


class RingMetrics:
    """Parts of pages that stages of workers bring to those of others, and what came back of such;
    where none are sent there are no series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["worker", "stage"]
        self._lag = Gauge(
            "kvrs_replica_lag_pages",
            "Full pages of which the stage's part is not at its target yet.",
            labels,
            registry=registry,
        )
        counter = partial(Counter, registry=registry)
        self._sent = Total(
            counter("kvrs_replica_sent_bytes", "Parts that the stage has brought there.", labels)
        )
        self._dropped = Total(
            counter(
                "kvrs_replica_refused_pages", "Of these, what was not taken or not kept.", labels
            )
        )
        self._adopted = Total(
            counter(
                "kvrs_adopted_pages",
                "Pages that streams of the worker went on with out of a donor's replicas.",
                ["worker"],
            )
        )
        self._stages: dict[InstanceId, list[str]] = {}

    def remove(self, worker: InstanceId) -> None:
        for stage in self._stages.pop(worker, ()):
            self._lag.remove(worker, stage)

    def measure(self, worker: InstanceId, load: LoadReport | None) -> None:
        stages = [] if load is None else load.stages
        shown = [each for each in stages if each.replica_to or each.unprotected]
        if load is None or not shown:
            self.remove(worker)
            return
        self._stages[worker] = [str(each.stage) for each in shown]
        for each, stage in zip(shown, self._stages[worker], strict=True):
            self._lag.labels(worker, stage).set(each.replica_lag_pages)
            self._sent.follow(each.replica_sent_bytes, worker, stage)
            self._dropped.follow(each.replica_dropped_pages, worker, stage)
        self._adopted.follow(load.adopted_pages, worker)


class ConnectorMetrics:
    """Reports of the kvrs connectors in vLLM; workers without one have no series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry, labelnames=["worker"])
        counter = partial(Counter, registry=registry, labelnames=["worker"])
        self._saved = Total(
            counter("kvrs_connector_pages_saved", "Pages that agents have got from vLLM.")
        )
        self._loaded = Total(
            counter("kvrs_connector_pages_loaded", "Verified pages copied into blocks of vLLM.")
        )
        self._damaged = Total(
            counter("kvrs_connector_pages_damaged", "Pages fetched with a wrong checksum.")
        )
        self._lag = gauge(
            "kvrs_connector_lag_pages",
            "Full pages of protected streams that agents have not got from vLLM yet.",
        )
        self._pinned = gauge(
            "kvrs_connector_pinned_blocks", "Staged pages of vLLM, and blocks that wait for them."
        )
        self._off = gauge(
            "kvrs_connector_off", "1 while vLLM runs and its connector does nothing, else 0."
        )

    def remove(self, worker: InstanceId) -> None:
        for gauge in (self._lag, self._pinned, self._off):
            gauge.remove(worker)

    def measure(self, worker: InstanceId, report: ConnectorReport | None) -> None:
        if report is None:  # As of a load.
            self.remove(worker)
            return
        self._saved.follow(report.pages_saved, worker)
        self._loaded.follow(report.pages_loaded, worker)
        self._damaged.follow(report.pages_damaged, worker)
        self._lag.labels(worker).set(report.lag_pages)
        self._pinned.labels(worker).set(report.pinned_blocks)
        self._off.labels(worker).set(report.off_reason is not None)
