"""Prometheus metrics of a proxy. Each proxy has its own registry, so that several fit in a process.

A process of the cluster is named by the label `worker`: Prometheus sets `instance` itself, to the
address that it scrapes.
"""

import platform
from collections.abc import Iterable
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from kvrs import __version__
from kvrs.core.books.at_agents import SlotOutcome
from kvrs.core.incidents import AttemptEnd
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Option
from kvrs.core.watch import DeathCause
from kvrs.ids import InstanceId
from kvrs.protocol.mirror import Refusal
from kvrs.proxy.fleet.supervision import TaskKind
from kvrs.proxy.streams.abandoned import detached_counter, given_up_counter
from kvrs.proxy.streams.stream_metrics import (
    SECONDS,
    DurationSeries,
    StreamMetrics,
    Tally,
    TallySeries,
    durations_of,
)

# Omit a `_created` series for each counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]  # The library has no annotation.

OUTCOMES_OF_REQUESTS = ("complete", "failed", "client_gone", "rejected")


def _requests(registry: CollectorRegistry) -> dict[str, Tally]:
    """Return the series of the counter of requests by outcome, looked up once because every request
    counts.
    """
    counter = TallySeries(
        "kvrs_requests", "Requests of clients by outcome.", registry=registry, labels=["outcome"]
    )
    return {outcome: counter.of(outcome) for outcome in OUTCOMES_OF_REQUESTS}


class Metrics:
    """All Prometheus series of a proxy. Series with known labels exist from the start."""

    def __init__(
        self, workers: Iterable[InstanceId] = (), agents: Iterable[InstanceId] = ()
    ) -> None:
        self.registry = process_registry()
        counter = partial(Counter, registry=self.registry)
        durations = partial(durations_of, self.registry, buckets=SECONDS)
        self.requests = _requests(self.registry)  # Numbers of finished requests by outcome.
        self.resumes = counter(
            "kvrs_resumes", "Requests that resume a stream, by outcome.", ["outcome"]
        )
        self.streams = StreamMetrics(self.registry)
        self.loop_lag = durations(
            "kvrs_event_loop_lag_seconds", "How much later than asked for the event loop runs."
        )
        self._deaths = counter(
            "kvrs_worker_deaths", "Times that a worker in use was lost.", ["worker", "cause"]
        )
        self._agent_deaths = counter(
            "kvrs_agent_deaths", "Times that an agent in use was lost.", ["agent", "cause"]
        )
        self._notice = durations(
            "kvrs_worker_death_notice_seconds",
            "Time from the last report or heartbeat of a worker to the notice of its death.",
        )
        self.failures = counter(
            "kvrs_attempts_failed",
            "Attempts that failed while their worker was in use.",
            ["worker"],
        )
        self._task_failures = counter("kvrs_task_failures", "Tasks that a bug ended.", ["task"])
        self.slots = counter(
            "kvrs_slots",
            "Recovery slots by outcome; local: granted by this proxy, since no agent answered.",
            ["outcome"],
        )
        self.hand_offs = given_up_counter(self.registry)
        self.detached_pairs = detached_counter(self.registry)
        self.recoveries = RecoveryMetrics(self.registry)
        self.admission = AdmissionMetrics(self.registry)
        self._create_series()
        for worker in workers:
            self.add_worker(worker)
        for agent in agents:
            self.add_agent(agent)

    def _create_series(self) -> None:
        """Create the series at 0, so that no rate misses the first event."""
        for outcome in ("granted", *Refusal, "unreachable", "superseded"):
            self.resumes.labels(outcome)
        for kind in TaskKind:
            self._task_failures.labels(kind)
        for outcome in SlotOutcome:
            self.slots.labels(outcome)

    def add_worker(self, worker: InstanceId) -> None:
        self.failures.labels(worker)
        for cause in DeathCause:
            self._deaths.labels(worker, cause)

    def add_agent(self, agent: InstanceId) -> None:
        for cause in DeathCause:
            self._agent_deaths.labels(agent, cause)

    def task_failed(self, kind: TaskKind) -> None:
        self._task_failures.labels(kind).inc()

    def worker_lost(self, worker: InstanceId, cause: DeathCause, silent_s: float) -> None:
        """Count a lost process. `silent_s`: time since the process's last sign of life."""
        self._deaths.labels(worker, cause).inc()
        self._notice.observe(silent_s)

    def agent_lost(self, agent: InstanceId, cause: DeathCause) -> None:
        self._agent_deaths.labels(agent, cause).inc()


def process_registry() -> CollectorRegistry:
    """Make a registry with this process's version, memory and CPU."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Info("kvrs_build", "Version of kvrs that runs, and of Python.", registry=registry)
    build.info({"version": __version__, "python": platform.python_version()})
    return registry


# Buckets of a measured duration over the predicted one.
OFF = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class RecoveryMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        series = partial(
            DurationSeries, buckets=SECONDS, registry=registry, label="option", values=[*Option]
        )
        self._settled = Counter(
            "kvrs_recoveries",
            "Recoveries by option and outcome.",
            ["option", "outcome"],
            registry=registry,
        )
        self._predicted = series(
            "kvrs_recovery_predicted_seconds", "Predicted duration of a recovery."
        )
        self._real = series("kvrs_recovery_real_seconds", "Measured duration of a recovery.")
        self._off = DurationSeries(
            "kvrs_recovery_off_ratio",
            "Measured over predicted duration of a recovery.",
            buckets=OFF,
            registry=registry,
            label="option",
            values=[*Option],
        )
        self._intervals = Counter(
            "kvrs_recovery_intervals",
            "Recoveries with a predicted interval, by whether the measured duration was inside.",
            ["inside"],
            registry=registry,
        )
        for inside in ("true", "false"):
            self._intervals.labels(inside)
        for option in Option:
            for end in AttemptEnd:
                if end is not AttemptEnd.REJECTED:  # Rejected attempts are no recoveries.
                    self._settled.labels(option, end)

    def count(self, option: Option, outcome: str, settled: act.Settled | None) -> None:
        """Count a recovery; `settled` has its costs if it has brought a token."""
        self._settled.labels(option, outcome).inc()
        if settled is not None:
            self._predicted.by_value[option].observe(settled.predicted_s)
            self._real.by_value[option].observe(settled.real_s)
            if settled.predicted_s > 0:
                self._off.by_value[option].observe(settled.real_s / settled.predicted_s)
            if settled.low_s is not None and settled.high_s is not None:
                inside = settled.low_s <= settled.real_s <= settled.high_s
                self._intervals.labels("true" if inside else "false").inc()


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.request_bytes = Gauge(
            "kvrs_request_bytes",
            "Bytes of the body budget that clients' requests and unread responses hold.",
            registry=registry,
        )
        self.given_up = Counter(
            "kvrs_streams_given_up", "Streams given up, by reason.", ["reason"], registry=registry
        )
        for reason in act.Reason:
            self.given_up.labels(reason)
