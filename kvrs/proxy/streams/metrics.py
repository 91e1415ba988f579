"""Prometheus metrics of a proxy. Each proxy has its own registry, so that several fit in a process.

A process of the cluster is named by the label `worker`: Prometheus sets `instance` itself, to the
address that it scrapes.
"""

import platform
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from kvrs import __version__
from kvrs.core.books.agent_slots import SlotOutcome
from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import Agent
from kvrs.core.model.estimates import Option
from kvrs.core.model.member import Health
from kvrs.core.watch import DeathCause
from kvrs.gossip.membership import Membership
from kvrs.gossip.wire import Status
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.protocol.mirror import Refusal
from kvrs.proxy.fleet.supervision import TaskKind
from kvrs.proxy.streams.hand_offs import given_up_counter
from kvrs.proxy.streams.recoveries import OUTCOMES, Recovery
from kvrs.proxy.streams.report_series import ReportSeries, Total
from kvrs.proxy.streams.stream_metrics import (
    SECONDS,
    DurationSeries,
    StreamMetrics,
    Tally,
    TallySeries,
    durations_of,
)

# Without a series `_created` for each counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]  # The library has no annotation.

_UNPROTECTED = "1 while it decodes and no agent gets KV of its streams, else 0."
_STORE_WRONG = "1 while it goes on wrongly behind KV of its store, else 0."
_PROMPT_TOKENS = "Tokens of new prompts that the worker answered for: computed, or cached there."
_OF_CACHE = ("worker", "source")
_DRAINING = "1 while the worker gets no new streams, by order or because it ends, else 0."
_DIFFERS = "1 while it computes other tokens than another worker that is up, else 0."
OUTCOMES_OF_REQUESTS = ("complete", "failed", "client_gone", "rejected")


def _requests(registry: CollectorRegistry) -> dict[str, Tally]:
    """The series of one counter, looked up once because every request counts."""
    counter = TallySeries(
        "kvrs_requests", "Requests of clients by outcome.", registry=registry, labels=["outcome"]
    )
    return {outcome: counter.of(outcome) for outcome in OUTCOMES_OF_REQUESTS}


class Shown(NamedTuple):
    """Series that are hidden where a proxy does not have what they are about."""

    ranks: bool  # And what else only the embedded engine reports.
    agents: bool
    gossip: bool


ALL = Shown(ranks=True, agents=True, gossip=True)


class Metrics:
    """All series. Those whose labels are known at the start exist from the start."""

    def __init__(
        self,
        workers: Mapping[InstanceId, Role],
        agents: Iterable[InstanceId] = (),
        shown: Shown = ALL,
    ) -> None:
        self.registry, hidden = process_registry(), CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        durations = partial(durations_of, self.registry, buckets=SECONDS)
        self.requests = _requests(self.registry)  # By outcome.
        self.resumes = counter(
            "kvrs_resumes", "Requests that resume a stream, by outcome.", ["outcome"]
        )
        self.streams = StreamMetrics(self.registry)
        self.unprotected = gauge(
            "kvrs_streams_unprotected", "Open streams that should have a checkpoint and have none."
        )
        self.tokens = Total(counter("kvrs_tokens_relayed", "Output tokens written to clients."))
        self.model = gauge("kvrs_model_info", "1 for the model that is served.", ["model_name"])
        self.loop_lag = durations(
            "kvrs_event_loop_lag_seconds", "How much later than asked for the event loop runs."
        )
        self.up = gauge("kvrs_worker_up", "1 while the worker is in use, else 0.", ["worker"])
        self.ejected = gauge("kvrs_worker_ejected", "1 while it is ejected, else 0.", ["worker"])
        self.differs = gauge("kvrs_worker_differs", _DIFFERS, ["worker"])
        self.without_copies = gauge("kvrs_worker_unprotected", _UNPROTECTED, ["worker"])
        self.store_wrong = gauge("kvrs_worker_store_wrong", _STORE_WRONG, ["worker"])
        self.draining = gauge("kvrs_worker_draining", _DRAINING, ["worker"])
        self.deaths = counter(
            "kvrs_worker_deaths", "Times that a worker in use was lost.", ["worker", "cause"]
        )
        self.notice = durations(
            "kvrs_worker_death_notice_seconds",
            "Time from the last report or heartbeat of a worker to the notice of its death.",
        )
        self.open_streams = gauge(
            "kvrs_worker_streams", "Open streams of this proxy at the worker.", ["worker", "role"]
        )
        self.prompt_tokens = TallySeries(
            "kvrs_worker_prompt_tokens", _PROMPT_TOKENS, registry=self.registry, labels=_OF_CACHE
        )
        self._roles: dict[InstanceId, Role] = {}
        self.reports = ReportSeries(self.registry, self.registry if shown.ranks else hidden)
        self.links = gauge(
            "kvrs_link_bytes_per_second",
            "Measured bandwidth of the link between two nodes.",
            ["source", "target"],
        )
        self.failures = counter(
            "kvrs_attempts_failed",
            "Attempts that failed while their worker was in use.",
            ["worker"],
        )
        self._task_failures = counter("kvrs_task_failures", "Tasks that a bug ended.", ["task"])
        self.agents = AgentMetrics(self.registry if shown.agents else hidden, agents)
        self.slots = counter(
            "kvrs_slots",
            "Recovery slots by outcome; local: granted by this proxy, since no agent answered.",
            ["outcome"],
        )
        self.hand_offs = given_up_counter(self.registry)
        self.recoveries = RecoveryMetrics(self.registry)
        self.admission = AdmissionMetrics(self.registry)
        self.gossip = GossipMetrics(self.registry if shown.gossip else hidden)
        self._create_series()
        self.add_workers(workers)

    def _create_series(self) -> None:
        """Create the series at 0, so that no rate misses the first event."""
        for outcome in ("granted", *Refusal, "unreachable", "superseded"):
            self.resumes.labels(outcome)
        for kind in TaskKind:
            self._task_failures.labels(kind)
        for outcome in SlotOutcome:
            self.slots.labels(outcome)

    def add_workers(self, workers: Mapping[InstanceId, Role]) -> None:
        self._roles.update(workers)
        for worker, role in workers.items():
            self.open_streams.labels(worker, role)
            self.reports.add(worker)
            self.up.labels(worker)
            self.ejected.labels(worker)
            self.differs.labels(worker)
            self.without_copies.labels(worker)
            self.store_wrong.labels(worker)
            self.draining.labels(worker)
            self.failures.labels(worker)
            for cause in DeathCause:
                self.deaths.labels(worker, cause)

    def remove_worker(self, worker: InstanceId) -> None:
        """It is no part of the cluster any more; what was counted of it stays."""
        series = self.up, self.ejected, self.differs, self.without_copies, self.draining
        for gauge in (*series, self.store_wrong):
            gauge.remove(worker)
        self.open_streams.remove(worker, self._roles.pop(worker))
        self.reports.remove(worker)

    def task_failed(self, kind: TaskKind) -> None:
        self._task_failures.labels(kind).inc()

    def worker_lost(self, worker: InstanceId, cause: DeathCause, silent_s: float) -> None:
        """`silent_s`: since its last sign of life."""
        self.up.labels(worker).set(0)
        self.deaths.labels(worker, cause).inc()
        self.notice.observe(silent_s)


def process_registry() -> CollectorRegistry:
    """A registry with what is known of this process: its version, memory and CPU."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Info("kvrs_build", "Version of kvrs that runs, and of Python.", registry=registry)
    build.info({"version": __version__, "python": platform.python_version()})
    return registry


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
        self.correction = Gauge(
            "kvrs_recovery_correction_ratio",
            "Learned factor on the predictions of an option.",
            ["option"],
            registry=registry,
        )
        for option in Option:
            for outcome in OUTCOMES:
                self._settled.labels(option, outcome)

    def settled(self, recovery: Recovery) -> None:
        option = recovery.option
        self._settled.labels(option, recovery.outcome).inc()
        if recovery.real_s is not None:
            self._predicted.by_value[option].observe(recovery.predicted_s)
            self._real.by_value[option].observe(recovery.real_s)


# Values of the label `engine`.
_ENGINES = {"alive": True, "dead": False}


class AgentMetrics:
    def __init__(self, registry: CollectorRegistry, agents: Iterable[InstanceId]) -> None:
        gauge = partial(Gauge, registry=registry)
        self._deaths = Counter(
            "kvrs_agent_deaths",
            "Times that an agent in use was lost.",
            ["agent", "cause"],
            registry=registry,
        )
        self.up = gauge("kvrs_agent_up", "1 while the agent is in use, else 0.", ["agent"])
        self._reserved = gauge(
            "kvrs_agent_reserved_bytes",
            "Memory that the agent has reserved for streams of all proxies.",
            ["agent"],
        )
        self._regions = gauge(
            "kvrs_agent_regions",
            "CPU tiers of vLLM whose rows the agent serves, by whether their engine lives.",
            ["agent", "engine"],
        )
        for agent in agents:
            self.add(agent)

    def add(self, agent: InstanceId) -> None:
        self.up.labels(agent)
        for cause in DeathCause:
            self._deaths.labels(agent, cause)

    def remove(self, agent: InstanceId) -> None:
        self.up.remove(agent)
        self._reserved.remove(agent)
        for engine in _ENGINES:
            self._regions.remove(agent, engine)

    def measure(self, known: Agent) -> None:
        report = known.report
        self.up.labels(known.id).set(known.health is Health.UP)
        self._reserved.labels(known.id).set(0 if report is None else report.reserved_bytes)
        alive = [] if report is None else [each.is_alive for each in report.rows.regions]
        for engine, is_alive in _ENGINES.items():
            self._regions.labels(known.id, engine).set(alive.count(is_alive))

    def lost(self, agent: InstanceId, cause: DeathCause) -> None:
        self.up.labels(agent).set(0)
        self._deaths.labels(agent, cause).inc()


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.request_bytes = Gauge(
            "kvrs_request_bytes",
            "Bytes of the body budget that clients' requests hold.",
            registry=registry,
        )
        self.given_up = Counter(
            "kvrs_streams_given_up", "Streams given up, by reason.", ["reason"], registry=registry
        )
        for reason in act.Reason:
            self.given_up.labels(reason)


class GossipMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        self._members = gauge("kvrs_gossip_members", "Members of the group by status.", ["status"])
        self._health = gauge("kvrs_gossip_health", "Lifeguard local health score (0 = healthy).")
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
        for reason, count in membership.drops().items():
            self._dropped.follow(count, reason)
        self._unread.follow(membership.facts.unread)
