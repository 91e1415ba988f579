"""Cost of checkpoints for an undisturbed stream, and loss with a failure.

    python -m experiments.checkpoint_cost.run [--rounds 120] [--kills 10]

Cost: real engines, an agent, the same streams with and without checkpoints in turns; CPU time of
the engines per token, and the times between tokens. Loss: decode is killed at random moments;
tokens that no holder has, per stream.
"""

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.progress import Progress

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import HandOff, Rig, draw, interval, session_for
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import AgentReport, CheckpointTarget
from kvrs_testkit.processes import Processes

STREAMS = 8
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 192
RESERVED_BYTES = 8 << 20
AGENT = InstanceId("agent-n1")
# Killed streams are longer, so that a kill finds all of them at work.
LONG_OUTPUT_TOKENS = 1200
KILL_AFTER_TOKENS = (100, 900)

WANTED_COST = 0.03
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def settings() -> Config:
    nodes = [
        {
            "id": "n0",
            "instances": [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode"}],
        },
        {"id": "n1", "instances": [{"id": "d1", "role": "decode"}]},
    ]
    return parse_config(
        {
            "cluster": {"engine": {"max_model_len": 2048, "pages": 2048}, "nodes": nodes},
            "transfer": {"probe_interval_s": 3600.0},
            "backup": {"mode": "remote"},
        }
    )


@dataclass
class Side:
    """One way of running the same streams: with or without checkpoints."""

    checkpoints: Sequence[CheckpointTarget]
    prefill_cpu_s: list[float] = field(
        default_factory=list
    )  # Per prompt token, of p0; a sample is one round.
    decode_cpu_s: list[float] = field(default_factory=list)  # Per output token, of d0.
    cpu_s: list[float] = field(default_factory=list)  # Per token, of both.
    agent_cpu_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Bench:
    def __init__(
        self, processes: Processes, rig: Rig, session: aiohttp.ClientSession, seed: int
    ) -> None:
        self._processes = processes
        self._rig = rig
        self._session = session
        self._rng = random.Random(seed)

    async def round(self, side: Side) -> None:
        """All streams at once, from prefill to the last token, on emptied caches."""
        await self._rig.empty("p0", "d0")
        prompts = [draw(self._rng, PROMPT_TOKENS) for _ in range(STREAMS)]
        names = [self._rig.new_stream() for _ in prompts]
        before = self._cpu_s()
        hand_offs = await asyncio.gather(
            *(
                self._rig.prefill("p0", prompt, PROMPT_TOKENS, side.checkpoints, stream=name)
                for prompt, name in zip(prompts, names, strict=True)
            )
        )
        rows = zip(prompts, hand_offs, names, strict=True)
        await asyncio.gather(*(self._stream(side, *row) for row in rows))
        # Checkpoints that are behind are sent, and counted, before the round is over.
        await self._caught_up("p0", "d0")
        used = {name: after - before[name] for name, after in self._cpu_s().items()}
        side.prefill_cpu_s.append(used["p0"] / (STREAMS * PROMPT_TOKENS))
        side.decode_cpu_s.append(used["d0"] / (STREAMS * OUTPUT_TOKENS))
        side.cpu_s.append((used["p0"] + used["d0"]) / (STREAMS * (PROMPT_TOKENS + OUTPUT_TOKENS)))
        side.agent_cpu_s.append(used[AGENT] / (STREAMS * (PROMPT_TOKENS + OUTPUT_TOKENS)))
        if side.checkpoints:
            await self._release(names)

    async def _stream(self, side: Side, prompt: list[int], hand_off: HandOff, name: str) -> None:
        times: list[float] = []
        await self._rig.decode(
            "d0",
            prompt,
            PROMPT_TOKENS,
            hand_off=hand_off,
            checkpoints=side.checkpoints,
            tokens=OUTPUT_TOKENS,
            on_token=lambda _: times.append(time.perf_counter()),
            stream=name,
        )
        side.gaps_s += [later - earlier for earlier, later in pairwise(times)]

    async def lose(self) -> list[int]:
        """Kill d0 under all streams at a random moment; of each, how many tokens the client has
        that the holder has not.
        """
        checkpoints = [CheckpointTarget(AGENT, RESERVED_BYTES)]
        prompts = [draw(self._rng, PROMPT_TOKENS) for _ in range(STREAMS)]
        names = [self._rig.new_stream() for _ in prompts]
        produced = dict.fromkeys(names, 0)

        async def stream(prompt: list[int], name: str) -> None:
            hand_off = await self._rig.prefill(
                "p0", prompt, PROMPT_TOKENS, checkpoints, stream=name
            )

            def count(_: int) -> None:
                produced[name] += 1

            try:
                await self._rig.decode(
                    "d0",
                    prompt,
                    PROMPT_TOKENS,
                    hand_off=hand_off,
                    checkpoints=checkpoints,
                    tokens=LONG_OUTPUT_TOKENS,
                    on_token=count,
                    stream=name,
                )
            except (aiohttp.ClientError, ConnectionError):
                return
            raise RuntimeError("a stream ended before the kill")

        streams = [
            asyncio.create_task(stream(prompt, name))
            for prompt, name in zip(prompts, names, strict=True)
        ]
        kill_after = self._rng.randint(*KILL_AFTER_TOKENS)
        while min(produced.values()) < kill_after:
            await asyncio.sleep(0.005)
        self._processes.kill("d0")
        await asyncio.gather(*streams)
        # Pages that had left d0 have arrived, or never will.
        await asyncio.sleep(0.2)
        held = (await self._report()).pages
        page = self._rig.geometry.page_size_tokens
        self._processes.start("d0")
        self._processes.wait_ready("d0")
        await self._release(names)
        return [
            PROMPT_TOKENS + produced[name] - page * held.get(StreamId(name), 0) for name in names
        ]

    async def _report(self) -> AgentReport:
        async with self._session.get(f"{self._agent_url}/kvrs/v1/holdings") as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=AgentReport)

    async def _release(self, streams: Sequence[str]) -> None:
        body = {"lease_s": 30.0, "renew": [], "release": list(streams)}
        async with self._session.post(f"{self._agent_url}/kvrs/v1/leases", json=body) as answer:
            answer.raise_for_status()

    @property
    def _agent_url(self) -> str:
        return next(
            node.agent.url
            for node in self._processes.config.cluster.nodes
            if node.agent_id == AGENT
        )

    async def _caught_up(self, *instances: str) -> None:
        give_up_s = time.monotonic() + 30.0
        for instance in instances:
            while (await self._rig.load(instance)).checkpoint_lag_pages > 0:
                if time.monotonic() > give_up_s:
                    raise RuntimeError(f"checkpoints of {instance} still lag after 30 s")
                await asyncio.sleep(0.05)

    def _cpu_s(self) -> dict[str, float]:
        return {name: process_cpu_s(self._processes.pid(name)) for name in ("p0", "d0", AGENT)}


def process_cpu_s(pid: int) -> float:
    """User and system time of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def measure(
    processes: Processes, rounds: int, kills: int, seed: int
) -> tuple[Side, Side, list[int]]:
    order = random.Random(seed)
    off, on = Side([]), Side([CheckpointTarget(AGENT, RESERVED_BYTES)])
    lost: list[int] = []
    async with session_for(processes) as session:
        rig = Rig(processes, session, "opt-13b-a100-distserve-tp1")
        await rig.meet()
        bench = Bench(processes, rig, session, seed)
        for side in (Side(off.checkpoints), Side(on.checkpoints)):
            await bench.round(side)
        with Progress(disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("rounds, then kills", total=rounds + kills)
            for _ in range(rounds):
                for side in order.sample((off, on), 2):
                    await bench.round(side)
                progress.advance(task)
            for _ in range(kills):
                lost += await bench.lose()
                progress.advance(task)
    return off, on, lost


def paired(off: Sequence[float], on: Sequence[float]) -> tuple[float, float]:
    """Median of the rounds' ratios less one, and half of its 95 % interval."""
    ratios = [b / a - 1 for a, b in zip(off, on, strict=True)]
    return statistics.median(ratios), interval(ratios)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--kills", type=int, default=10)
    arguments = parser.parse_args()
    record = Record(arguments.seed)
    with Processes(settings()) as processes:
        processes.start("p0", "d0", "d1", AGENT)
        processes.wait_ready("p0", "d0", "d1", AGENT)
        page = processes.config.cluster.engine.page_size_tokens
        off, on, lost = asyncio.run(
            measure(processes, arguments.rounds, arguments.kills, arguments.seed)
        )
    cost, spread = paired(off.cpu_s, on.cpu_s)
    parts = {
        name: paired(getattr(off, f"{name}_cpu_s"), getattr(on, f"{name}_cpu_s"))
        for name in ("prefill", "decode")
    }
    result: dict[str, Any] = {
        "rounds": arguments.rounds,
        "streams": STREAMS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "cpu_ms_per_token": {
            "off": statistics.median(off.cpu_s) * 1e3,
            "on": statistics.median(on.cpu_s) * 1e3,
        },
        "cost": cost,
        "cost_interval": spread,
        "cost_parts": parts,
        "agent_cpu_ms_per_token": statistics.median(on.agent_cpu_s) * 1e3,
        "gap_ms": {
            side: {
                f"p{share * 100:g}": percentile(gaps, share) * 1e3 for share in (0.5, 0.99, 0.999)
            }
            for side, gaps in (("off", off.gaps_s), ("on", on.gaps_s))
        },
        "wanted_cost": WANTED_COST,
        "victims": len(lost),
        "lost_tokens": {"median": statistics.median(lost), "most": max(lost)} if lost else None,
        "page_size_tokens": page,
    }
    lines = [
        f"checkpoints on against off, {arguments.rounds} interleaved rounds of {STREAMS} "
        f"streams, medians",
        f"prompts of {PROMPT_TOKENS} tokens, outputs of {OUTPUT_TOKENS}",
        f"CPU per token: off {result['cpu_ms_per_token']['off']:.3f} ms, on "
        f"{result['cpu_ms_per_token']['on']:.3f} ms: "
        f"{cost:+.1%} ± {spread:.1%} (wanted below {WANTED_COST:.0%})",
        *(f"  {name:<8}{value:+.1%} ± {half:.1%}" for name, (value, half) in parts.items()),
        f"  agent   {result['agent_cpu_ms_per_token']:.3f} ms per token, in its own process",
        "time between tokens, ms:  "
        + ", ".join(
            f"{side} " + " ".join(f"{name} {value:.1f}" for name, value in row.items())
            for side, row in result["gap_ms"].items()
        ),
    ]
    if lost:
        lines.append(
            f"{len(lost)} victims of {arguments.kills} kills: tokens that the client had "
            f"and the holder had not: "
            f"median {statistics.median(lost):g}, most {max(lost)} (a page is {page})"
        )
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if spread > WANTED_COST:
        record.void(f"the interval is wider than the bar of {WANTED_COST:.0%}")
    is_void = record.keep(arguments.out, "checkpoint_cost", result | {"lost": lost}, text)
    return 2 if is_void else 0 if cost <= WANTED_COST else 1


if __name__ == "__main__":
    raise SystemExit(main())
