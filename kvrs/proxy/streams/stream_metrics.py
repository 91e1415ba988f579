"""Prometheus metrics of streams: durations, counts and outcomes.

All are updated when a stream ends, so that a token costs nothing.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, product

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvrs.core.model.streams import mean_interval_s
from kvrs.proxy.streams.open_stream import OpenStream, StreamPhase

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Upper bounds of buckets for whole streams and for the first tokens of long prompts.
LONG_SECONDS = (*SECONDS, 120.0, 240.0, 480.0)
_TOKEN_SECONDS = (
    *(0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)

# Labels by finish reason. `other`: any further reason of an engine; `none`: the stream ended
# without a reason.
FINISH_REASONS = ("stop", "length", "tool_calls", "other", "none")


class Durations:
    """Durations of one series, counted in buckets with the upper bounds `bounds`, and above the
    last.
    """

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds


class Tally:
    """The value of one series of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class TallySeries(Collector):
    """A counter or gauge without locks, because every stream changes it six times."""

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        registry: CollectorRegistry,
        labels: Sequence[str] = (),
        is_counter: bool = True,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._kind, self._suffix = ("counter", "_total") if is_counter else ("gauge", "")
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def of(self, *values: str) -> Tally:
        """Return the series with these label values; it exists from now on."""
        return self._tallies.setdefault(values, Tally())

    def collect(self) -> Iterator[Metric]:
        family, name = Metric(self._name, self._documentation, self._kind), self._name
        family.samples = [
            Sample(name + self._suffix, dict(zip(self._labels, values, strict=True)), tally.value)
            for values, tally in self._tallies.items()
        ]
        yield family


class DurationSeries(Collector):
    """A histogram without locks, because every stream ends with seven observations."""

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        label: str | None = None,
        values: Sequence[str] = ("",),
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._les = [*map(floatToGoString, buckets), "+Inf"]
        self.by_value = {value: Durations(buckets) for value in values}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        name, family = self._name, Metric(self._name, self._documentation, "histogram")
        for value, durations in self.by_value.items():
            labels = {} if self._label is None else {self._label: value}
            totals = [*accumulate(durations.counts)]
            for le, total in zip(self._les, totals, strict=True):
                family.add_sample(f"{name}_bucket", labels | {"le": le}, total)
            family.add_sample(f"{name}_count", labels, totals[-1])
            family.add_sample(f"{name}_sum", labels, durations.sum_s)
        yield family


class StreamMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(durations_of, registry)
        counter = partial(TallySeries, registry=registry)
        active = "kvrs_streams_active", "Streams that are open now."
        self.active = counter(*active, is_counter=False).of()
        self.ttft = histogram(
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
        stages = DurationSeries(
            "kvrs_stage_seconds",
            "Time that a stream has spent in a stage, over all attempts; waiting: without a place.",
            buckets=LONG_SECONDS,
            registry=registry,
            label="stage",
            values=[*StreamPhase],
        )
        self._stages = stages.by_value
        self._prompt_tokens = counter(
            "kvrs_prompt_tokens", "Tokens of the prompts of streams that have ended."
        ).of()
        ended = counter(
            "kvrs_streams_ended",
            "Streams that have ended; exact: those that could be continued exactly all along.",
            labels=["finish_reason", "exact"],
        )
        self._ended = {
            (reason, exact): ended.of(reason, exact)
            for reason, exact in product(FINISH_REASONS, ("yes", "no"))
        }

    def ended(self, live: OpenStream, now_s: float) -> None:
        journal = live.journal
        self.active.value -= 1
        reason = journal.finish_reason or "none"
        if reason not in FINISH_REASONS:
            reason = "other"
        self._ended[reason or "none", "no" if journal.exactness.inexact else "yes"].value += 1
        found: list[tuple[Durations, float]] = []
        for stage, seconds in live.phase_seconds(now_s).items():
            found.append((self._stages[stage], seconds))
        first_s, arrived_s = journal.first_write_s, journal.arrived_s
        if first_s is not None:
            found.append((self._gap, journal.longest_gap_s))
        interval_s = mean_interval_s(first_s, journal.last_write_s, len(journal.output_ids))
        if interval_s is not None:
            found.append((self._tpot, interval_s))
        # A stream resumed from another proxy arrived there and had its first token there, so this
        # proxy lacks the times.
        if not journal.owner_epoch:
            self._prompt_tokens.value += len(journal.prompt_ids or ())
            if first_s is not None:
                found.append((self.ttft, first_s - arrived_s))
            if journal.finish_reason is not None:
                found.append((self._e2e, now_s - arrived_s))
        for durations, seconds in found:
            durations.counts[bisect_left(durations.bounds, seconds)] += 1
            durations.sum_s += seconds


def durations_of(
    registry: CollectorRegistry, name: str, documentation: str, *, buckets: Sequence[float]
) -> Durations:
    """Make a histogram without labels; return its only series."""
    series = DurationSeries(name, documentation, buckets=buckets, registry=registry)
    (found,) = series.by_value.values()
    return found
