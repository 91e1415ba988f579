"""Decisions where nothing is paced: engines compute a model of 110 million parameters, the kernel
sets the rate of the link, the tables are those of `kvrs profile` and the rate is what the instance
reports.

    python -m experiments.link_monitor.computed [--rates 13] [--lengths 512 1024 2048]
    python -m experiments.link_monitor.computed --rates 2 --lengths 512 --profile-tokens 512

After a change of the rate, hand-offs of other streams pass over the link for some seconds. Then a
victim's stream is brought back four times in random order, on emptied caches: as `auto` decided it
on the reported rate before any of them, as it decides when it is told the rate, and in the two
fixed ways.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.command_line import parser_of
from experiments.link_monitor.decider import (
    N0,
    PRODUCED_TOKENS,
    Decider,
    crossover_bytes_per_s,
)
from experiments.random_model import write_random_llama
from experiments.record import Record
from experiments.rig import Rig, draw, session_for
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId
from kvrs.profiles.catalog import prefill_table
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import InstanceInfo, SourceRange
from kvrs.transfer.meter import Measurement, lower_bound
from kvrs_lab.report.student import interval
from kvrs_testkit.networks import Network, missing
from kvrs_testkit.processes import Processes

MODEL = "random-llama-110m"
LAYERS, KV_HEADS = 7, 8
CHUNK_TOKENS = 256
HOSTS = {"p0": "n0", "p1": "n1", "d1": "n1"}
# Times the rate at which migrating and recomputing cost the same, either way.
MOST_FACTOR = 3.0
# From a change of the rate until the victim is decided. Meanwhile hand-offs of other streams pass
# over the link: short prompts, so many seconds apart.
SETTLES_S = (2.0, 8.0)
OTHERS_TOKENS = 128
OTHERS_S = (0.5, 2.0)
BURST_BYTES = 1 << 17
BAR_REGRET = 0.10
MB = 1e6

AUTO, TOLD = "auto", "auto, told the rate"
WAYS = {
    "always_migrate": PolicyName.ALWAYS_MIGRATE,
    "always_recompute": PolicyName.ALWAYS_RECOMPUTE,
    AUTO: PolicyName.AUTO,
    TOLD: PolicyName.AUTO,
}


@dataclass(slots=True)
class Victim:
    """A stream that lost its decode instance, and what each way to bring it back took."""

    prompt_tokens: int
    factor: float
    bytes_per_s: float  # Of the link.
    since_s: float = 0.0  # The rate is as it is, when the victim is decided.
    reported_bytes_per_s: float = 0.0
    bound_bytes_per_s: float = 0.0  # On which `auto` decides.
    options: dict[str, Option] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def best_s(self) -> float:
        return min(self.seconds.values())


class Hosts(Processes):
    """Instances on two hosts of their own; the caller makes and removes the network."""

    def __init__(self, network: Network, model: Path, longest_tokens: int, pages: int) -> None:
        self._network = network
        engine = {"max_batch_tokens": CHUNK_TOKENS, "max_model_len": longest_tokens, "pages": pages}
        transfer = {"lease_s": 3600.0, "stall_timeout_s": 60.0}
        cluster = {
            "model": str(model),
            "engine": engine,
            "allow_faults": True,
            "nodes": [self._node("n0", "p0"), self._node("n1", "p1", "d1")],
        }
        super().__init__(parse_config({"cluster": cluster, "transfer": transfer}))

    def _node(self, host: str, *names: str) -> dict[str, Any]:
        address = self._network.addresses[host]
        instances = [
            {
                "id": name,
                "role": "decode" if name.startswith("d") else "prefill",
                "host": address,
                "port": 8000 + number,
                "page_port": 9000 + number,
            }
            for number, name in enumerate(names)
        ]
        agent = {"host": address, "port": 7001, "page_port": 7002, "gossip_port": 7946}
        return {"id": host, "instances": instances, "agent": agent}

    def _resolved(self, config: Config) -> Config:
        return config  # On hosts of their own all ports are free.

    def _placed(self, name: str, command: list[str]) -> list[str]:
        return self._network.command_at(HOSTS[name], *command)


class NamedRig(Rig):
    def _body(self, *arguments: Any) -> dict[str, Any]:
        return super()._body(*arguments) | {"model": MODEL}


class Bench:
    def __init__(self, rig: Rig, network: Network, profile: Path, seed: int) -> None:
        self._rig = rig
        self._network = network
        self._random = random.Random(seed)
        infos, table = list(rig.infos.values()), prefill_table(str(profile))
        self._deciders = {way: Decider(name, infos, table) for way, name in WAYS.items()}
        self._streams: dict[int, tuple[list[int], int]] = {}

    async def prepare(self, lengths: Sequence[int]) -> None:
        """Streams that nothing disturbs, whose prompts stay with p0: what each has had when it is
        hit, and the token that comes next.
        """
        for tokens in lengths:
            prompt, had = draw(self._random, tokens), list[int]()
            hand_off = await self._rig.prefill("p0", prompt, tokens)
            await self._rig.decode(
                "d1",
                prompt,
                tokens,
                hand_off=hand_off,
                tokens=PRODUCED_TOKENS + 1,
                on_token=had.append,
            )
            self._streams[tokens] = ([*prompt, *had[:PRODUCED_TOKENS]], had[PRODUCED_TOKENS])
        self._other = draw(self._random, OTHERS_TOKENS)
        await self._rig.prefill("p0", self._other, OTHERS_TOKENS)

    async def hit(self, victim: Victim) -> None:
        """Change the link, let some time pass, decide, and go all ways."""
        self._network.throttle("n0", victim.bytes_per_s, BURST_BYTES)
        changed_s = time.monotonic()
        settles_s = self._random.uniform(*SETTLES_S)
        while (left_s := changed_s + settles_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self._random.uniform(*OTHERS_S)))
            await self._hand_off_another()
        await self._look(victim)
        victim.since_s = time.monotonic() - changed_s
        rates = dict.fromkeys(WAYS, victim.bytes_per_s) | {AUTO: victim.bound_bytes_per_s}
        plans = {
            way: decider.lose(victim.prompt_tokens, rates[way])
            for way, decider in self._deciders.items()
        }
        for way in self._random.sample([*WAYS], len(WAYS)):
            plan, victim.options[way], stream = plans[way]
            victim.seconds[way] = await self._carry_out(plan, victim.prompt_tokens)
            decider, history = self._deciders[way], victim.prompt_tokens + PRODUCED_TOKENS
            decider.carried_out(stream, plan, history, victim.seconds[way])

    async def _hand_off_another(self) -> None:
        rig, size = self._rig, self._rig.geometry.page_size_tokens
        await rig.empty("d1")
        epoch = rig.infos[InstanceId("p0")].epoch
        source = SourceRange(InstanceId("p0"), 0, OTHERS_TOKENS // size, epoch)
        await rig.decode("d1", self._other, OTHERS_TOKENS, sources=[source])

    async def _look(self, victim: Victim) -> None:
        """Take the link from the target's next report, as a proxy does."""
        while not (found := [e for e in (await self._rig.load("d1")).links if e.source == N0]):
            await asyncio.sleep(0.1)
        (link,) = found
        measured = Measurement(link.bytes_per_s, link.spread, link.age_s)
        victim.reported_bytes_per_s = link.bytes_per_s
        victim.bound_bytes_per_s = lower_bound(measured)

    async def _carry_out(self, plan: act.Plan, prompt_tokens: int) -> float:
        """Seconds until the first new token."""
        rig, (history, due) = self._rig, self._streams[prompt_tokens]
        await rig.empty("p1", "d1")
        began_s, hand_off = time.perf_counter(), None
        if plan.prefill is not None:
            hand_off = await rig.prefill(plan.prefill, history, prompt_tokens)
        sources = [
            SourceRange(run.holder, run.first_page, run.pages, run.generation) for run in plan.runs
        ]
        token = await rig.decode(
            plan.decode, history, prompt_tokens, sources=sources, hand_off=hand_off
        )
        seconds = time.perf_counter() - began_s
        if token != due:
            raise RuntimeError(f"{plan} went on with token {token}; undisturbed it was {due}")
        return seconds


def profiled(model: Path, out: Path, tokens: int) -> None:
    """`kvrs profile` of the model on this machine, with nothing beside it."""
    options = {"--out": out, "--model": model, "--longest-tokens": tokens, "--repeats": 1}
    options |= {"--max-batch": 2, "--max-batch-tokens": CHUNK_TOKENS}
    words = [str(word) for pair in options.items() for word in pair]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "kvrs", "profile", *words], check=True, env=environment)


def victims(
    infos: Sequence[InstanceInfo],
    table: PrefillTable,
    lengths: Sequence[int],
    rates: int,
    seed: int,
) -> list[Victim]:
    """Every length with every rate, in random order."""
    found = []
    for length in lengths:
        crossing = crossover_bytes_per_s(infos, table, length)
        for index in range(rates):
            factor = MOST_FACTOR ** (2 * (index + 0.5) / rates - 1)
            found.append(Victim(length, factor, factor * crossing))
    random.Random(seed).shuffle(found)
    return found


async def measure(
    hosts: Hosts, network: Network, profile: Path, arguments: argparse.Namespace
) -> list[Victim]:
    async with session_for(hosts) as session:
        rig = NamedRig(hosts, session, str(profile))
        await rig.meet()
        bench = Bench(rig, network, profile, arguments.seed)
        await bench.prepare(arguments.lengths)
        infos, table = list(rig.infos.values()), prefill_table(str(profile))
        found = victims(infos, table, arguments.lengths, arguments.rates, arguments.seed)
        for number, victim in enumerate(found, 1):
            await bench.hit(victim)
            print(f"  {number} of {len(found)}: {row(victim)}", flush=True)
        return found


def regret(found: Sequence[Victim], way: str) -> tuple[float, float]:
    """The excess of a way over the best of each victim, in sum, as a share of that; and half of its
    95 % interval, by the differences of the victims.
    """
    mean_s = sum(victim.best_s for victim in found) / len(found)
    lost = interval([victim.seconds[way] - victim.best_s for victim in found])
    assert lost is not None
    return lost.mean / mean_s, (lost.half_width or 0.0) / mean_s


HEAD = (
    f"{'tokens':>7}{'link MB/s':>11}{'for s':>7}{'reported':>10}{'bound':>7}{'migrate s':>11}"
    f"{'recompute':>11}{'auto':>8}{'told':>8}{'of best':>9}  auto took, told"
)


def row(victim: Victim) -> str:
    rates = (victim.reported_bytes_per_s / MB, victim.bound_bytes_per_s / MB)
    migrate_s, recompute_s, auto_s, told_s = (victim.seconds[way] for way in WAYS)
    return (
        f"{victim.prompt_tokens:>7,}{victim.bytes_per_s / MB:>11.2f}{victim.since_s:>7.1f}"
        f"{rates[0]:>10.2f}{rates[1]:>7.2f}{migrate_s:>11.2f}{recompute_s:>11.2f}{auto_s:>8.2f}"
        f"{told_s:>8.2f}{auto_s / victim.best_s:>9.2f}  "
        f"{victim.options[AUTO].value}, {victim.options[TOLD].value}"
    )


def as_text(found: Sequence[Victim], passed: bool) -> str:
    in_order = sorted(found, key=lambda victim: (victim.prompt_tokens, victim.bytes_per_s))
    lines = [
        f"{len(found)} recoveries of streams of a model of 110 million parameters, computed; "
        "seconds to the next token",
        HEAD,
        *map(row, in_order),
        "",
        f"{'':22}{'in sum s':>10}{'above the best of each':>26}",
    ]
    for way in WAYS:
        share, half = regret(found, way)
        total_s = sum(victim.seconds[way] for victim in found)
        lines.append(f"{way:22}{total_s:>10.1f}{share:>17.1%} ± {half:.1%}")
    told = sum(victim.seconds[TOLD] for victim in found)
    auto = sum(victim.seconds[AUTO] for victim in found)
    lines += [
        f"auto against auto that is told the rate: {auto / told - 1:+.1%}",
        f"bar {BAR_REGRET:.0%} above the best of each",
        "PASSED" if passed else "FAILED",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--rates", type=int, default=13, help="for each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--profile-tokens", type=int, default=1088)
    arguments = parser.parse_args()
    if (why := missing()) is not None:
        print(f"cannot run here: {why}")
        return 2
    record = Record(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kvrs-computed-") as scratch:
        model, profile = Path(scratch) / MODEL, Path(scratch) / "profile.json"
        write_random_llama(model, arguments.seed, layers=LAYERS, kv_heads=KV_HEADS)
        profiled(model, profile, arguments.profile_tokens)
        longest = max(arguments.lengths) + 2 * PRODUCED_TOKENS
        pages = (sum(arguments.lengths) + 2 * longest + OTHERS_TOKENS) // 16 + 16
        with Network("n0", "n1") as network, Hosts(network, model, longest, pages) as hosts:
            # The first one to start measures for all.
            for name in HOSTS:
                hosts.start(name)
                hosts.wait_ready(name)
            found = asyncio.run(measure(hosts, network, profile, arguments))
        table = profile.read_text()
    share, half = regret(found, AUTO)
    passed = share <= BAR_REGRET
    text = as_text(found, passed)
    print(text)
    rows = [
        {
            "prompt_tokens": victim.prompt_tokens,
            "factor": victim.factor,
            "bytes_per_s": victim.bytes_per_s,
            "since_s": victim.since_s,
            "reported_bytes_per_s": victim.reported_bytes_per_s,
            "bound_bytes_per_s": victim.bound_bytes_per_s,
            "options": victim.options,
            "seconds": victim.seconds,
        }
        for victim in found
    ]
    figures = {"regret": share, "half_width": half, "passed": passed, "rows": rows}
    is_void = record.keep(arguments.out, "computed", figures | {"profile": table}, text)
    return 2 if is_void else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
