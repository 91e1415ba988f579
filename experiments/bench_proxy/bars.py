"""The figures that kvrs is to reach, and whether a run shows them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
PEER = "vllm-router P/D"


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    at_least: bool  # Else at most.
    limit: float
    unit: str  # Of limit and value.
    value: Callable[["Medians", str], float | None]  # Of one kvrs; None: not measured.
    is_moonshot: bool = False

    def judged(self, medians: "Medians", subject: str) -> tuple[float | None, str]:
        value = self.value(medians, subject)
        if value is None:
            return None, "not measured"
        is_met = value >= self.limit if self.at_least else value <= self.limit
        return value, "met" if is_met else "missed"


class Medians:
    """Medians over the rounds, by scenario and subject."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def of(self, scenario: str, subject: str, name: str) -> float | None:
        values = [
            row[name]
            for row in self._rows
            if (row.get("scenario"), row.get("subject")) == (scenario, subject)
            and row.get(name) is not None
        ]
        return statistics.median(values) if values else None

    def ratio(self, scenario: str, subject: str, other: str, name: str) -> float | None:
        value, reference = self.of(scenario, subject, name), self.of(scenario, other, name)
        return value / reference if value is not None and reference else None


def _ratio(what: str, scenario: str, name: str, limit: float, **options: Any) -> Bar:
    other = options.pop("other", PEER)
    at_least = options.pop("at_least", False)

    def value(medians: Medians, subject: str) -> float | None:
        return medians.ratio(scenario, subject, other, name)

    return Bar(f"{what}, of {other}", at_least, limit, "x", value, **options)


def _figure(
    what: str, scenario: str, name: str, limit: float, unit: str, *, at_least: bool = False
) -> Bar:
    return Bar(what, at_least, limit, unit, lambda medians, kvrs: medians.of(scenario, kvrs, name))


def _held(medians: Medians, subject: str) -> float | None:
    """Fewer were tried where the limit of descriptors allows no more, which shows nothing."""
    wanted = medians.of("held", subject, "wanted") or 0
    return medians.of("held", subject, "held") if wanted >= 10_000 else None


BARS = (
    _ratio("CPU per token, 200 x 20/s", "s200", "cpu_s_per_million", 1.0),
    _ratio("CPU per token, 256 x 200/s", "s256", "cpu_s_per_million", 0.85),
    _ratio("CPU per token, 200 x 20/s", "s200", "cpu_s_per_million", 0.8, is_moonshot=True),
    _ratio(
        "CPU per token, 256 x 200/s",
        "s256",
        "cpu_s_per_million",
        1.0,
        other="nginx",
        is_moonshot=True,
    ),
    _ratio("token transit p50, 200 x 20/s", "s200", "transit_us_p50", 1.0),
    _ratio("token transit p99, 200 x 20/s", "s200", "transit_us_p99", 1.0),
    _ratio("TTFT p50, one stream", "idle", "ttft_us_p50", 0.8),
    _ratio("TTFT p99, one stream", "idle", "ttft_us_p99", 0.8),
    _ratio("TTFT p50, 200 x 20/s", "s200", "ttft_us_p50", 0.8),
    _ratio("TTFT p99, 200 x 20/s", "s200", "ttft_us_p99", 0.8),
    _ratio("tokens/s, 256 streams", "s256", "tokens_per_s", 1.0, at_least=True),
    _figure("two workers, of one", "workers", "ratio", 1.8, "x", at_least=True),
    _figure("CPU per token with a key, of that without", "keyed", "ratio", 1.3, "x"),
    Bar("open streams at 0.2 tokens/s", True, 10_000, "", _held),
    _figure("memory per open stream", "held", "rss_kb_per_stream", 20.0, "kB"),
    _figure("200 victims, to the last recovery call", "death", "last_call_ms", 20.0, "ms"),
)
