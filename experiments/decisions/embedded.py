"""Predicted beside real costs in a cluster of real processes, for each option.

    python -m experiments.decisions.embedded [--options recompute migrate restore split]
        [--recoveries 10] [--seed 0] [--quick] [--out DIR]

Two nodes, each with a prefill and a decode instance of the embedded engine, on loopback, at the
pace of OPT-66B on two A100s, and for restores an agent each; a proxy that takes the option of the
series for each victim. In each wave four streams run when one decode instance gets SIGKILL. It is
started again behind the wave, so that no start of a process is beside a recovery.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from experiments.command_line import parser_of
from experiments.decisions.points import (
    Point,
    Wave,
    conditions,
    missed,
    missed_within,
    row_of,
    show,
    wave,
)
from experiments.record import Record
from experiments.rig import draw
from kvrs.config.file import Config, parse_config
from kvrs.core.model.estimates import Option
from kvrs.net.admin import AdminClient
from kvrs_engine.scheduling.pace import Pace
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.traces.records import ReplayRequest, StreamRecord
from kvrs_testkit.processes import Processes, nodes_with_pairs

# Slow enough that the tiny model's real work fits into its steps.
PROFILE = "opt-66b-a100-vllm-tp2"
OPTIONS = (Option.RECOMPUTE, Option.MIGRATE, Option.RESTORE, Option.SPLIT)
# By which 500 tokens of the tiny model are moved in 0.25 s, as those of OPT-66B at 38 Gbit/s.
LINK_BYTES_PER_S = 4e6
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, (250, 700), 120
UNDER_WAY_TOKENS = (20, 40)  # Of all streams, at the kill.
ARRIVALS_S = 1.0
WATCHED_S = 2.0  # Before the kill and behind the recovery: steps of the target.
KEPT = 1.2  # Steps over the profile's; a target with longer ones did not keep its pace.
MOST_WAVES = 10  # Of an option.
_UP_S, _LOOK_S = 300.0, 0.1
INSTANCES, AGENTS = ("p0", "d0", "p1", "d1"), ("agent-n0", "agent-n1")


class ForcedProcesses(Processes):
    """Processes whose proxy takes one option."""

    def __init__(self, option: Option, seed: int) -> None:
        super().__init__(settings(option, seed))
        self.option = option

    def _spawn(self, name: str, *arguments: str, **more: str) -> None:
        if name == "proxy":
            arguments = ("experiments.decisions.forced", self.option.value, *arguments[2:])
        super()._spawn(name, *arguments, **more)

    @property
    def url(self) -> str:
        return f"http://{self.config.proxy.host}:{self.config.proxy.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{self.config.proxy.admin_host}:{self.config.proxy.admin_port}"

    async def until_tested(self) -> None:
        async with AdminPort(AdminClient(self.admin_url)) as port:
            await port.wait_all_up(_UP_S, _LOOK_S, tested=True)


def settings(option: Option, seed: int) -> Config:
    # With checkpoints beside the target, no split would be faster than fetching all.
    backup = "both" if option is Option.RESTORE else "off"
    engine = {"seed": seed, "pace": PROFILE, "max_batch_tokens": 2048}
    engine |= {"max_model_len": 2048, "pages": 1024}
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"engine": engine, "nodes": nodes_with_pairs()},
            "policy": {"assumed_link_bytes_per_s": LINK_BYTES_PER_S},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S, "probe_interval_s": 1.0},
            "backup": {"mode": backup, "capacity_bytes": 64 << 20},
        }
    )


def requests_of(rng: random.Random) -> list[ReplayRequest]:
    return [
        ReplayRequest(
            rng.uniform(0, ARRIVALS_S), tuple(draw(rng, rng.randint(*PROMPT_TOKENS))), OUTPUT_TOKENS
        )
        for _ in range(STREAMS)
    ]


def waves(processes: ForcedProcesses, recoveries: int, seed: int) -> Iterator[Wave]:
    """Yield waves until the option has so many recoveries."""
    option, found = processes.option, 0
    rng = random.Random(f"decisions/{option}/{seed}")
    names = [*INSTANCES, *(AGENTS if processes.config.agents_run else ())]
    processes.start(*names)
    processes.wait_ready(*names)
    processes.start_proxy()
    for _ in range(MOST_WAVES):
        asyncio.run(processes.until_tested())
        one = asyncio.run(
            wave(
                processes.url,
                processes.admin_url,
                requests_of(rng),
                rng.randint(*UNDER_WAY_TOKENS),
                processes.kill,
            )
        )
        processes.start(one.victim)
        processes.wait_ready(one.victim)
        yield one
        found += sum(row["option"] == option for row in one.rows)
        if found >= recoveries:
            break


def points_of(one: Wave, pace: Pace) -> list[Point]:
    """Return the recoveries of a wave, with the steps of their target over the profile's."""
    records = {record.stream: record for record in one.run.records}
    points = one.points()
    back_s = max((_back_s(records[row["stream"]], one.killed_s) for row in one.rows), default=0.0)
    for point, row in zip(points, one.rows, strict=True):
        there = [each["id"] for each in one.streams if each["decode"] == row["to"]]
        came = [each["stream"] for each in one.rows if each["to"] == row["to"]]
        ratios = [
            _steps([records[name] for name in names], since_s, pace)
            for names, since_s in (
                (there, one.killed_s - WATCHED_S),
                ([*there, *came], back_s),
            )
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        point.pace = max(known) if known else None
    return points


def _back_s(record: StreamRecord, killed_s: float) -> float:
    """Return the time of the first token behind the longest pause over the kill."""
    times = record.token_times_s
    pauses = [(after - before, after) for before, after in pairwise(times)]
    return max(((pause, at) for pause, at in pauses if at > killed_s), default=(0.0, killed_s))[1]


def _steps(records: Sequence[StreamRecord], since_s: float, pace: Pace) -> float | None:
    """Return the mean step of an instance that decodes these streams for `WATCHED_S`, over the
    profile's; None: it had no streams.
    """
    until_s, intervals, contexts = since_s + WATCHED_S, list[float](), list[int]()
    for record in records:
        times = [at_s for at_s in record.token_times_s if since_s <= at_s < until_s]
        intervals += [after - before for before, after in pairwise(times)]
        before = sum(at_s < since_s for at_s in record.token_times_s)
        contexts.append(record.prompt_tokens + before + len(times) // 2)
    if not intervals:
        return None
    return fmean(intervals) / pace.batch_s([], len(contexts), sum(contexts))


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--options", nargs="+", type=Option, choices=OPTIONS, default=OPTIONS)
    parser.add_argument("--recoveries", type=int, default=10, help="of each option, at least")
    parser.add_argument("--quick", action="store_true", help="one wave of each option")
    options = parser.parse_args()
    recoveries = 1 if options.quick else options.recoveries
    record, console = Record(options.seed), Console(record=True, width=120)
    pace, points, rounds = Pace(PROFILE), list[Point](), list[dict[str, Any]]()
    for option in options.options:
        with ForcedProcesses(option, options.seed) as processes:
            for one in waves(processes, recoveries, options.seed):
                found = points_of(one, pace)
                points += found
                rounds.append(row_of(option.value, one, found))
                print(f"{option.value}: {len(found)} recoveries", flush=True)
    return keep(console, record, options.out, options.seed, points, rounds)


def keep(
    console: Console,
    record: Record,
    out: Path | None,
    seed: int,
    points: Sequence[Point],
    rounds: Sequence[dict[str, Any]],
) -> int:
    judged = [each for each in points if each.pace is not None and each.pace <= KEPT]
    show(console, points, judged)
    console.print(conditions(rounds, seed), markup=False, highlight=False)
    console.print(f"judged: steps at most x{KEPT} of {PROFILE}", markup=False, highlight=False)
    wrong = [*missed(points, judged), *missed_within(judged)]
    if failed := sum(each["failed"] for each in rounds):
        wrong.append(f"{failed} streams did not complete")
    console.print("missed:", wrong or "nothing", markup=False, highlight=False)
    figures = {"profile": PROFILE, "waves": rounds, "missed": wrong}
    is_void = record.keep(out, "embedded", figures, console.export_text())
    return 2 if is_void else 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
