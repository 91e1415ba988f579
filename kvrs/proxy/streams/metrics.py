"""Prometheus metrics of a proxy. Each proxy has its own registry, so that several fit in a process.

A process of the cluster is named by the label `worker`: Prometheus sets `instance` itself, to the
address that it scrapes.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from kvrs.control.slots import SlotOutcome
from kvrs.gossip.membership import Membership
from kvrs.gossip.wire import Status
from kvrs.ids import InstanceId
from kvrs.policy.model.actions import Reason
from kvrs.policy.model.estimates import Option
from kvrs.protocol.mirror import Refusal
from kvrs.proxy.backends.peer import descriptor_waits
from kvrs.proxy.streams.journal import Journal
from kvrs.proxy.streams.recoveries import OUTCOMES, Recovery
from kvrs.proxy.watch.supervision import TaskKind

# Without a series `_created` for each counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]  # The library has no annotation.

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)

OUTCOMES_OF_REQUESTS = ("complete", "failed", "client_gone", "rejected")


def _requests(registry: CollectorRegistry) -> dict[str, Counter]:
    """The series of one counter, looked up once because every request counts."""
    counter = Counter(
        "kvrs_requests", "Requests of clients by outcome.", ["outcome"], registry=registry
    )
    return {outcome: counter.labels(outcome) for outcome in OUTCOMES_OF_REQUESTS}


class DeathCause(StrEnum):
    """How the proxy noticed that a worker was lost."""

    CONNECTION_LOST = "connection_lost"  # The connection of its reports was closed or reset.
    SILENT = "silent"  # No report came for too long.
    UNUSABLE = "unusable"  # It answered, but as another server, version or epoch.
    FAILED = "failed"  # It answered with an error, or with reports that cannot be read.


class Metrics:
    """All series. Those whose labels are known at the start exist from the start."""

    def __init__(self, workers: Sequence[InstanceId] = ()) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        self.requests = _requests(self.registry)  # By outcome.
        self.resumes = counter(
            "kvrs_resumes", "Requests that resume a stream, by outcome.", ["outcome"]
        )
        self.streams = gauge("kvrs_streams_active", "Streams that are open now.")
        self.event_loop_tasks = gauge(
            "kvrs_event_loop_tasks", "Tasks of the event loop that are not done."
        )
        self.unprotected = gauge(
            "kvrs_streams_unprotected", "Open streams that should have a checkpoint and have none."
        )
        self.relayed_tokens = 0  # `tokens` follows when the series are read.
        self.tokens = Total(counter("kvrs_tokens_relayed", "Output tokens written to clients."))
        self.ttft = histogram("kvrs_ttft_seconds", "Time to the first token of a stream.")
        self.gap = histogram(
            "kvrs_client_gap_seconds", "Longest pause between two writes of a stream."
        )
        self.up = gauge("kvrs_worker_up", "1 while the worker is in use, else 0.", ["worker"])
        self.ejected = gauge("kvrs_worker_ejected", "1 while it is ejected, else 0.", ["worker"])
        self.deaths = counter(
            "kvrs_worker_deaths", "Times that a worker in use was lost.", ["worker", "cause"]
        )
        self.failures = counter(
            "kvrs_attempts_failed",
            "Attempts that failed while their worker was in use.",
            ["worker"],
        )
        self._task_failures = counter("kvrs_task_failures", "Tasks that a bug ended.", ["task"])
        self.damaged = Total(
            counter("kvrs_damaged_pages", "Damaged pages that the worker has fetched.", ["worker"])
        )
        self.checkpoint_lag = gauge(
            "kvrs_checkpoint_lag_pages",
            "Full pages of protected streams that the worker has not sent to an agent yet.",
            ["worker"],
        )
        self.agents = AgentMetrics(self.registry)
        self.slots = counter(
            "kvrs_slots",
            "Recovery slots by outcome; local: granted by this proxy, since no agent answered.",
            ["outcome"],
        )
        self.recoveries = counter(
            "kvrs_recoveries", "Recoveries by option and outcome.", ["option", "outcome"]
        )
        self.predicted = histogram(
            "kvrs_recovery_predicted_seconds", "Predicted duration of a recovery.", ["option"]
        )
        self.real = histogram(
            "kvrs_recovery_real_seconds", "Measured duration of a recovery.", ["option"]
        )
        self.regret = histogram(
            "kvrs_recovery_regret_seconds",
            "Measured duration of a recovery less the shortest prediction of another option.",
            ["option"],
            buckets=(*(-seconds for seconds in reversed(_SECONDS)), 0.0, *_SECONDS),
        )
        self.correction = gauge(
            "kvrs_recovery_correction",
            "Learned factor on the predictions of an option.",
            ["option"],
        )
        self.admission = AdmissionMetrics(self.registry)
        self.gossip = GossipMetrics(self.registry)
        self._create_series(workers)

    def _create_series(self, workers: Sequence[InstanceId]) -> None:
        """Create the series at 0, so that no rate misses the first event."""
        for outcome in ("granted", *Refusal, "unreachable", "superseded"):
            self.resumes.labels(outcome)
        for kind in TaskKind:
            self._task_failures.labels(kind)
        for outcome in SlotOutcome:
            self.slots.labels(outcome)
        for option in Option:
            for durations in (self.predicted, self.real, self.regret):
                durations.labels(option)
            for outcome in OUTCOMES:
                self.recoveries.labels(option, outcome)
        for worker in workers:
            self.up.labels(worker)
            self.ejected.labels(worker)
            self.failures.labels(worker)
            self.damaged.follow(0, worker)
            for cause in DeathCause:
                self.deaths.labels(worker, cause)

    def slot_asked(self, outcome: str) -> None:
        self.slots.labels(outcome).inc()

    def task_failed(self, kind: TaskKind) -> None:
        self._task_failures.labels(kind).inc()

    def worker_lost(self, worker: InstanceId, cause: DeathCause) -> None:
        self.up.labels(worker).set(0)
        self.deaths.labels(worker, cause).inc()

    def stream_ended(self, journal: Journal) -> None:
        if journal.first_write_s is not None:
            # A stream resumed from another proxy has had its first token there.
            if not journal.owner_epoch:
                self.ttft.observe(journal.first_write_s - journal.arrived_s)
            self.gap.observe(journal.longest_gap_s)

    def recovery_settled(self, recovery: Recovery) -> None:
        self.recoveries.labels(recovery.option, recovery.outcome).inc()
        if recovery.real_s is not None:
            self.predicted.labels(recovery.option).observe(recovery.predicted_s)
            self.real.labels(recovery.option).observe(recovery.real_s)
        if recovery.regret_s is not None:
            self.regret.labels(recovery.option).observe(recovery.regret_s)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class AgentMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self.up = gauge("kvrs_agent_up", "1 while the agent is in use, else 0.", ["agent"])
        self.reserved = gauge(
            "kvrs_agent_reserved_bytes",
            "Memory that the agent has reserved for streams of all proxies.",
            ["agent"],
        )


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.request_bytes = Gauge(
            "kvrs_request_bytes",
            "Bytes of the body budget that clients' requests hold.",
            registry=registry,
        )
        Gauge(
            "kvrs_descriptor_wait_seconds",
            "Time that calls of this process have waited for descriptors, in all.",
            registry=registry,
        ).set_function(lambda: descriptor_waits.seconds)
        self.given_up = Counter(
            "kvrs_streams_given_up", "Streams given up, by reason.", ["reason"], registry=registry
        )
        for reason in Reason:
            self.given_up.labels(reason)


class GossipMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        self._members = gauge("kvrs_gossip_members", "Members of the group by status.", ["status"])
        self._health = gauge("kvrs_gossip_health", "Lifeguard local health score (0 = healthy).")
        self._packets = Total(counter("kvrs_gossip_sent_packets", "Packets sent."))
        self._bytes = Total(
            counter("kvrs_gossip_sent_bytes", "Bytes sent, without their authentication.")
        )
        self._dropped = Total(
            counter("kvrs_gossip_dropped_packets", "Packets dropped, by reason.", ["reason"])
        )
        self._unread = Total(
            counter("kvrs_gossip_unread_facts", "Facts of other members that could not be read.")
        )

    def measure(self, membership: Membership) -> None:
        for status in Status:
            self._members.labels(status.name.lower()).set(membership.count(status))
        self._health.set(membership.health)
        self._packets.follow(membership.sent["packets"])
        self._bytes.follow(membership.sent["bytes"])
        for reason, count in membership.drops().items():
            self._dropped.follow(count, reason)
        self._unread.follow(membership.facts.unread)


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
