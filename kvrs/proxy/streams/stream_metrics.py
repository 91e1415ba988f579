"""Prometheus metrics of streams: how long they took, what they counted, and how they ended.

All are taken when a stream ends, so that a token costs nothing.
"""

from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvrs.control.live import StreamStage
from kvrs.proxy.streams.live import OpenStream

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Of whole streams and of the first tokens of long prompts.
LONG_SECONDS = (*SECONDS, 120.0, 240.0, 480.0)
_TOKEN_SECONDS = (
    *(0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)

# `none`: the stream ended without one.
FINISH_REASONS = ("stop", "length", "tool_calls", "none")


class StreamMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, registry=registry)
        counter = partial(Counter, registry=registry)
        self.active = Gauge("kvrs_streams_active", "Streams that are open now.", registry=registry)
        self.waiting = Gauge(
            "kvrs_streams_waiting",
            "Open streams that have no place at a worker now.",
            registry=registry,
        )
        self._ttft = histogram(
            "kvrs_ttft_seconds", "Time to the first token of a stream.", buckets=LONG_SECONDS
        )
        self._tpot = histogram(
            "kvrs_tpot_seconds",
            "Mean time between two tokens of a stream, recoveries included.",
            buckets=_TOKEN_SECONDS,
        )
        self._gap = histogram(
            "kvrs_client_gap_seconds",
            "Longest pause between two writes of a stream.",
            buckets=SECONDS,
        )
        self._e2e = histogram(
            "kvrs_e2e_seconds",
            "Time from the arrival of a stream to its end, of those that are complete.",
            buckets=LONG_SECONDS,
        )
        stages = histogram(
            "kvrs_stage_seconds",
            "Time that a stream has spent in a stage, over all attempts; waiting: without a place.",
            ["stage"],
            buckets=LONG_SECONDS,
        )
        self._stages = {stage: stages.labels(stage) for stage in StreamStage}
        self._prompt_tokens = counter(
            "kvrs_prompt_tokens", "Tokens of the prompts of streams that have ended."
        )
        ended = counter(
            "kvrs_streams_ended",
            "Streams that have ended; exact: those that could be continued exactly all along.",
            ["finish_reason", "exact"],
        )
        self._ended = {
            (reason, exact): ended.labels(reason, exact)
            for reason, exact in product(FINISH_REASONS, ("yes", "no"))
        }

    def ended(self, live: OpenStream, now_s: float) -> None:
        journal = live.journal
        self.active.dec()
        reason = journal.finish_reason if journal.finish_reason in FINISH_REASONS else "none"
        self._ended[reason or "none", "no" if journal.inexact else "yes"].inc()
        for stage, seconds in live.stage_seconds(now_s).items():
            self._stages[stage].observe(seconds)
        if journal.first_write_s is not None:
            self._gap.observe(journal.longest_gap_s)
        if (interval_s := journal.token_interval_s) is not None:
            self._tpot.observe(interval_s)
        # A stream resumed from another proxy has arrived there, and had its first token there.
        if journal.owner_epoch:
            return
        self._prompt_tokens.inc(journal.prompt_tokens)
        if journal.first_write_s is not None:
            self._ttft.observe(journal.first_write_s - journal.arrived_s)
        if journal.finished:
            self._e2e.observe(now_s - journal.arrived_s)
