"""Deaths of hosts one after the other under load, each replaced by a borrowed stage until the own
host has loaded: how soon the instance computes again, and what the load does to other streams.

    python -m experiments.pipelines.loans [--kills 24] [--rate 3] [--load-s 4]

The whole model is read in three times `--load-s`, by the rate of the disk; a host's process starts
and imports meanwhile. The longest gap of streams at the other pipeline from the loan until the own
host is back is set beside that of as long a time before the death.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from experiments.command_line import parser_of
from experiments.pipelines.two import (
    PIPELINES,
    Pipelines,
    Row,
    config_of,
    donors_of,
    end,
    is_whole,
    longest_gap_s,
    parts_of,
    requests_of,
    serves,
)
from experiments.record import Record
from kvrs.cluster.launcher import Cluster
from kvrs.engine.random_model import write_tiny_model
from kvrs.load.admin import AdminPort
from kvrs.load.open_loop import replay
from kvrs.traces.records import StreamRecord

STAGES, TOKENS = 3, (100, 200)
CALM_S, MOST_S, STREAM_S = 6.0, 120.0, 120.0
MOST_SERVES_S, MOST_RATIO = 0.1, 2.0


@contextmanager
def cluster_of(load_s: float, seed: int) -> Iterator[Cluster]:
    with TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_tiny_model(model, seed)
        size_bytes = (model / "model.safetensors").stat().st_size
        engine = {"disk_bytes_per_s": size_bytes / STAGES / load_s}
        config = config_of(STAGES, group=True, seed=seed, engine=engine, model=model)
        with Cluster(config, lambda line: None) as cluster:
            yield cluster


async def measure(options: argparse.Namespace, cluster: Cluster) -> Row:
    rng = random.Random(f"loans {options.seed}")
    # More than are needed: the load ends with the deaths.
    count = round(options.rate * options.kills * (CALM_S + 4 * options.load_s + 20))
    requests = requests_of(count, options.rate, TOKENS, options.seed)
    async with AdminPort(cluster.proxies[0].admin, cluster.secret) as port:
        own, start_s, deaths = Pipelines(port), time.monotonic(), list[Row]()
        records: list[StreamRecord] = []
        load = asyncio.create_task(
            replay(cluster.url, requests, start_s=start_s, timeout_s=STREAM_S, ended=records)
        )
        try:
            for number in range(options.kills):
                victim, stage = f"d{number % PIPELINES}", rng.randrange(STAGES)
                deaths.append(await _one(own, victim, stage, start_s))
                print(f"  {as_line(deaths[-1])}", flush=True)
            await asyncio.sleep(CALM_S)  # Streams that the last death has met end.
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    return {
        "failed": sum(record.error is not None for record in records),
        "streams": len(records),
        "deaths": [with_gaps(death, records) for death in deaths],
    }


async def _one(own: Pipelines, victim: str, stage: int, start_s: float) -> Row:
    before = await own.until(
        lambda rows: all(is_whole(row, STAGES) for row in rows.values()), MOST_S
    )
    if before is None:
        raise RuntimeError(f"a pipeline is not whole after {MOST_S:g} s")
    await asyncio.sleep(CALM_S)
    streams = await own.streams_at(victim)
    pid = before[victim]["stages"][stage]["host_pid"]
    killed_s = time.monotonic() - start_s
    end(pid)

    def is_after(row: Row) -> bool:
        return all(each["host_pid"] != pid for each in row["stages"])

    again = await own.until(
        lambda rows: is_after(rows[victim]) and serves(rows[victim], STAGES), MOST_S
    )
    serves_s = time.monotonic() - start_s - killed_s
    whole = await own.until(
        lambda rows: is_after(rows[victim]) and is_whole(rows[victim], STAGES), MOST_S
    )
    then, now = parts_of(before), parts_of(whole or {})
    return {
        "victim": victim,
        "stage": stage,
        "killed_s": killed_s,
        "serves_s": None if again is None else serves_s,
        "is_borrowed": again is not None and any(donors_of(again[victim])),
        "whole_s": None if whole is None else time.monotonic() - start_s - killed_s,
        "streams": sorted(streams),
        "changed": sorted(
            name
            for name in then
            if name != f"{victim}-stage-{stage}" and now.get(name) != then[name]
        ),
    }


def with_gaps(death: Row, records: Sequence[StreamRecord]) -> Row:
    """The death with the longest gaps of streams that it did not hit: while the host loads, and in
    as long a time before.
    """
    if death["whole_s"] is None:
        return death | {"gap_s": None, "calm_s": None, "streams": len(death["streams"])}
    others = [each.token_times_s for each in records if each.stream not in death["streams"]]
    span_s = death["whole_s"] - death["serves_s"]

    def longest_s(streams: Iterable[Sequence[float]], from_s: float) -> float:
        return max((longest_gap_s(each, from_s, from_s + span_s) for each in streams), default=0.0)

    killed_s = death["killed_s"]
    before = [[at_s for at_s in each if at_s <= killed_s] for each in others]
    return death | {
        "streams": len(death["streams"]),
        "gap_s": longest_s(others, killed_s + death["serves_s"]),
        "calm_s": longest_s(before, killed_s - span_s),
    }


def as_line(row: Mapping[str, Any]) -> str:
    gaps = "".join(
        f"{'-' if row[key] is None else f'{row[key] * 1e3:.0f}':>8}"
        for key in ("calm_s", "gap_s")
        if key in row
    )
    seconds = "".join(
        f"{'never' if row[key] is None else f'{row[key]:.2f}':>9}"
        for key in ("serves_s", "whole_s")
    )
    where = "borrowed" if row["is_borrowed"] else "own"
    return f"{row['victim']:4}{row['stage']:6}  {where:10}{seconds}{gaps}"


def ratio_of(deaths: Sequence[Row]) -> float | None:
    """The longest gap while a host loads over that before, in the median."""
    found = [row["gap_s"] / row["calm_s"] for row in deaths if row["gap_s"] and row["calm_s"]]
    return statistics.median(found) if found else None


def serves_s_of(deaths: Sequence[Row]) -> float | None:
    """The median of those with a borrowed stage."""
    found = [row["serves_s"] for row in deaths if row["is_borrowed"]]
    return statistics.median(found) if found else None


def missed(figures: Row) -> list[str]:
    """The bars that are missed."""
    deaths = figures["deaths"]
    found = [f"{figures['failed']} streams failed"] if figures["failed"] else []
    found += [f"{row['victim']}: never whole" for row in deaths if row["whole_s"] is None]
    found += [
        f"{row['victim']}: {', '.join(row['changed'])} changed" for row in deaths if row["changed"]
    ]
    serves_s, ratio = serves_s_of(deaths), ratio_of(deaths)
    if serves_s is None:
        found.append("no stage was borrowed")
    elif serves_s > MOST_SERVES_S:
        found.append(f"it computes again after {serves_s:.2f} s; bar {MOST_SERVES_S:g} s")
    if ratio is not None and ratio > MOST_RATIO:
        found.append(f"the longest gap while a host loads is {ratio:.1f} times; bar {MOST_RATIO:g}")
    return found


def as_text(figures: Row) -> str:
    deaths = figures["deaths"]
    lines = [
        "hosts of stages end one after the other; longest gaps of other streams in ms",
        f"{'':4}{'stage':>6}  {'host':10}{'serves s':>9}{'whole s':>9}{'before':>8}{'loading':>8}",
        *map(as_line, deaths),
        f"{figures['streams']} streams, {figures['failed']} failed",
    ]
    if (serves_s := serves_s_of(deaths)) is not None:
        lines.append(f"with a borrowed stage it computes again after {serves_s:.2f} s (median)")
    if (ratio := ratio_of(deaths)) is not None:
        lines.append(f"the longest gap while a host loads: {ratio:.1f} times that before (median)")
    faults = missed(figures)
    return "\n".join([*lines, *(f"MISSED: {each}" for each in faults)] + ["PASSED"] * (not faults))


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--rate", type=float, default=3.0, help="requests/s")
    parser.add_argument("--load-s", type=float, default=4.0, help="of a host")
    options = parser.parse_args()
    record = Record(options.seed)
    with cluster_of(options.load_s, options.seed) as cluster:
        figures = uvloop.run(measure(options, cluster))
    text = as_text(figures) + "\n"
    print(text, end="")
    is_void = record.keep(options.out, "loans", figures, text)
    return 1 if missed(figures) or is_void else 0


if __name__ == "__main__":
    raise SystemExit(main())
