"""The scenarios in which all proxies are compared: the same load, interleaved."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.bench_proxy.engines import PAIR, Engines, Instance, Programs, run_load
from experiments.bench_proxy.proxies import Bench, Running, Start

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cores:
    mocks: int | None  # Engines and load client; None: any.
    proxy: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that every run of the bench needs."""

    programs: Programs
    cores: Cores
    directory: Path
    peers: Path
    seed: int
    quick: bool

    def engines(self, instances: Sequence[Instance] = PAIR) -> Engines:
        return Engines(self.programs, instances, self.cores.mocks)

    def bench(self, engines: Engines) -> Bench:
        return Bench(engines, self.directory, self.peers, self.cores.proxy)

    def load(self, running: Running, options: Mapping[str, int]) -> Row:
        pids = [pid for each in (running, *running.others) for pid in each.pids]
        given = {"seed": self.seed, **options}
        return run_load(self.programs, running.port, given, pids, self.cores.mocks)


@dataclass(frozen=True, slots=True)
class Steady:
    """One load; times in ms, rates in tokens per 1,000 s, as in `load.c`."""

    name: str
    title: str
    options: dict[str, int] = field(hash=False)
    window_ms: int

    def of_length(self, quick: bool) -> dict[str, int]:
        window_ms = self.window_ms // 3 if quick else self.window_ms
        return self.options | {"window_ms": window_ms, "limit_ms": 60_000}


IDLE = Steady(
    "idle",
    "one stream of 4 tokens at a time",
    {"streams": 1, "tokens": 4, "rate": 1_000_000, "pause_us": 2000, "warm_ms": 500},
    window_ms=2500,
)
S200 = Steady(
    "s200",
    "200 streams x 20 tokens/s, 60 tokens each",
    {"streams": 200, "tokens": 60, "rate": 20_000, "spread_ms": 800, "warm_ms": 1500},
    window_ms=5000,
)
S256 = Steady(
    "s256",
    "256 streams x 200 tokens/s, 300 tokens each",
    {"streams": 256, "tokens": 300, "rate": 200_000, "spread_ms": 800, "warm_ms": 1500},
    window_ms=3000,
)
B200 = Steady(
    "b200",
    "as s200, but the tokens of all streams come together",
    S200.options | {"steps": 1},
    window_ms=5000,
)
B256 = Steady(
    "b256",
    "as s256, but the tokens of all streams come together",
    S256.options | {"steps": 1},
    window_ms=3000,
)
STEADY = (IDLE, S200, S256, B200, B256)


def measure(
    setting: Setting,
    start: Start,
    subject: str,
    steadies: Sequence[Steady],
    instances: Sequence[Instance] = PAIR,
) -> list[Row]:
    """One proxy under each of the loads, as one process of it.

    Raises:
        MissingError: the proxy is not here.
    """
    with ExitStack() as stack:
        engines = stack.enter_context(setting.engines(instances))
        running = stack.enter_context(start(setting.bench(engines)))
        rows: list[Row] = []
        for steady in steadies:
            result = setting.load(running, steady.of_length(setting.quick))
            retries = engines.order("calls")["calls"] - sum(row["retries"] for row in rows)
            rows.append(
                {"scenario": steady.name, "subject": subject, "retries": retries, **figures(result)}
            )
        return rows


def figures(result: Row) -> Row:
    """The load client's figures: microseconds, CPU seconds per million tokens, MB."""
    tokens = result["window_tokens"]
    cpu_s = sum(process["cpu_s"] for process in result["processes"])
    row: Row = {
        "tokens_per_s": round(tokens / result["window_s"]),
        "cpu_s_per_million": round(cpu_s / tokens * 1e6, 2) if tokens else None,
        "rss_mb": round(sum(process["rss_kb"] for process in result["processes"]) / 1024, 1),
    }
    for name in ("ttft_us", "transit_us"):
        row |= {f"{name}_{share}": result[name].get(share) for share in ("p50", "p99")}
    kept = ("started", "whole", "broken", "fault", "reconnects")
    return row | {name: result[name] for name in kept}
