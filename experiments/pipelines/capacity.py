"""Capacity after the death of a stage's host, which loads for a while: with a stage that is
borrowed meanwhile, beside waiting for the host, at several rates of load (KevlarFlow, Figure 8).

    python -m experiments.pipelines.capacity [--rates 2 4 6] [--ways substitute wait] [--load-s 20]

How many times as soon is a ratio of two waits that nothing connects: the start of a session, and
the reading of a stage, which `--load-s` sets. The paper's, 30 s and ten minutes, is one as well.

Ranks are processes of a tiny model and keep the clock of another GPU. A third of the weights
is read in `--load-s`, by the rate of the disk; the host that is killed has somewhat less. Each way
has a cluster of its own, in turns.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvloop

from experiments.command_line import parser_of
from experiments.pipelines.two import (
    Pipelines,
    Row,
    config_of,
    end,
    is_whole,
    requests_of,
    serves,
)
from experiments.record import Record
from kvrs.config.file import Config
from kvrs.profiles import catalog
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.open_loop import replay
from kvrs_lab.traces.records import StreamRecord

PROFILE = "llama-3.1-70b-a100-vllm-tp4"
WAYS = ("substitute", "wait")
STAGES, VICTIM, STAGE = 3, "d0", 1
TOKENS = (60, 120)
KILL_S, AFTER_S, BIN_S = 10.0, 15.0, 2.0
MOST_S, STREAM_S = 120.0, 180.0
LEAST_RATIO = 20.0
RATIO = "of two waits that nothing connects: a session's start, and a load of a time that is set"


def config(way: str, load_s: float, seed: int) -> Config:
    bytes_per_s = catalog.load(PROFILE).weight_bytes / STAGES / load_s
    engine = {"pace": PROFILE, "disk_bytes_per_s": bytes_per_s, "pages": 1024, "max_running": 16}
    return config_of(STAGES, group=way == "substitute", seed=seed, engine=engine)


async def one(cluster: Cluster, rate: float, load_s: float, seed: int) -> Row:
    span_s = KILL_S + load_s + AFTER_S
    requests = requests_of(round(rate * span_s), rate, TOKENS, seed)
    async with AdminPort(cluster.proxies[0].admin, cluster.secret) as port:
        own, start_s = Pipelines(port), time.monotonic()
        load = asyncio.create_task(
            replay(cluster.url, requests, start_s=start_s, timeout_s=STREAM_S)
        )
        try:
            await asyncio.sleep(KILL_S)
            found = await _kill(own)
            records = await load
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    whole_s = KILL_S + (found["whole_s"] or load_s)
    return found | goodput_of(records, KILL_S, whole_s, span_s)


async def _kill(own: Pipelines) -> Row:
    """A host; seconds until the instance computes again, and until it is whole."""
    pid = (await own.rows())[VICTIM]["stages"][STAGE]["host_pid"]
    began_s = time.monotonic()
    end(pid)

    async def moment_s(holds: Callable[[Row, int], bool]) -> float | None:
        rows = await own.until(
            lambda rows: (
                all(stage["host_pid"] != pid for stage in rows[VICTIM]["stages"])
                and holds(rows[VICTIM], STAGES)
            ),
            MOST_S,
        )
        return None if rows is None else time.monotonic() - began_s

    return {"serves_s": await moment_s(serves), "whole_s": await moment_s(is_whole)}


def goodput_of(records: Sequence[StreamRecord], from_s: float, to_s: float, span_s: float) -> Row:
    """Tokens/s of streams that completed: over time, before a death and until a host that was
    killed is there again.
    """
    times_s = [at_s for record in records if record.completed for at_s in record.token_times_s]
    bins = [0] * round(span_s / BIN_S)
    for at_s in times_s:
        if at_s < len(bins) * BIN_S:
            bins[int(at_s / BIN_S)] += 1
    before = sum(BIN_S <= at_s < from_s for at_s in times_s) / (from_s - BIN_S)
    meanwhile = sum(from_s <= at_s < to_s for at_s in times_s) / (to_s - from_s)
    return {
        "failed": sum(not record.completed for record in records),
        "before_per_s": before,
        "meanwhile_per_s": meanwhile,
        "tokens_per_s": [count / BIN_S for count in bins],
    }


def measure(options: argparse.Namespace) -> list[Row]:
    found = []
    for number, rate in enumerate(options.rates):
        for way in options.ways if number % 2 else reversed(options.ways):
            print(f"  {rate:g} requests/s, {way}", flush=True)
            with Cluster(config(way, options.load_s, options.seed), lambda line: None) as cluster:
                row = uvloop.run(one(cluster, rate, options.load_s, options.seed))
            found.append({"rate": rate, "way": way} | row)
            print(f"  {as_line(found[-1])}", flush=True)
    return sorted(found, key=lambda row: (row["rate"], WAYS.index(row["way"])))


def ratios(rows: Sequence[Row]) -> dict[float, float]:
    """By rate: how many times as soon the instance computes again with a borrowed stage."""
    by_rate: dict[float, dict[str, float]] = {}
    for row in rows:
        if row["serves_s"] is not None:
            by_rate.setdefault(row["rate"], {})[row["way"]] = row["serves_s"]
    return {rate: of["wait"] / of["substitute"] for rate, of in by_rate.items() if {*of} == {*WAYS}}


def missed(rows: Sequence[Row]) -> list[str]:
    """The bars that are missed."""
    found = [
        f"{row['rate']:g} requests/s, {row['way']}: {row['failed']} streams failed"
        for row in rows
        if row["failed"]
    ]
    found += [
        f"{row['rate']:g} requests/s, {row['way']}: never whole"
        for row in rows
        if row["whole_s"] is None
    ]
    return found + [
        f"{rate:g} requests/s: {ratio:.1f} times as soon; bar {LEAST_RATIO:g}"
        for rate, ratio in ratios(rows).items()
        if ratio < LEAST_RATIO
    ]


def as_line(row: Mapping[str, Any]) -> str:
    seconds = "".join(
        f"{'never' if row[key] is None else f'{row[key]:.2f}':>10}"
        for key in ("serves_s", "whole_s")
    )
    share = row["meanwhile_per_s"] / row["before_per_s"] if row["before_per_s"] else 0.0
    return (
        f"{row['rate']:6g}  {row['way']:10}{seconds}{row['before_per_s']:10.0f}"
        f"{row['meanwhile_per_s']:11.0f}{share:8.2f}{row['failed']:8}"
    )


def as_text(rows: Sequence[Row], load_s: float) -> str:
    lines = [
        f"the host of a stage of one of two pipelines ends; a third of the weights is read in "
        f"{load_s:g} s; tokens/s",
        f"{'rate':>6}  {'way':10}{'serves s':>10}{'whole s':>10}{'before':>10}{'meanwhile':>11}"
        f"{'share':>8}{'failed':>8}",
        *map(as_line, rows),
    ]
    if found := ratios(rows):
        middle = statistics.median(found.values())
        lines.append(f"it computes {middle:.0f} times as soon with a borrowed stage (median)")
        lines.append(f"a ratio {RATIO}")
    faults = missed(rows)
    return "\n".join([*lines, *(f"MISSED: {each}" for each in faults)] + ["PASSED"] * (not faults))


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 6.0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--load-s", type=float, default=20.0)
    options = parser.parse_args()
    record = Record(options.seed)
    rows = measure(options)
    text = as_text(rows, options.load_s) + "\n"
    print(text, end="")
    figures = {"rows": rows, "ratios": ratios(rows), "ratio": RATIO, "load_s": options.load_s}
    is_void = record.keep(options.out, "capacity", figures, text)
    return 1 if missed(rows) or is_void else 0


if __name__ == "__main__":
    raise SystemExit(main())
