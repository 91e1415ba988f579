"""Kills of decode servers under ten open streams: how many streams each kill hits, and where the
streams lie before it and after the restart.

    python -m experiments.kill_spread.run [--kills 30] [--seeds 1 2 3] [--quick] [--out DIR]
    python -m experiments.kill_spread.run --cases 0 --victims "in turn" --seeds 1 --show

All is in one process, in memory and virtual time: a proxy, and scripted vLLM servers.
"""

import argparse
import asyncio
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.origin import CommandLine
from kvrs.core.model.member import Member
from kvrs.ids import InstanceId
from kvrs.proxy.server import Proxy
from kvrs_testkit.memory_loop import MemoryLoop
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.scripted_model import save_tokenizer
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.vllm_cluster import CONFIG

PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1", "d2")
STREAMS, TOKENS, TOKEN_S = 10, 100, 0.05
PROMPT_TOKENS = (20, 200)
# How a victim is chosen: any server that runs, that of a random stream, one after the other, the
# one with most streams.
VICTIMS = ("any", "of a stream", "in turn", "fullest")
# The victim that has most streams is the worst case: an even spread of ten has four there.
WITH_BAR = VICTIMS[:3]
BAR = 4.5
KILLS, QUICK_KILLS = 30, 6
_TESTED_S, _LOOK_S = 60.0, 0.1  # Of the virtual clock.
_SETTLED_S = 0.5  # Behind a restart, before the spread is noted.
_AGAIN_S = 0.2  # A client's pause behind a failed request.


@dataclass(frozen=True, slots=True)
class Case:
    """Times of kills and restarts."""

    gap_s: tuple[float, float]  # Between two kills, drawn uniformly.
    away_s: float  # Between a kill and the restart.
    has_bar: bool = False

    def __str__(self) -> str:
        first, last = self.gap_s
        return f"each {first:g} to {last:g} s, away for {self.away_s:g} s"


# In the second and third case a server has no streams for 2 s longer, as one that is tested first.
# In the second one another server is often still away at a kill, so ten streams lie on one or two.
CASES = (Case((2.0, 4.0), 1.0, True), Case((2.0, 4.0), 3.0), Case((4.0, 8.0), 3.0))


@dataclass(slots=True)
class Kill:
    victim: str
    hit: int  # Streams that the victim had.
    even: int  # Streams that it would have had at most if all lay evenly on the servers then up.
    paused: int  # Other servers that were up and got no new streams.
    before: dict[str, int]  # Streams by server.
    after: dict[str, int] = field(default_factory=dict)  # A moment after the victim's restart.


@dataclass(slots=True)
class Trial:
    """One series of kills before one proxy."""

    case: Case
    victims: str
    seed: int
    kills: list[Kill] = field(default_factory=list)
    whole: int = 0  # Streams that ended with all tokens.
    failed: Counter[str] = field(default_factory=Counter)

    def mean(self, what: str) -> float:
        return fmean(getattr(kill, what) for kill in self.kills)


class Cluster:
    """A proxy as `kvrs proxy --prefill URL ... --decode URL ...` starts it, and its servers."""

    def __init__(self, servers: dict[str, ScriptedVllm], proxy: Proxy) -> None:
        self.servers, self.proxy = servers, proxy
        self.http = aiohttp.ClientSession()

    @property
    def members(self) -> list[Member]:
        """The decode servers that the proxy has."""
        members = self.proxy.parts.driver.control.policy.members
        return [members[InstanceId(name)] for name in DECODES if InstanceId(name) in members]

    def spread(self) -> dict[str, int]:
        """Streams by decode server, as the proxy has placed them."""
        return dict.fromkeys(DECODES, 0) | {each.id: each.streams for each in self.members}

    async def until_tested(self) -> None:
        control = self.proxy.parts.driver.control
        async with asyncio.timeout(_TESTED_S):
            while len(self.members) < len(DECODES) or not all(
                (control.self_tests.describe(each.id) or {}).get("done") for each in self.members
            ):
                await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def open_cluster() -> AsyncIterator[Cluster]:
    """Open a cluster whose decode servers are up and tested."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_tokenizer(directory)
        (directory / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 1 << 16}))
        script = VllmScript(pause_s=TOKEN_S)
        servers = dict[str, ScriptedVllm]()
        for role, names in (("prefill", PREFILLS), ("decode", DECODES)):
            for name in names:
                servers[name] = ScriptedVllm(name, "n0", role=role, script=script)
                await servers[name].start()
                stack.push_async_callback(servers[name].close)
        prefill, decode = (
            [f"http://127.0.0.1:{servers[name].port}" for name in names]
            for names in (PREFILLS, DECODES)
        )
        of_proxy: dict[str, int | str | None] = {"port": 0, "admin_port": 0}
        line = CommandLine(prefill, decode, model=str(directory), proxy=of_proxy)
        proxy = Proxy(line.read({}), SECRET)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        cluster = Cluster(servers, proxy)
        stack.push_async_callback(cluster.http.close)
        await cluster.until_tested()
        yield cluster


async def run(trial: Trial, kills: int) -> None:
    """Kill servers under open streams."""
    rng = random.Random(trial.seed)
    async with open_cluster() as cluster, asyncio.TaskGroup() as group:
        clients = [
            group.create_task(_client(cluster, trial, random.Random(f"{trial.seed}/{number}")))
            for number in range(STREAMS)
        ]
        await asyncio.sleep(2 * TOKENS * TOKEN_S)
        restarts = dict[str, asyncio.Task[None]]()
        while len(trial.kills) < kills:
            await asyncio.sleep(rng.uniform(*trial.case.gap_s))
            running = [each for each in DECODES if each not in restarts or restarts[each].done()]
            victim = _victim(trial, rng, cluster.spread(), running)
            if victim is not None:
                kill = _note(cluster, trial, victim)
                await cluster.servers[victim].kill()
                restarts[victim] = group.create_task(_restart(cluster, trial, kill))
        await asyncio.gather(*restarts.values())
        for client in clients:
            client.cancel()


async def _client(cluster: Cluster, trial: Trial, rng: random.Random) -> None:
    """Make one request after the other, so that one stream is open at any time."""
    url = f"http://127.0.0.1:{cluster.proxy.port}/v1/completions"
    await asyncio.sleep(rng.uniform(0, TOKENS * TOKEN_S))
    while True:
        fields: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "stream": True}
        fields["prompt"] = [rng.randrange(1000) for _ in range(rng.randint(*PROMPT_TOKENS))]
        fields["return_token_ids"] = True
        ended = ""
        try:
            async with cluster.http.post(url, json=fields) as response:
                body = await response.read()
                if response.status != 200 or b'"finish_reason":"length"' not in body:
                    ended = f"status {response.status}"
        except aiohttp.ClientError as error:
            ended = type(error).__name__
        if ended:
            trial.failed[ended] += 1
            await asyncio.sleep(_AGAIN_S)
        else:
            trial.whole += 1


def _victim(
    trial: Trial, rng: random.Random, spread: dict[str, int], running: Sequence[str]
) -> str | None:
    """Choose a server that runs; None: the one whose turn it is does not run yet."""
    match trial.victims:
        case "any":
            return rng.choice(running) if running else None
        case "of a stream":
            counts = [spread[name] for name in running]
            return rng.choices(running, counts)[0] if any(counts) else None
        case "in turn":
            next_one = DECODES[len(trial.kills) % len(DECODES)]
            return next_one if next_one in running else None
        case "fullest":
            return max(running, key=lambda name: spread[name], default=None)
        case _:
            raise AssertionError(trial.victims)


def _note(cluster: Cluster, trial: Trial, victim: str) -> Kill:
    spread, members = cluster.spread(), cluster.members
    paused = sum(each.id != victim and each.answers.until_s is not None for each in members)
    even = -(-sum(spread.values()) // max(1, len(members)))
    trial.kills.append(kill := Kill(victim, spread[victim], even, paused, spread))
    return kill


async def _restart(cluster: Cluster, trial: Trial, kill: Kill) -> None:
    await asyncio.sleep(trial.case.away_s)
    await cluster.servers[kill.victim].restart()
    await asyncio.sleep(_SETTLED_S)
    kill.after = cluster.spread()


def table_of(trials: Sequence[Trial]) -> Table:
    table = Table(title="Of ten streams")
    table.add_column("kills")
    table.add_column("victim")
    for name in ("hit, mean", "by seed", "most", "evenly", "paused", "whole", "failed"):
        table.add_column(name, justify="right")
    for (case, victims), of in _by_kind(trials).items():
        table.add_row(
            str(case),
            victims,
            f"{_mean(of, 'hit'):.2f}",
            " ".join(f"{trial.mean('hit'):.2f}" for trial in of),
            str(max(kill.hit for trial in of for kill in trial.kills)),
            f"{_mean(of, 'even'):.2f}",
            f"{_mean(of, 'paused'):.2f}",
            str(sum(trial.whole for trial in of)),
            str(sum(trial.failed.total() for trial in of)),
        )
    return table


def _by_kind(trials: Sequence[Trial]) -> dict[tuple[Case, str], list[Trial]]:
    found = dict[tuple[Case, str], list[Trial]]()
    for trial in trials:
        found.setdefault((trial.case, trial.victims), []).append(trial)
    return found


def _mean(trials: Sequence[Trial], what: str) -> float:
    return fmean(trial.mean(what) for trial in trials)


def misses(trials: Sequence[Trial]) -> list[str]:
    """Return the bars that the run misses."""
    found = [
        f"{case}, {victims}: {_mean(of, 'hit'):.2f} of ten; bar {BAR:g}"
        for (case, victims), of in _by_kind(trials).items()
        if case.has_bar and victims in WITH_BAR and _mean(of, "hit") > BAR
    ]
    failed = sum((trial.failed for trial in trials), Counter[str]())
    return found + ([f"failed requests: {dict(failed)}; bar none"] if failed else [])


def shown(trial: Trial) -> str:
    """Return a line for each kill: streams at each server before it, and after the restart."""
    lines = [f"{trial.case}, {trial.victims}, seed {trial.seed}"]
    for kill in trial.kills:
        before, after = ("/".join(map(str, of.values())) for of in (kill.before, kill.after))
        lines.append(f"  {kill.victim}: {kill.hit:2} of {before:8} then {after}")
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--kills", type=int, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)))
    parser.add_argument("--victims", nargs="+", default=VICTIMS, choices=VICTIMS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_KILLS} kills, one seed")
    parser.add_argument("--show", action="store_true", help="print each kill")
    options = parser.parse_args()
    kills = options.kills or (QUICK_KILLS if options.quick else KILLS)
    seeds = options.seeds or ([1] if options.quick else [1, 2, 3])
    record = Record(*seeds, timed=False)
    logging.disable(logging.CRITICAL)  # Each death is a warning.
    trials = [
        Trial(CASES[case], victims, seed)
        for case in options.cases
        for victims in options.victims
        for seed in seeds
    ]
    for trial in trials:
        with asyncio.Runner(loop_factory=MemoryLoop) as runner:
            runner.run(run(trial, kills))
        if options.show:
            print(shown(trial))
    return keep(options, record, trials, kills)


def keep(options: argparse.Namespace, record: Record, trials: Sequence[Trial], kills: int) -> int:
    """Print and keep the figures; return the exit status."""
    console = Console(record=True, width=120)
    console.print(f"{kills} kills for each seed, three decode servers, ten open streams")
    console.print(table_of(trials))
    missed = misses(trials)
    console.print("missed:", missed or "nothing", markup=False)
    # `asdict` counts the items of a Counter.
    rows = [asdict(trial) | {"failed": dict(trial.failed)} for trial in trials]
    figures = {"kills": kills, "trials": rows, "missed": missed}
    record.keep(options.out, "kill_spread", figures, console.export_text())
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
