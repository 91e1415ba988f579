"""Does `rom` pick the side that is really faster, over bandwidths where the cheaper side changes?

    python -m experiments.crossover.run [--repeats 9]

Three real engine processes on another GPU's clock: p0 holds a prompt's KV, d1 on the other node
must go on with the stream, p1 is the prefill instance beside it. Both ways are really gone, with
the calls that a proxy makes, until the first new token.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from experiments.processes import Processes, cpu_ticks, share_used
from experiments.record import Record
from experiments.rig import Rig, draw, session_for
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId, NodeId
from kvrs.policy.model.cluster_view import Instance
from kvrs.policy.model.estimates import Option
from kvrs.policy.rules.rom import ROM, rom_migrate, rom_recompute
from kvrs.profiles import catalog
from kvrs.protocol.instance import Capability, Role, SourceRange

# Slow enough that the tiny model's real work fits into its steps several times over, and its clock
# is a measured one.
PROFILE = "opt-66b-a100-vllm-tp2"
PROMPT_TOKENS = (768, 1024, 1536)
GBIT_PER_S = (12, 20, 28, 36, 44, 52, 64, 80)
PRODUCED_TOKENS = 16

SHORTEST_CELL_S = 0.2
CLEAR_DIFFERENCE = 0.2
WANTED_SHARE = 0.95
MOST_CPU = 0.6
WAYS = (Option.MIGRATE, Option.RECOMPUTE)


@dataclass
class Cell:
    prompt_tokens: int
    gbit_per_s: float
    picked: Option
    seconds: dict[Option, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def median(self, way: Option) -> float:
        return statistics.median(self.seconds[way])

    @property
    def faster(self) -> Option:
        return min(WAYS, key=self.median)

    @property
    def difference(self) -> float:
        """How much longer the slower side takes, as a share of the faster."""
        times = sorted(map(self.median, WAYS))
        return times[1] / times[0] - 1


def settings() -> Config:
    return parse_config(
        {
            "cluster": {
                # A whole prompt in one batch, as in the measurements behind the profile: each batch
                # has its overhead.
                "engine": {
                    "pace": PROFILE,
                    "max_batch_tokens": 2048,
                    "max_model_len": 2048,
                    "pages": 1024,
                },
                "allow_faults": True,
                "nodes": [
                    {"id": "n0", "instances": [{"id": "p0", "role": "prefill"}]},
                    {
                        "id": "n1",
                        "instances": [
                            {"id": "p1", "role": "prefill"},
                            {"id": "d1", "role": "decode"},
                        ],
                    },
                ],
            },
            # Pages stay with p0 for the whole run; probes would share the link with what is
            # measured.
            "transfer": {"lease_s": 3600.0, "probe_interval_s": 3600.0, "stall_timeout_s": 30.0},
        }
    )


def rom_pick(prompt_tokens: int, bytes_per_s: float) -> Option:
    """The decision of `rom` for the real model and the real link."""
    instance = Instance(
        InstanceId("d1"),
        NodeId("n1"),
        Role.DECODE,
        1,
        catalog.kv_geometry(PROFILE),
        catalog.prefill_table(PROFILE),
        frozenset(Capability),
    )
    migrate = rom_migrate(instance, prompt_tokens=prompt_tokens, bytes_per_s=bytes_per_s)
    recompute = rom_recompute(instance, instance, prompt_tokens=prompt_tokens)
    return ROM.decide([migrate, recompute]).option


class Bench:
    """Both ways of recovering one stream."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        rng = random.Random(seed)
        self._prompts = {tokens: draw(rng, tokens) for tokens in PROMPT_TOKENS}
        self._produced = draw(rng, PRODUCED_TOKENS)
        self._tokens: dict[int, int] = {}

    async def prepare(self) -> None:
        """Let p0 compute and retain every prompt."""
        for prompt in self._prompts.values():
            await self._rig.prefill("p0", prompt, len(prompt))

    async def take(self, way: Option, prompt_tokens: int) -> float:
        """Recover a stream one way; return the seconds until its first new token."""
        rig = self._rig
        await rig.empty("p1", "d1")
        history = self._prompts[prompt_tokens] + self._produced
        started_s = time.perf_counter()
        if way is Option.MIGRATE:
            pages = prompt_tokens // rig.geometry.page_size_tokens
            source = SourceRange(InstanceId("p0"), 0, pages, rig.infos[InstanceId("p0")].epoch)
            token = await rig.decode("d1", history, prompt_tokens, sources=[source])
        else:
            hand_off = await rig.prefill("p1", history, prompt_tokens)
            token = await rig.decode("d1", history, prompt_tokens, hand_off=hand_off)
        seconds = time.perf_counter() - started_s
        # Greedy and exact: however the KV came, the next token is the same.
        if self._tokens.setdefault(prompt_tokens, token) != token:
            raise RuntimeError(
                f"{way.value} continued a prompt of {prompt_tokens} tokens with another token"
            )
        return seconds


async def measure(processes: Processes, cells: list[Cell], repeats: int, seed: int) -> float:
    """Fill the cells; the share of the CPUs that was in use meanwhile."""
    order = random.Random(seed)
    async with session_for(processes) as session:
        rig = Rig(processes, session, PROFILE)
        await rig.meet()
        bench = Bench(rig, seed)
        await bench.prepare()
        before = cpu_ticks()
        with _bar(repeats * len(cells)) as advance:
            for _ in range(repeats):
                # Another order every time, and both ways in turns: a busy moment hits no cell and
                # no side for good.
                for cell in order.sample(cells, len(cells)):
                    await rig.set_link("p0", "n1", cell.gbit_per_s / 8 * 1e9 * rig.shrink)
                    for way in order.sample(WAYS, len(WAYS)):
                        cell.seconds[way].append(await bench.take(way, cell.prompt_tokens))
                    advance()
        return share_used(before, cpu_ticks())


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    with Progress(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("cells", total=total)
        yield lambda: progress.advance(task)


def summary(cells: list[Cell], cpu: float, repeats: int) -> dict[str, Any]:
    clear = [cell for cell in cells if cell.difference > CLEAR_DIFFERENCE]
    right = [cell for cell in clear if cell.picked is cell.faster]
    shortest_s = min(cell.median(way) for cell in cells for way in WAYS)
    share = len(right) / len(clear) if clear else 0.0
    return {
        "profile": PROFILE,
        "repeats": repeats,
        "cells": len(cells),
        "cells_clear": len(clear),
        "cells_clear_right": len(right),
        "share_right": share,
        "wanted_share": WANTED_SHARE,
        "cpu_share": round(cpu, 3),
        "most_cpu_share": MOST_CPU,
        "shortest_cell_s": round(shortest_s, 3),
        "reached": bool(clear) and share >= WANTED_SHARE,
    }


def as_text(cells: list[Cell], result: dict[str, Any]) -> str:
    lines = [
        f"rom over bandwidths, {result['profile']}, {result['repeats']} interleaved "
        f"repeats, medians",
        f"CPU in use {result['cpu_share']:.0%} (void above {result['most_cpu_share']:.0%}), "
        f"shortest cell {result['shortest_cell_s']} s (void below {SHORTEST_CELL_S} s)",
        "",
        f"{'tokens':>7}{'Gbit/s':>8}{'migrate s':>11}{'recompute s':>13}{'differ':>8}  "
        f"{'faster':<10} {'rom picks':<10}",
    ]
    for cell in cells:
        clear = cell.difference > CLEAR_DIFFERENCE
        verdict = "" if not clear else "right" if cell.picked is cell.faster else "WRONG"
        lines.append(
            f"{cell.prompt_tokens:>7,}{cell.gbit_per_s:>8g}{cell.median(Option.MIGRATE):>11.3f}{cell.median(Option.RECOMPUTE):>13.3f}"
            f"{cell.difference:>8.0%}  {cell.faster.value:<10} {cell.picked.value:<10} {verdict}"
        )
    lines.append("")
    lines.append(
        f"{result['cells_clear_right']} of {result['cells_clear']} cells that differ by "
        f"more than {CLEAR_DIFFERENCE:.0%} are "
        f"right: {result['share_right']:.1%} (wanted {WANTED_SHARE:.0%})"
    )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    cells = [
        Cell(n, rate, rom_pick(n, rate / 8 * 1e9)) for n in PROMPT_TOKENS for rate in GBIT_PER_S
    ]
    record = Record(arguments.seed)
    with Processes(settings()) as processes:
        processes.start("p0", "p1", "d1")
        processes.wait_ready("p0", "p1", "d1")
        cpu = asyncio.run(measure(processes, cells, arguments.repeats, arguments.seed))
    result = summary(cells, cpu, arguments.repeats)
    record.check_cpu(cpu, MOST_CPU)
    if result["shortest_cell_s"] < SHORTEST_CELL_S:
        record.void(f"a cell took less than {SHORTEST_CELL_S} s")
    rows = [
        {
            "prompt_tokens": cell.prompt_tokens,
            "gbit_per_s": cell.gbit_per_s,
            "picked": cell.picked,
            "seconds": cell.seconds,
        }
        for cell in cells
    ]
    text = as_text(cells, result)
    print(text, end="")
    is_void = record.keep(arguments.out, "crossover", {**result, "rows": rows}, text)
    return 2 if is_void else 0 if result["reached"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
