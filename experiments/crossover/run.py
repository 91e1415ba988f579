"""Does `rom` pick the side that is really faster, over bandwidths where the cheaper side changes?

    python -m experiments.crossover.run [--repeats 9] [--distserve]

Three real engine processes on another GPU's clock: p0 holds a prompt's KV, d1 on the other node
must go on with the stream, p1 is the prefill instance beside it. Both ways are really gone, with
the calls that a proxy makes, until the first new token. With `--distserve` they are stages of two
servers of DistServe, and the decisions are those by the tables that the stages have measured.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from rich.progress import Progress

from experiments.command_line import parser_of
from experiments.distserve_servers import add_option, check_option, processes_for
from experiments.record import Record
from experiments.rig import Rig, draw, session_for
from kvrs.config.file import Config, parse_config
from kvrs.core.model.estimates import HANDSHAKE_S, Option
from kvrs.core.model.member import Member
from kvrs.core.options.migrate import estimate_fetch
from kvrs.core.options.recompute import estimate_handed_off
from kvrs.core.rules.auto import AUTO
from kvrs.core.rules.rom import ROM, rom_migrate, rom_recompute
from kvrs.ids import InstanceId, NodeId
from kvrs.profiles import catalog
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Role, SourceRange, assumed_instance
from kvrs_testkit.processes import Processes, cpu_ticks, nodes_with_pairs, share_used

# Slow enough that the tiny model's real work fits into its steps several times over, and its clock
# is a measured one.
PROFILE = "opt-66b-a100-vllm-tp2"
DISTSERVE_PROFILE = "opt-66b-a100-distserve-tp2"
PROMPT_TOKENS = (768, 1024, 1536)
GBIT_PER_S = (12, 20, 28, 36, 44, 52, 64, 80)
PRODUCED_TOKENS = 16
# Behind fetched pages DistServe reads known tokens one a step.
DISTSERVE_PRODUCED_TOKENS = (1, 16)

SHORTEST_CELL_S = 0.2
CLEAR_DIFFERENCE = 0.2
WANTED_SHARE = 0.95
MOST_CPU = 0.6
WAYS = (Option.MIGRATE, Option.RECOMPUTE)


@dataclass
class Cell:
    prompt_tokens: int
    produced_tokens: int
    gbit_per_s: float
    picked: dict[str, Option] = field(default_factory=dict)  # By policy.
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


def settings(*, distserve: bool) -> Config:
    cluster: dict[str, Any] = {"allow_faults": True, "nodes": nodes_with_pairs()}
    if distserve:
        cluster |= {
            "backend": "distserve",
            "engine": {"pace": DISTSERVE_PROFILE, "pages": 1024},
        }
    else:
        # A whole prompt in one batch, as in the measurements behind the profile: each batch has its
        # overhead.
        cluster["engine"] = {
            "pace": PROFILE,
            "max_batch_tokens": 2048,
            "max_model_len": 2048,
            "pages": 1024,
        }
        cluster["nodes"][0]["instances"].pop()
    return parse_config(
        {
            "cluster": cluster,
            # Pages stay with p0 for the whole run; probes would share the link with what is
            # measured.
            "transfer": {"lease_s": 3600.0, "probe_interval_s": 3600.0, "stall_timeout_s": 30.0},
        }
    )


def instance_of(name: str, role: Role, profile: str, table: PrefillTable) -> Member:
    """An instance of the real model, on n1."""
    geometry = catalog.kv_geometry(profile)
    return Member.of(assumed_instance(InstanceId(name), NodeId("n1"), role, geometry), table)


def rom_pick(prefill: Member, target: Member, cell: Cell) -> Option:
    """The decision of `rom` for the real model and the real link."""
    bytes_per_s, tokens = cell.gbit_per_s / 8 * 1e9, cell.prompt_tokens
    migrate = rom_migrate(target, prompt_tokens=tokens, bytes_per_s=bytes_per_s)
    recompute = rom_recompute(prefill, target, prompt_tokens=tokens)
    return ROM.decide([migrate, recompute]).option


def auto_pick(prefill: Member, target: Member, cell: Cell) -> Option:
    """The decision of `auto`, which counts the tokens behind the prompt."""
    bytes_per_s, handshake_s = cell.gbit_per_s / 8 * 1e9, HANDSHAKE_S
    history, size_bytes = (
        cell.prompt_tokens + cell.produced_tokens,
        target.abilities.bytes_per_token,
    )
    transfer_s = handshake_s + cell.prompt_tokens * size_bytes / bytes_per_s
    history_s = target.times.table.seconds_for(history)
    migrate = estimate_fetch(
        Option.MIGRATE, target, history, history_s, cell.prompt_tokens, transfer_s
    )
    table = prefill.times.table
    compute_s, extrapolated = table.seconds_for(history), not table.covers(history)
    recompute = estimate_handed_off(
        prefill, target, history, compute_s, extrapolated, handshake_s=handshake_s, bytes_per_s=inf
    )
    return AUTO.decide([migrate, recompute]).option


class Bench:
    """Both ways of recovering one stream."""

    def __init__(self, rig: Rig, seed: int, *, distserve: bool) -> None:
        self._rig = rig
        self._distserve = distserve
        rng = random.Random(seed)
        self._prompts = {tokens: draw(rng, tokens) for tokens in PROMPT_TOKENS}
        self._produced = draw(rng, PRODUCED_TOKENS)
        self._tokens: dict[int, int] = {}

    async def prepare(self) -> None:
        """Let p0 compute and retain every prompt."""
        for prompt in self._prompts.values():
            await self._rig.prefill("p0", prompt, len(prompt))

    async def take(self, way: Option, cell: Cell) -> float:
        """Recover a stream one way; return the seconds until its first new token."""
        rig, prompt_tokens = self._rig, cell.prompt_tokens
        await rig.empty("p1", "d1")
        history = self._prompts[prompt_tokens] + self._produced[: cell.produced_tokens]
        started_s = time.perf_counter()
        if way is Option.MIGRATE:
            pages = prompt_tokens // rig.geometry.page_size_tokens
            source = SourceRange(InstanceId("p0"), 0, pages, rig.infos[InstanceId("p0")].epoch)
            token = await rig.decode("d1", history, prompt_tokens, sources=[source])
        elif self._distserve:  # One call for both stages of its server.
            token = await rig.decode("d1", history, prompt_tokens)
        else:
            hand_off = await rig.prefill("p1", history, prompt_tokens)
            token = await rig.decode("d1", history, prompt_tokens, hand_off=hand_off)
        seconds = time.perf_counter() - started_s
        # Greedy and exact: however the KV came, the next token is the same.
        if self._tokens.setdefault(len(history), token) != token:
            raise RuntimeError(
                f"{way.value} continued a history of {len(history)} tokens with another token"
            )
        return seconds


async def measure(
    processes: Processes, repeats: int, seed: int, *, distserve: bool
) -> tuple[list[Cell], float]:
    """The cells; the share of the CPUs that was in use meanwhile."""
    order = random.Random(seed)
    profile = DISTSERVE_PROFILE if distserve else PROFILE
    produced = DISTSERVE_PRODUCED_TOKENS if distserve else (PRODUCED_TOKENS,)
    cells = [Cell(n, m, rate) for m in produced for n in PROMPT_TOKENS for rate in GBIT_PER_S]
    async with session_for(processes) as session:
        rig = Rig(processes, session, profile)
        await rig.meet()
        pick(rig, cells, profile, distserve=distserve)
        bench = Bench(rig, seed, distserve=distserve)
        await bench.prepare()
        before = cpu_ticks()
        with _bar(repeats * len(cells)) as advance:
            for _ in range(repeats):
                # Another order every time, and both ways in turns: a busy moment hits no cell and
                # no side for good.
                for cell in order.sample(cells, len(cells)):
                    await rig.set_link("p0", "n1", cell.gbit_per_s / 8 * 1e9 * rig.shrink)
                    for way in order.sample(WAYS, len(WAYS)):
                        cell.seconds[way].append(await bench.take(way, cell))
                    advance()
        return cells, share_used(before, cpu_ticks())


def pick(rig: Rig, cells: list[Cell], profile: str, *, distserve: bool) -> None:
    """Decide each cell: by the profile's table, or by those that the stages have measured."""
    tables = dict.fromkeys(("p1", "d1"), catalog.prefill_table(profile))
    if distserve:
        tables = {
            name: PrefillTable.from_measured(rig.infos[InstanceId(name)].prefill) for name in tables
        }
    prefill = instance_of("p1", Role.PREFILL, profile, tables["p1"])
    target = instance_of("d1", Role.DECODE, profile, tables["d1"])
    for cell in cells:
        cell.picked["rom"] = rom_pick(prefill, target, cell)
        if distserve:
            cell.picked["auto"] = auto_pick(prefill, target, cell)


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    with Progress(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("cells", total=total)
        yield lambda: progress.advance(task)


def summary(cells: list[Cell], cpu: float, repeats: int, *, distserve: bool) -> dict[str, Any]:
    clear = [cell for cell in cells if cell.difference > CLEAR_DIFFERENCE]
    policies = [*cells[0].picked]
    right = {
        policy: sum(cell.picked[policy] is cell.faster for cell in clear) for policy in policies
    }
    shortest_s = min(cell.median(way) for cell in cells for way in WAYS)
    # Of what was produced `rom` knows nothing, and on DistServe that costs steps.
    judged = policies[-1]
    share = right[judged] / len(clear) if clear else 0.0
    return {
        "profile": DISTSERVE_PROFILE if distserve else PROFILE,
        "engine": "DistServe" if distserve else "embedded",
        "repeats": repeats,
        "cells": len(cells),
        "cells_clear": len(clear),
        "cells_clear_right": right[judged],
        "right_by_policy": right,
        "judged": judged,
        "share_right": share,
        "wanted_share": WANTED_SHARE,
        "cpu_share": round(cpu, 3),
        "most_cpu_share": MOST_CPU,
        "shortest_cell_s": round(shortest_s, 3),
        "reached": bool(clear) and share >= WANTED_SHARE,
    }


def as_text(cells: list[Cell], result: dict[str, Any]) -> str:
    policies = [*result["right_by_policy"]]
    lines = [
        f"{' and '.join(policies)} over bandwidths, {result['engine']}, {result['profile']}, "
        f"{result['repeats']} interleaved repeats, medians",
        f"CPU in use {result['cpu_share']:.0%} (void above {result['most_cpu_share']:.0%}), "
        f"shortest cell {result['shortest_cell_s']} s (void below {SHORTEST_CELL_S} s)",
        "",
        f"{'tokens':>11}{'Gbit/s':>8}{'migrate s':>11}{'recompute s':>13}{'differ':>8}  "
        f"{'faster':<11}" + "".join(f"{policy + ' picks':<18}" for policy in policies),
    ]
    for cell in cells:
        clear = cell.difference > CLEAR_DIFFERENCE
        picks = ""
        for policy in policies:
            is_right = cell.picked[policy] is cell.faster
            verdict = "" if not clear else "right" if is_right else "WRONG"
            picks += f"{cell.picked[policy].value + ' ' + verdict:<18}"
        lines.append(
            f"{f'{cell.prompt_tokens:,} + {cell.produced_tokens}':>11}{cell.gbit_per_s:>8g}"
            f"{cell.median(Option.MIGRATE):>11.3f}{cell.median(Option.RECOMPUTE):>13.3f}"
            f"{cell.difference:>8.0%}  {cell.faster.value:<11}{picks}"
        )
    lines.append("")
    lines += [
        f"{policy}: {right} of {result['cells_clear']} cells that differ by more than "
        f"{CLEAR_DIFFERENCE:.0%} are right: {right / max(1, result['cells_clear']):.1%}"
        + (f" (wanted {WANTED_SHARE:.0%})" if policy == result["judged"] else "")
        for policy, right in result["right_by_policy"].items()
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--repeats", type=int, default=9)
    add_option(parser)
    arguments = parser.parse_args()
    distserve = arguments.distserve
    check_option(parser, distserve=distserve)
    record = Record(arguments.seed)
    with processes_for(settings(distserve=distserve)) as processes:
        processes.start("p0", "p1", "d1")
        processes.wait_ready("p0", "p1", "d1")
        cells, cpu = asyncio.run(
            measure(processes, arguments.repeats, arguments.seed, distserve=distserve)
        )
    result = summary(cells, cpu, arguments.repeats, distserve=distserve)
    record.check_cpu(cpu, MOST_CPU)
    if result["shortest_cell_s"] < SHORTEST_CELL_S:
        record.void(f"a cell took less than {SHORTEST_CELL_S} s")
    rows = [
        {
            "prompt_tokens": cell.prompt_tokens,
            "produced_tokens": cell.produced_tokens,
            "gbit_per_s": cell.gbit_per_s,
            "picked": cell.picked,
            "seconds": cell.seconds,
        }
        for cell in cells
    ]
    text = as_text(cells, result)
    print(text, end="")
    name = "distserve" if distserve else "crossover"
    is_void = record.keep(arguments.out, name, {**result, "rows": rows}, text)
    return 2 if is_void else 0 if result["reached"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
