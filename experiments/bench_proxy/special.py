"""Scenarios of kvrs alone: keys, ten thousand streams, workers, a death."""

import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.bench_proxy import proxies
from experiments.bench_proxy.engines import PAIR, BenchError, Engines, Instance, Load
from experiments.bench_proxy.proxies import Running
from experiments.bench_proxy.steady import S200, Row, Setting
from kvrs.protocol.instance import Role

# Of a process of kvrs: it gives a quarter of its descriptors to streams (proxy/wire/capacity.py),
# and needs some for the rest.
_DESCRIPTORS_PER_STREAM = 4
_OTHER_DESCRIPTORS = 128
# Tokens that are 5 s apart, after thousands at once, are no sign that an instance hangs if it
# reports more streams than it can run.
_BUSY_PAIR = (PAIR[0], replace(PAIR[1], queued=1))
_UP_WITHIN_S = 20.0


class SkippedError(BenchError):
    """A scenario cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Special:
    name: str
    title: str
    # The setting, a tree of kvrs, and the number of the round.
    measure: Callable[[Setting, Path, int], Row]
    # What is shown of a row: a heading, the figure, its format.
    columns: tuple[tuple[str, str, str], ...]
    once: bool = False  # Else in each round.


@contextmanager
def _opened(
    setting: Setting,
    tree: Path,
    instances: Sequence[Instance] = PAIR,
    *,
    mirrored: bool = False,
    **settings: Any,
) -> Iterator[tuple[Engines, Running]]:
    with ExitStack() as stack:
        engines = stack.enter_context(setting.engines(instances))
        start = proxies.kvrs(tree, mirrored=mirrored, **settings)
        running = stack.enter_context(start(setting.bench(engines)))
        if settings.get("workers", 1) > 1:
            _until(
                partial(_has_all_workers, running, settings["workers"]), "not all workers came up"
            )
        yield engines, running


def _outcome(*results: Row) -> Row:
    """The outcome of all loads together."""
    row: Row = {
        name: sum(result[name] for result in results) for name in ("started", "whole", "broken")
    }
    return row | {"fault": next((each["fault"] for each in results if each["fault"]), "")}


def _cpu_s_per_million(result: Row, pids: Sequence[int]) -> float:
    cpu_s = sum(each["cpu_s"] for each in result["processes"] if each["pid"] in pids)
    return float(cpu_s / result["window_tokens"] * 1e6)


# Keys.


def keyed(setting: Setting, tree: Path, number: int) -> Row:
    """The load of s200 with a key for each stream and without, at one of two proxies that know each
    other.
    """
    options = S200.of_length(setting.quick)
    with _opened(setting, tree, mirrored=True) as (_, running):
        for each in (running, *running.others):
            _until(partial(_has_peers, each), "the proxies did not meet")
        own, mirror = running.pids, running.others[0].pids
        results: dict[int, Row] = {}
        for with_key in (0, 1) if number % 2 else (1, 0):
            results[with_key] = setting.load(running, options | {"keyed": with_key})
    row: Row = {}
    for with_key, name in enumerate(("plain", "keyed")):
        row[f"cpu_s_per_million_{name}"] = _cpu_s_per_million(results[with_key], own)
        row[f"cpu_s_per_million_{name}_both"] = _cpu_s_per_million(
            results[with_key], [*own, *mirror]
        )
        row[f"transit_us_p50_{name}"] = results[with_key]["transit_us"].get("p50")
    row["ratio"] = row["cpu_s_per_million_keyed"] / row["cpu_s_per_million_plain"]
    row["ratio_both"] = row["cpu_s_per_million_keyed_both"] / row["cpu_s_per_million_plain_both"]
    return row | _outcome(*results.values())


def _has_all_workers(running: Running, workers: int) -> bool:
    """All workers listen, else some would get no connections: each listens when it has seen an
    instance up.
    """
    states = [proxies.state(running, worker) for worker in range(workers)]
    return all(any(row["health"] == "up" for row in state["instances"]) for state in states)


def _has_peers(running: Running) -> bool:
    (proxy,) = proxies.state(running)["proxies"]
    return bool(proxy["peers"]) and all(each == "up" for each in proxy["peers"].values())


# Ten thousand streams.


def held(setting: Setting, tree: Path, number: int) -> Row:
    """Streams that get 2,000 tokens at once, and then one every five seconds."""
    wanted = 1000 if setting.quick else 10_000
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    per_process = (hard - _OTHER_DESCRIPTORS) // _DESCRIPTORS_PER_STREAM
    workers = -(-wanted // per_process) if hard != resource.RLIM_INFINITY else 1
    settings: dict[str, Any] = {"max_streams": 2 * wanted}
    if workers > 1 and has_workers(tree):
        # Their shares differ by chance.
        settings["workers"] = workers = -(-wanted * 11 // (per_process * 10))
    elif workers > 1:
        wanted, workers = per_process, 1
    ramp_ms, window_ms = wanted * 7 // 2, 5_000 if setting.quick else 10_000
    later = (ramp_ms + 3_000 + window_ms) // 5_000 + 1
    options = {"burst": 2000, "rate": 200, "restart": 0, "sources": 8, "window_ms": 100}
    options |= {"warm_ms": 0, "limit_ms": 10_000}
    with _opened(setting, tree, _BUSY_PAIR, **settings) as (engines, running):
        # What is loaded with the first streams is no cost of one.
        warm = setting.load(running, options | {"streams": 20, "tokens": 2000})
        options |= {"streams": wanted, "tokens": 2000 + later, "spread_ms": ramp_ms}
        options |= {"warm_ms": ramp_ms + 3_000, "window_ms": window_ms}
        options |= {"limit_ms": ramp_ms + 5_000 * later + 30_000}
        result = setting.load(running, options)
        retries = engines.order("calls")["calls"]
    grown_kb = sum(each["rss_kb"] - each["rss_before_kb"] for each in result["processes"])
    return {
        "wanted": wanted,
        "workers": workers,
        "held": result["held"],
        "retries": retries,
        "rss_kb_per_stream": grown_kb / max(1, result["held"]),
        "cpu_s_per_million": _cpu_s_per_million(
            result, [each["pid"] for each in result["processes"]]
        ),
        "transit_us_p50": result["transit_us"].get("p50"),
        "transit_us_p99": result["transit_us"].get("p99"),
    } | _outcome(warm, result)


# Workers.


def has_workers(tree: Path) -> bool:
    settings = (tree / "kvrs/config/proxy.py").read_text()
    return re.search(r"^    workers: int", settings, re.MULTILINE) is not None


def workers(setting: Setting, tree: Path, number: int) -> Row:
    """Tokens per CPU second of the busiest process, with one worker and with two.

    Raises:
        SkippedError: the tree has no workers.
    """
    if not has_workers(tree):
        raise SkippedError("it has no setting proxy.workers")
    options = {
        "streams": 256,
        "tokens": 150,
        "rate": 100_000,
        "spread_ms": 800,
        "warm_ms": 1200,
        "window_ms": 1500 if setting.quick else 3000,
        "limit_ms": 60_000,
    }
    results: dict[int, Row] = {}
    for count in (1, 2) if number % 2 else (2, 1):
        with _opened(setting, tree, workers=count) as (_, running):
            results[count] = setting.load(running, options)
    row: Row = {}
    for count, name in ((1, "one"), (2, "two")):
        busiest_s = max(each["cpu_s"] for each in results[count]["processes"])
        row[f"tokens_per_cpu_s_{name}"] = results[count]["window_tokens"] / busiest_s
        row[f"cpu_s_{name}"] = [each["cpu_s"] for each in results[count]["processes"]]
    row["ratio"] = row["tokens_per_cpu_s_two"] / row["tokens_per_cpu_s_one"]
    return row | _outcome(*results.values())


# A death.

_VICTIMS = 200
_CLUSTER = (
    Instance("p0", Role.PREFILL, "n0"),
    Instance("d0", Role.DECODE, "n1"),
    Instance("d1", Role.DECODE, "n2", listens=False),
)


def death(setting: Setting, tree: Path, number: int) -> Row:
    """All streams are on d0; d1 comes up, and d0 is killed."""
    options = {
        "streams": _VICTIMS,
        "tokens": 80,
        "rate": 20_000,
        "restart": 0,
        "spread_ms": 500,
        "window_ms": 1000,
        "limit_ms": 60_000,
    }
    with _opened(setting, tree, _CLUSTER) as (engines, running):
        pids = running.pids
        with Load(setting.programs, running.port, options, pids, setting.cores.mocks) as load:
            if not load.wait_open():
                raise BenchError(f"streams did not begin: {load.result()['fault']}")
            engines.order("listen d1")
            _until(partial(_is_up, running, "d1"), "d1 did not come up")
            killed = engines.order("kill d0")
            time.sleep(1.0)
            calls = engines.order("calls")
            result = load.result()
    since_ns = killed["begun_ns"]
    return {
        "victims": killed["streams"],
        "recovered": calls["streams"],
        "calls": calls["calls"],
        "first_call_ms": (calls["first_ns"] - since_ns) / 1e6,
        "last_call_ms": (calls["last_first_ns"] - since_ns) / 1e6,
        "resets_took_ms": (killed["ended_ns"] - since_ns) / 1e6,
    } | _outcome(result)


def _is_up(running: Running, instance: str) -> bool:
    rows = proxies.state(running)["instances"]
    return any((row["id"], row["health"]) == (instance, "up") for row in rows)


def _until(holds: Callable[[], bool], fault: str) -> None:
    give_up_s = time.monotonic() + _UP_WITHIN_S
    while not holds():
        if time.monotonic() > give_up_s:
            raise BenchError(fault)
        time.sleep(0.05)


SPECIAL = (
    Special(
        "held",
        "open streams at 0.2 tokens/s with journals of 2,000 tokens",
        held,
        (
            ("wanted", "wanted", ",.0f"),
            ("held", "held", ",.0f"),
            ("retries", "retries", ",.0f"),
            ("workers", "workers", ".0f"),
            ("kB/stream", "rss_kb_per_stream", ".1f"),
            ("transit p50 us", "transit_us_p50", ",.0f"),
            ("p99 us", "transit_us_p99", ",.0f"),
        ),
        once=True,
    ),
    Special(
        "keyed",
        "s200 with Idempotency-Key and without, at one of two proxies; CPU s/M",
        keyed,
        (
            ("without", "cpu_s_per_million_plain", ".1f"),
            ("with", "cpu_s_per_million_keyed", ".1f"),
            ("ratio", "ratio", ".2f"),
            ("both proxies", "ratio_both", ".2f"),
        ),
    ),
    Special(
        "workers",
        "256 streams x 100 tokens/s; tokens per CPU second of the busiest process",
        workers,
        (
            ("one", "tokens_per_cpu_s_one", ",.0f"),
            ("two", "tokens_per_cpu_s_two", ",.0f"),
            ("ratio", "ratio", ".2f"),
        ),
    ),
    Special(
        "death",
        f"{_VICTIMS} victims of one death; ms from the first reset to the recovery call",
        death,
        (
            ("victims", "victims", ".0f"),
            ("recovered", "recovered", ".0f"),
            ("first ms", "first_call_ms", ".1f"),
            ("last ms", "last_call_ms", ".1f"),
        ),
    ),
)
