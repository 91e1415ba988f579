"""What the proxy tells Prometheus. One registry per proxy, so that several can live in one process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrs.proxy.gossip_metrics import GossipMetrics
from kvrs.proxy.journal import Journal
from kvrs.proxy.recoveries import Recovery

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvrs_requests", "Requests by outcome: complete, failed, client_gone, rejected.", ["outcome"], registry=self.registry
        )
        self.streams = Gauge("kvrs_streams_active", "Streams that are open now.", registry=self.registry)
        self.tokens = Counter("kvrs_tokens_relayed", "Output tokens given to clients.", registry=self.registry)
        self.failures = Counter("kvrs_attempts_failed", "Attempts that broke, by instance.", ["instance"], registry=self.registry)
        self.recoveries = Counter(
            "kvrs_recoveries", "Recoveries by option and outcome.", ["option", "outcome"], registry=self.registry
        )
        self.slots = Counter(
            "kvrs_slots",
            "Slots asked of targets' agents: granted, denied, unarbitrated (no answer, so taken on this proxy's book), lost.",
            ["outcome"],
            registry=self.registry,
        )
        self.predicted = Histogram(
            "kvrs_recovery_predicted_seconds",
            "What recoveries were predicted to cost.",
            ["option"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.real = Histogram(
            "kvrs_recovery_real_seconds", "What recoveries did cost.", ["option"], buckets=_SECONDS, registry=self.registry
        )
        self.regret = Histogram(
            "kvrs_recovery_regret_seconds",
            "What recoveries did cost beyond the best other prediction.",
            ["option"],
            buckets=(*(-seconds for seconds in reversed(_SECONDS)), 0.0, *_SECONDS),
            registry=self.registry,
        )
        self.correction = Gauge(
            "kvrs_recovery_correction", "By what predictions are multiplied.", ["option"], registry=self.registry
        )
        self.gap = Histogram(
            "kvrs_client_gap_seconds", "Longest pause between two writes of a stream.", buckets=_SECONDS, registry=self.registry
        )
        self.ttft = Histogram("kvrs_ttft_seconds", "Time to first token.", buckets=_SECONDS, registry=self.registry)
        self.up = Gauge("kvrs_instance_up", "1 while the instance is used.", ["instance"], registry=self.registry)
        self.checkpoint_lag = Gauge(
            "kvrs_checkpoint_lag_pages",
            "Full pages of protected streams that their agents do not have yet.",
            ["instance"],
            registry=self.registry,
        )
        self.damaged = Gauge(
            "kvrs_damaged_pages",
            "Pages that the instance fetched since its start and found damaged.",
            ["instance"],
            registry=self.registry,
        )
        self.agent_up = Gauge("kvrs_agent_up", "1 while the agent is used.", ["agent"], registry=self.registry)
        self.agent_reserved = Gauge(
            "kvrs_agent_reserved_bytes", "Of an agent's memory, for streams of all proxies.", ["agent"], registry=self.registry
        )
        self.resumes = Counter(
            "kvrs_resumes",
            "Streams that clients asked for again: granted, or why not; superseded: what went on here was resumed elsewhere.",
            ["outcome"],
            registry=self.registry,
        )
        self.unprotected = Gauge(
            "kvrs_streams_unprotected", "Open streams that should have a checkpoint and have none.", registry=self.registry
        )

        self.gossip = GossipMetrics(self.registry)

    def slot_asked(self, outcome: str) -> None:
        self.slots.labels(outcome).inc()

    def stream_ended(self, journal: Journal) -> None:
        if journal.first_write_s is not None:
            if not journal.owner_epoch:  # Else its client had its first token elsewhere.
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
