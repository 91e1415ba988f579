"""The cost and the gain of drafts at real instances, in turns.

    python -m experiments.speculation.gain [--pairs 8]

- tokens/s of an instance with a helper and without, by streams at a time;
- seconds from the start of a killed instance until it serves, with a draft and without.

The models are random, of 24 and 2 layers; instances, helper and client share two cores.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import aiohttp
import msgspec

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import interval, session_for
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport, SpeculationReport
from kvrs_engine.engine.speculation.pairs import write_pair
from kvrs_testkit.blocked_load import blocked_load
from kvrs_testkit.processes import Processes

ASSISTED, HELPER = "d0", "d1"
PAIRS = {0.72: 2, 0.60: 4}  # Acceptance and depth.
LAYERS = 24  # Of the target, so that a step takes longer than what two cores share out anew.
BATCHES = (1, 4, 8)
TOKENS = 150  # Of a stream.
IN_A_ROW = 2  # Streams, so that it matters little that some end before others.
LOAD_S = 8.0
DRAFT_LOADS = 6
LEAST_GAIN, MAX_LATER = 1.5, 0.05
PATIENCE_S = 60.0
VOCAB = 512
T = TypeVar("T")


def config_of(
    models: Path, source: str, depth: int, disk_bytes_per_s: float | None = None
) -> Config:
    nodes = [{"id": f"n{n}", "instances": [{"id": f"d{n}", "role": "both"}]} for n in range(2)]
    speculation: dict[str, Any] = {"source": "off"}
    if source == "draft":
        speculation = {"source": "draft", "draft": str(models / "draft"), "depth": depth}
    engine = {"pages": 2048, "disk_bytes_per_s": disk_bytes_per_s}
    return parse_config(
        {
            "cluster": {"nodes": nodes, "model": str(models / "target"), "engine": engine},
            "gossip": {"enabled": False},
            "speculation": speculation,
        }
    )


class Asked:
    """The instance that is measured."""

    def __init__(self, processes: Processes, http: aiohttp.ClientSession) -> None:
        cluster = processes.config.cluster
        self.url = processes.config.url_of(cluster.find(InstanceId(ASSISTED))[1])
        self._http, self._random = http, Random(0)

    async def report(self) -> SpeculationReport | None:
        async with self._http.get(f"{self.url}/kvrs/v1/load") as answer:
            return msgspec.json.decode(await answer.read(), type=LoadReport).speculation

    async def until_helped(self, by: str | None) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.report()) is None or found.helper != by:
                await asyncio.sleep(0.05)

    def _body(self) -> dict[str, Any]:
        prompt = [self._random.randrange(4, VOCAB) for _ in range(24)]
        return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    async def tokens_per_s(self, streams: int) -> float:
        """`streams` at a time, each followed by another one."""
        bodies = [[self._body() for _ in range(IN_A_ROW)] for _ in range(streams)]
        began_s = time.perf_counter()

        async def one_by_one(row: list[dict[str, Any]]) -> None:
            for body in row:
                async with self._http.post(f"{self.url}/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    await answer.read()

        await asyncio.gather(*map(one_by_one, bodies))
        return streams * IN_A_ROW * TOKENS / (time.perf_counter() - began_s)


async def in_turns(
    pairs: int, one: Callable[[], Awaitable[T]], other: Callable[[], Awaitable[T]]
) -> tuple[list[T], list[T]]:
    """Both, `pairs` times, each first in every other pair."""
    found: tuple[list[T], list[T]] = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 else (1, 0):
            found[which].append(await (one, other)[which]())
    return found


def compared(name: str, one: list[float], other: list[float]) -> dict[str, Any]:
    """The second by the first, pair by pair."""
    ratios = [b / a for a, b in zip(one, other, strict=True)]
    return {
        "what": name,
        "without": statistics.median(one),
        "with": statistics.median(other),
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "pairs": len(ratios),
    }


async def gains(models: Path, depth: int, pairs: int, label: str) -> list[dict[str, Any]]:
    rows = []
    with Processes(config_of(models, "draft", depth)) as processes:
        processes.start(ASSISTED, HELPER)
        processes.wait_ready(ASSISTED, HELPER)
        async with session_for(processes) as http:
            asked = Asked(processes, http)
            await asked.tokens_per_s(BATCHES[-1])
            processes.kill(HELPER)
            with blocked_load(processes):
                for batch in BATCHES:

                    async def alone(batch: int = batch) -> float:
                        await asked.until_helped(None)
                        return await asked.tokens_per_s(batch)

                    async def helped(batch: int = batch) -> float:
                        processes.start(HELPER)
                        await asked.until_helped(HELPER)
                        found = await asked.tokens_per_s(batch)
                        processes.kill(HELPER)
                        return found

                    before = await asked.report()
                    found = await in_turns(pairs, alone, helped)
                    after = await asked.report()
                    assert before is not None
                    assert after is not None
                    row = compared(f"tokens/s, {label}, {batch} streams", *found)
                    steps = after.steps - before.steps
                    accepted = after.accepted - before.accepted
                    row["accepted_a_step"] = accepted / max(1, steps)
                    tokens = pairs * batch * IN_A_ROW * TOKENS
                    # Each other step yields one token.
                    row["steps_with_drafts"] = steps / (tokens - accepted)
                    row["drafts_a_step"] = (after.proposed - before.proposed) / max(1, steps)
                    rows.append(row)
                    print(f"  {row}", flush=True)
    return rows


async def full_service(models: Path, starts: int) -> dict[str, Any]:
    sizes = [(models / name / "model.safetensors").stat().st_size for name in ("target", "draft")]
    rate = sizes[0] / LOAD_S
    with (
        Processes(config_of(models, "off", 4, rate)) as off,
        Processes(config_of(models, "draft", 4, rate)) as draft,
    ):
        for processes in (off, draft):
            processes.start(ASSISTED, HELPER)
        for processes in (off, draft):
            processes.wait_ready(ASSISTED, HELPER)

        async def start_s(processes: Processes) -> float:
            processes.kill(HELPER)
            began_s = time.perf_counter()
            processes.start(HELPER)
            await asyncio.to_thread(processes.wait_ready, HELPER)
            return time.perf_counter() - began_s

        found = await in_turns(starts, partial(start_s, off), partial(start_s, draft))
    return compared("s until a started instance serves", *found) | {"draft_load_s": sizes[1] / rate}


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'':42}{'without':>9}{'with':>9}{'ratio':>18}{'pairs':>6}  a step: drafts accepted  "
        f"steps with drafts"
    ]
    for row in rows:
        text = (
            f"{row['what']:42}{row['without']:9.2f}{row['with']:9.2f}"
            f"{row['ratio']:10.3f} ± {row['interval']:.3f}{row['pairs']:6}"
        )
        if "accepted_a_step" in row:
            text += f"{row['drafts_a_step']:15.2f}{row['accepted_a_step']:9.2f}"
            text += f"{row['steps_with_drafts']:19.0%}"
        lines.append(text)
    load_s = rows[-1]["draft_load_s"]
    lines.append(f"the draft's own load takes {load_s:.2f} s, before the model's")
    return "\n".join(lines) + "\n"


def faults_of(rows: list[dict[str, Any]]) -> list[str]:
    """The parts of the claim that the result does not bear out."""
    *gained, late = rows
    faults = [f"{row['what']}: {row['ratio']:.2f} x" for row in gained if row["ratio"] < LEAST_GAIN]
    later_s = late["with"] - late["draft_load_s"]
    if later_s > (1 + MAX_LATER) * late["without"]:
        faults.append(f"full service {later_s - late['without']:.2f} s later, without its load")
    return faults


async def measure(directory: Path, pairs: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    for acceptance, depth in PAIRS.items():
        models = directory / f"{acceptance}"
        write_pair(models, acceptance, seed, LAYERS)
        rows += await gains(models, depth, pairs, f"pair {acceptance}, depth {depth}")
    rows.append(await full_service(models, DRAFT_LOADS))
    print(f"  {json.dumps(rows[-1])}", flush=True)
    return rows


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    record = Record(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(measure(Path(directory), options.pairs, options.seed))
    faults = faults_of(rows)
    text = as_text(rows) + "\n".join(faults or ["PASSED"]) + "\n"
    print(text, end="")
    is_void = record.keep(options.out, "gain", {"rows": rows}, text)
    return 1 if faults or is_void else 0


if __name__ == "__main__":
    raise SystemExit(main())
