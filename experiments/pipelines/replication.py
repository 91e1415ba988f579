"""Cost of replicas at a peer for undisturbed streams (KevlarFlow, Figure 9): latency of requests,
and CPU time of a token.

    python -m experiments.pipelines.replication [--rounds 40] [--hosts]

Two instances keep replicas of each other's streams (`backup.mode: peer`). The same load runs with
and without them, in turns: the calls of one half name no peer. Batches take as long as at a
profile, so that pages are sent while something else would compute. Each instance is one process,
or with `--hosts` two stages in hosts, which bring each other the parts of pages.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.progress import Progress

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import draw, paired, percentile, process_cpu_s, session_for
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import CheckpointTarget, LoadReport
from kvrs.protocol.secrets import Scope
from kvrs_testkit.processes import Processes

PROFILE = "llama-3.1-70b-a100-vllm-tp4"
PEERS = {"d0": InstanceId("d1"), "d1": InstanceId("d0")}
STREAMS = 8  # Of each instance.
STAGES = 2
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 160), (120, 200)
SETTLES_S = 30.0
MOST_P99 = 0.028  # Published.


@dataclass
class Side:
    name: str
    latencies_s: list[list[float]] = field(default_factory=list)  # Of each round.
    cpu_s: list[float] = field(default_factory=list)  # Of a token, in each round.
    replica_pages: list[int] = field(default_factory=list)

    @property
    def replicates(self) -> bool:
        return self.name == "on"


def settings(*, hosts: bool) -> Config:
    nodes: list[dict[str, Any]] = []
    for number, name in enumerate(PEERS):
        instance: dict[str, Any] = {"id": name, "role": "both"}
        if hosts:
            stages = [{"node": f"n{number}-{stage}"} for stage in range(STAGES)]
            instance |= {"pp": STAGES, "group": "g", "stage_hosts": stages}
            nodes += [{"id": stage["node"]} for stage in stages]
        nodes.append({"id": f"n{number}", "instances": [instance]})
    engine = {"pages": 2048, "max_running": STREAMS, "pace": PROFILE}
    return parse_config(
        {
            "cluster": {"engine": engine, "nodes": nodes},
            "transfer": {"probe_interval_s": 3600.0},
            "backup": {"mode": "peer"},
        }
    )


class Bench:
    def __init__(
        self, processes: Processes, session: aiohttp.ClientSession, names: Sequence[str], seed: int
    ) -> None:
        """`names`: of the processes whose CPU time counts."""
        self._processes, self._names = processes, names
        self._session, self._seed, self._streams = session, seed, 0
        self._urls = {
            str(instance.id): instance.url for _, instance in processes.config.cluster.instances()
        }

    async def round(self, side: Side, number: int) -> None:
        """All streams of both instances at once, on emptied caches; those of a number are the same
        on both sides.
        """
        await self._empty()
        rng = random.Random(f"{self._seed} {number}")
        asked = [
            (name, draw(rng, rng.randint(*PROMPT_TOKENS)), rng.randint(*OUTPUT_TOKENS))
            for name in PEERS
            for _ in range(STREAMS)
        ]
        before = self._cpu_s()
        side.latencies_s.append(await asyncio.gather(*(self._one(side, *each) for each in asked)))
        await self._settle()
        tokens = sum(len(prompt) + output for _, prompt, output in asked)
        side.cpu_s.append((self._cpu_s() - before) / tokens)
        pages = [(await self._load(name)).replica_pages for name in PEERS]
        side.replica_pages.append(sum(pages))

    async def _one(self, side: Side, name: str, prompt: list[int], tokens: int) -> float:
        peers = [CheckpointTarget(PEERS[name], 0)] if side.replicates else []
        self._streams += 1
        body = {
            "model": "tiny-llama",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "kvrs": {
                "stream": f"stream-{self._streams}",
                "owner_epoch": 0,
                "attempt": 1,
                "prompt_tokens": len(prompt),
                "sources": [],
                "checkpoints": msgspec.to_builtins(peers),
            },
        }
        began_s = time.perf_counter()
        async with self._session.post(f"{self._urls[name]}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            if b'"finish_reason":"length"' not in await answer.read():
                raise RuntimeError("an engine ended a stream without its tokens")
        return time.perf_counter() - began_s

    async def _empty(self) -> None:
        """Drop all unused pages of the caches."""
        async with session_for(self._processes, Scope.ADMIN) as session:
            for name in PEERS:
                async with session.post(
                    f"{self._urls[name]}/reset_prefix_cache", json={}
                ) as answer:
                    answer.raise_for_status()

    async def _load(self, name: str) -> LoadReport:
        async with self._session.get(f"{self._urls[name]}/kvrs/v1/load") as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=LoadReport)

    async def _settle(self) -> None:
        """Pages that are behind are sent, and counted, before the round is over."""
        give_up_s = time.monotonic() + SETTLES_S
        while any([(await self._load(name)).checkpoint_lag_pages for name in PEERS]):
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"replicas still lag after {SETTLES_S:g} s")
            await asyncio.sleep(0.05)

    def _cpu_s(self) -> float:
        started = (self._processes.pid(name) for name in self._names)
        return sum(process_cpu_s(pid) for first in started for pid in family_of(first))


def family_of(pid: int) -> list[int]:
    """The process and those below it: ranks of a host."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


async def measure(
    processes: Processes, names: Sequence[str], rounds: int, seed: int
) -> tuple[Side, Side]:
    order, sides = random.Random(seed), (Side("off"), Side("on"))
    async with session_for(processes) as session:
        bench = Bench(processes, session, names, seed)
        for side in sides:  # The first rounds warm up.
            await bench.round(Side(side.name), -1)
        with Progress(disable=not sys.stderr.isatty()) as progress:
            for number in progress.track(range(rounds)):
                for side in order.sample(sides, 2):
                    await bench.round(side, number)
    return sides


def changes(off: Sequence[Sequence[float]], on: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean and 99th percentile of all latencies, and of their change the middle 95 % of drawn
    rounds.
    """
    rng, pairs = random.Random(0), list(zip(off, on, strict=True))

    def of(rounds: Sequence[tuple[Sequence[float], Sequence[float]]], key: str) -> tuple[Any, ...]:
        sides = ([each for one in side for each in one] for side in zip(*rounds, strict=True))
        if key == "mean":
            return tuple(map(statistics.fmean, sides))
        return tuple(percentile(side, 0.99) for side in sides)

    found: dict[str, Any] = {}
    for key in ("mean", "p99"):
        without, with_them = of(pairs, key)
        drawn = sorted(
            (ratio := of(rng.choices(pairs, k=len(pairs)), key))[1] / ratio[0] - 1
            for _ in range(1000)
        )
        found[key] = {
            "off_s": without,
            "on_s": with_them,
            "change": with_them / without - 1,
            "interval": [drawn[25], drawn[974]],
        }
    return found


def missed(latency: dict[str, Any], off: Side, on: Side) -> list[str]:
    found = []
    if (change := latency["p99"]["change"]) > MOST_P99:
        found.append(f"latency p99 {change:+.1%}; bar {MOST_P99:+.1%}")
    if any(off.replica_pages):
        found.append(f"replicas in rounds without them: {sum(off.replica_pages)} pages")
    if not all(on.replica_pages):
        found.append("a round with replicas that had none")
    return found


def as_text(latency: dict[str, Any], off: Side, on: Side, *, hosts: bool) -> str:
    of_hosts = f" of {STAGES} stages in hosts" if hosts else ""
    cost, half = paired(off.cpu_s, on.cpu_s)
    cpu_ms = [statistics.median(side.cpu_s) * 1e3 for side in (off, on)]
    lines = [
        f"replicas at the peer on and off in turns, {len(on.cpu_s)} rounds each of {STREAMS} "
        f"streams at each of two instances{of_hosts}; the pace of {PROFILE}",
        *(
            f"latency {key}: off {row['off_s']:.3f} s, on {row['on_s']:.3f} s: "
            f"{row['change']:+.1%} [{row['interval'][0]:+.1%}, {row['interval'][1]:+.1%}]"
            for key, row in latency.items()
        ),
        f"CPU of a token: off {cpu_ms[0]:.3f} ms, on {cpu_ms[1]:.3f} ms: {cost:+.1%} ± {half:.1%}",
        f"replicas of a round: {statistics.median(on.replica_pages):g} pages (median)",
    ]
    faults = missed(latency, off, on)
    return "\n".join(
        [*lines, *(f"MISSED: {each}" for each in faults), *["PASSED"] * (not faults), ""]
    )


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hosts", action="store_true", help="instances with hosts of stages")
    options = parser.parse_args()
    record = Record(options.seed)
    config = settings(hosts=options.hosts)
    hosts = [
        str(instance.stage_host_id(stage))
        for _, instance in config.cluster.instances()
        for stage in instance.remote_stages
    ]
    names = [*hosts, *PEERS]
    with Processes(config) as processes:
        processes.start(*names)
        processes.wait_ready(*names)
        off, on = asyncio.run(measure(processes, names, options.rounds, options.seed))
    latency = changes(off.latencies_s, on.latencies_s)
    text = as_text(latency, off, on, hosts=options.hosts)
    print(text, end="")
    figures = {"latency": latency, "off": vars(off), "on": vars(on)}
    name = "replication" + "-hosts" * options.hosts
    is_void = record.keep(options.out, name, figures, text)
    return 1 if missed(latency, off, on) or is_void else 0


if __name__ == "__main__":
    raise SystemExit(main())
