"""Is `auto` as fast as the best static policy everywhere, and faster over all; and what does
splitting bring at the crossover?

    python -m experiments.recovery_grid.run [--repeats 9] [--lengths 256 512 1024 2048 4096]

The policy object decides, real engine processes on another GPU's clock carry it out, until the
first new token.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from rich.progress import Progress

from experiments.record import Record
from experiments.rig import Rig, draw, interval, session_for, stretched
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName, PolicySettings, RecoverySettings, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Instance
from kvrs.core.model.estimates import Option
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import SourceRange
from kvrs_testkit.processes import Processes, cpu_ticks, share_used

matplotlib.use("Agg")
from matplotlib import pyplot

PROFILE = "opt-13b-a100-distserve-tp1"
# So many times slower, for cells that last at least 200 ms; and far longer than the tiny model's
# own work for so many tokens.
STRETCH = {256: 8.0, 512: 6.0, 1024: 4.0, 2048: 4.0, 4096: 3.5}
# Each group has engines of its own; they sleep most of the time, so the groups run side by side.
GROUPS = ((256,), (512,), (1024, 2048), (4096,))
# Times the bandwidth at which migrating and recomputing cost the same: geometric, and symmetric
# about 1.
FACTORS = tuple(2 ** (-1.5 + 3 * step / 7) for step in range(8))
POLICIES = (PolicyName.ALWAYS_MIGRATE, PolicyName.ALWAYS_RECOMPUTE, PolicyName.AUTO)
PRODUCED_TOKENS = 16

SHORTEST_CELL_S = 0.2
WANTED_OF_BEST = 1.10
WANTED_BELOW = 0.25
WANTED_SPLIT = 1.4
MOST_CPU = 0.6
N0, N1 = NodeId("n0"), NodeId("n1")
P0 = InstanceId("p0")


@dataclass
class Cell:
    prompt_tokens: int
    factor: float
    bytes_per_s: float  # Of the tiny model's pages.
    seconds: dict[PolicyName, list[float]] = field(
        default_factory=lambda: {name: [] for name in POLICIES}
    )
    options: dict[PolicyName, list[Option]] = field(
        default_factory=lambda: {name: [] for name in POLICIES}
    )

    def median(self, name: PolicyName) -> float:
        return statistics.median(self.seconds[name])

    @property
    def best_static_s(self) -> float:
        return min(self.median(PolicyName.ALWAYS_MIGRATE), self.median(PolicyName.ALWAYS_RECOMPUTE))

    @property
    def auto_of_best(self) -> float:
        return self.median(PolicyName.AUTO) / self.best_static_s


def settings(profile: Path) -> Config:
    # A whole history in one batch, as in the measurements behind the profile: each batch has its
    # overhead.
    engine = {"pace": str(profile), "max_batch_tokens": 8192, "max_model_len": 8192, "pages": 1536}
    nodes = [
        {"id": "n0", "instances": [{"id": "p0", "role": "prefill"}]},
        {
            "id": "n1",
            "instances": [{"id": "p1", "role": "prefill"}, {"id": "d1", "role": "decode"}],
        },
    ]
    return parse_config(
        {
            "cluster": {"engine": engine, "allow_faults": True, "nodes": nodes},
            # Pages stay with p0 for the whole run; probes would share the link with what is
            # measured.
            "transfer": {"lease_s": 3600.0, "probe_interval_s": 3600.0, "stall_timeout_s": 60.0},
        }
    )


class Decider:
    """One policy object for all takes of one policy. Each stream has a decode instance of its own
    on n0, which is lost: one that dies again and again would get no streams.
    """

    def __init__(self, name: PolicyName, instances: list[Instance]) -> None:
        recovery = RecoverySettings(gather_s=0.0)
        self._policy = RecoveryPolicy(PolicySettings(name=name, recovery=recovery), SloSettings())
        self._streams = 0
        for instance in instances:
            self._tell(ev.InstanceUp(instance))
        d1 = next(instance for instance in instances if instance.id == "d1")
        self._like = d1

    def lose(self, prompt_tokens: int, bytes_per_s: float) -> tuple[act.Plan, Option, StreamId]:
        """A stream of p0 and an instance beside it loses that; return the policy's plan."""
        self._streams += 1
        stream = StreamId(f"s{self._streams}")
        lost = InstanceId(f"d0-{self._streams}")
        like = self._like
        self._tell(
            ev.InstanceUp(
                Instance(lost, N0, like.role, 1, like.geometry, like.prefill, like.capabilities)
            )
        )
        self._tell(ev.LinkMeasured(N0, N1, bytes_per_s))
        started = self._only(self._tell(ev.StreamArrived(stream, prompt_tokens)), act.Start)
        assert (started.plan.prefill, started.plan.decode) == (P0, lost), started
        self._tell(ev.PrefillDone(stream, 1, prompt_tokens))
        self._tell(ev.StreamResumed(stream, 1))
        actions = self._tell(ev.InstanceLost(lost, 1, "killed", {stream: PRODUCED_TOKENS}))
        return (
            self._only(actions, act.Start).plan,
            self._only(actions, act.Recovered).option,
            stream,
        )

    def back(self, stream: StreamId) -> None:
        """The first token after the recovery: the policy learns the real cost."""
        self._tell(ev.StreamResumed(stream, 2))
        self._tell(ev.StreamEnded(stream, 2))

    def prefilled(self, stream: StreamId, history_tokens: int) -> None:
        self._tell(ev.PrefillDone(stream, 2, history_tokens))

    def _tell(self, event: Any) -> list[act.Action]:
        return self._policy.handle(event, time.monotonic())

    @staticmethod
    def _only(actions: list[act.Action], kind: Any) -> Any:
        (found,) = [action for action in actions if isinstance(action, kind)]
        return found


class Bench:
    def __init__(self, rig: Rig, seed: int, lengths: Sequence[int]) -> None:
        self._rig = rig
        rng = random.Random(seed)
        self._prompts = {tokens: draw(rng, tokens) for tokens in lengths}
        self._produced = draw(rng, PRODUCED_TOKENS)
        self._tokens: dict[int, int] = {}
        self.instances = [
            Instance(
                i.id,
                i.node,
                i.role,
                i.epoch,
                i.geometry,
                PrefillTable.from_measured(i.prefill),
                frozenset(i.capabilities),
            )
            for i in rig.infos.values()
        ]
        self.deciders = {name: Decider(name, self.instances) for name in POLICIES}

    async def prepare(self) -> None:
        for prompt in self._prompts.values():
            await self._rig.prefill("p0", prompt, len(prompt))

    async def take(self, cell: Cell, name: PolicyName) -> None:
        """Decide, carry it out on emptied caches, and note the seconds until the first new
        token.
        """
        rig, decider, length = self._rig, self.deciders[name], cell.prompt_tokens
        await rig.empty("p1", "d1")
        history = self._prompts[length] + self._produced
        started_s = time.perf_counter()
        plan, option, stream = decider.lose(length, cell.bytes_per_s)
        hand_off = None
        if plan.prefill is not None:
            hand_off = await rig.prefill(plan.prefill, history, length)
            decider.prefilled(stream, len(history))
        sources = [
            SourceRange(run.holder, run.first_page, run.pages, run.generation) for run in plan.runs
        ]
        token = await rig.decode(plan.decode, history, length, sources=sources, hand_off=hand_off)
        cell.seconds[name].append(time.perf_counter() - started_s)
        cell.options[name].append(option)
        decider.back(stream)
        # Greedy and exact: however the KV came, the next token is the same.
        if self._tokens.setdefault(length, token) != token:
            raise RuntimeError(
                f"{option.value} continued a prompt of {length} tokens with another token"
            )


def crossover_bytes_per_s(instances: list[Instance], prompt_tokens: int) -> float:
    """Where both static ways are predicted to cost the same: migrating is `fixed + bytes /
    bandwidth`.
    """
    d1 = next(instance for instance in instances if instance.id == "d1")
    history = prompt_tokens + PRODUCED_TOKENS
    pages = prompt_tokens // d1.geometry.page_size_tokens
    prefix = pages * d1.geometry.page_size_tokens
    tail_s = d1.prefill.extra(prefix, history - prefix)
    return prefix * d1.geometry.bytes_per_token / (d1.prefill.seconds_for(history) - tail_s)


async def measure_group(
    processes: Processes, lengths: Sequence[int], repeats: int, seed: int, done: Callable[[], None]
) -> list[Cell]:
    """The cells of these lengths; those at the crossover itself have the factor 1."""
    order = random.Random(seed)
    async with session_for(processes) as session:
        rig = Rig(processes, session, PROFILE)
        await rig.meet()
        bench = Bench(rig, seed, lengths)
        await bench.prepare()
        crossings = {length: crossover_bytes_per_s(bench.instances, length) for length in lengths}
        cells = [
            Cell(length, factor, factor * crossings[length])
            for length in lengths
            for factor in (*FACTORS, 1.0)
        ]
        for _ in range(repeats):
            # Another order every time, and all policies in turns: a busy moment hits no cell and no
            # side for good.
            for cell in order.sample(cells, len(cells)):
                await rig.set_link("p0", "n1", cell.bytes_per_s)
                for name in order.sample(POLICIES, len(POLICIES)):
                    await bench.take(cell, name)
                done()
        return cells


async def measure(
    groups: Sequence[tuple[Processes, Sequence[int]]], repeats: int, seed: int
) -> tuple[list[Cell], float]:
    """All cells, and the share of the CPUs that was in use meanwhile."""
    before = cpu_ticks()
    with Progress(disable=not sys.stderr.isatty()) as progress:
        cells = sum(len(lengths) for _, lengths in groups) * (len(FACTORS) + 1)
        task = progress.add_task("cells", total=repeats * cells)
        found = await asyncio.gather(
            *(
                measure_group(processes, lengths, repeats, seed, lambda: progress.advance(task))
                for processes, lengths in groups
            )
        )
    return [cell for cells in found for cell in cells], share_used(before, cpu_ticks())


def summary(grid: list[Cell], middle: list[Cell], cpu: float, repeats: int) -> dict[str, Any]:
    sums = {name: sum(cell.median(name) for cell in grid) for name in POLICIES}
    better = min(sums[PolicyName.ALWAYS_MIGRATE], sums[PolicyName.ALWAYS_RECOMPUTE])
    shortest_s = min(cell.median(name) for cell in grid + middle for name in POLICIES)
    worst = max(grid, key=lambda cell: cell.auto_of_best)
    return {
        "profile": PROFILE,
        "stretch": STRETCH,
        "repeats": repeats,
        "cells": len(grid),
        "auto_of_best_static_worst": round(worst.auto_of_best, 3),
        "worst_cell": [worst.prompt_tokens, round(worst.factor, 3)],
        "cells_within_10_percent": sum(cell.auto_of_best <= WANTED_OF_BEST for cell in grid),
        "sum_s": {name.value: round(seconds, 3) for name, seconds in sums.items()},
        "auto_below_better_static": round(1 - sums[PolicyName.AUTO] / better, 3),
        "split_speed_up_at_crossover": {
            cell.prompt_tokens: round(cell.best_static_s / cell.median(PolicyName.AUTO), 3)
            for cell in middle
        },
        "cpu_share": round(cpu, 3),
        "shortest_cell_s": round(shortest_s, 3),
        "wanted": {
            "of_best_static": WANTED_OF_BEST,
            "below_better_static": WANTED_BELOW,
            "split_speed_up": WANTED_SPLIT,
        },
    }


def as_text(grid: list[Cell], middle: list[Cell], result: dict[str, Any]) -> str:
    lines = [
        f"recovery time, {result['profile']}, {result['repeats']} interleaved repeats, "
        f"medians and 95 % intervals",
        f"CPU in use {result['cpu_share']:.0%} (void above {MOST_CPU:.0%}), "
        f"shortest cell {result['shortest_cell_s']} s (void below {SHORTEST_CELL_S} s)",
        "",
        f"{'tokens':>7}{'stretch':>8}{'x cross':>9}{'migrate s':>16}{'recompute s':>16}"
        f"{'auto s':>16}{'of best':>9}  auto took",
    ]
    for cell in grid + middle:
        times = "".join(
            f"{cell.median(name):>8.3f} ± {interval(cell.seconds[name]):.3f}" for name in POLICIES
        )
        taken = ", ".join(sorted({option.value for option in cell.options[PolicyName.AUTO]}))
        whose = f"{cell.prompt_tokens:>7,}{STRETCH[cell.prompt_tokens]:>8g}{cell.factor:>9.2f}"
        lines.append(f"{whose}{times}{cell.auto_of_best:>9.2f}  {taken}")
    lines += [
        "",
        f"auto within 10 % of the best static way in {result['cells_within_10_percent']} "
        f"of {result['cells']} cells "
        f"(worst {result['auto_of_best_static_worst']:.2f} at {result['worst_cell']})",
        f"summed over the grid: {result['sum_s']}; auto "
        f"{result['auto_below_better_static']:.1%} below the better static policy "
        f"(wanted {WANTED_BELOW:.0%})",
        f"at the crossover auto is faster than the better static way by "
        f"{result['split_speed_up_at_crossover']} "
        f"(wanted {WANTED_SPLIT})",
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def draw_plot(grid: list[Cell], middle: list[Cell], path: Path) -> None:
    lengths = sorted({cell.prompt_tokens for cell in grid})
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(3.2 * len(lengths), 3.2), layout="constrained", squeeze=False
    )
    for axis, length in zip(axes[0], lengths, strict=True):
        cells = sorted(
            (cell for cell in grid + middle if cell.prompt_tokens == length),
            key=lambda cell: cell.factor,
        )
        for name in POLICIES:
            medians = [cell.median(name) for cell in cells]
            spread = [interval(cell.seconds[name]) for cell in cells]
            axis.errorbar(
                [cell.factor for cell in cells],
                medians,
                yerr=spread,
                label=name.value,
                marker="o",
                markersize=3,
                capsize=2,
            )
        axis.set(
            xscale="log", title=f"{length:,} tokens", xlabel="bandwidth / crossover", ylim=(0, None)
        )
        axis.set_xticks([], minor=True)
        axis.set_xticks([0.4, 0.7, 1.0, 1.6, 2.8], ["0.4", "0.7", "1", "1.6", "2.8"])
    axes[0][0].set_ylabel("recovery time, s")
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--lengths", type=int, nargs="+", choices=list(STRETCH), default=list(STRETCH)
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    record = Record(arguments.seed)
    groups = [
        chosen
        for group in GROUPS
        if (chosen := [length for length in group if length in arguments.lengths])
    ]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrs-grid-")))
        running = []
        for group in groups:
            profile = stretched(PROFILE, STRETCH[group[0]], directory)
            processes = stack.enter_context(Processes(settings(profile)))
            processes.start("p0", "p1", "d1")
            running.append((processes, group))
        for processes, _ in running:
            processes.wait_ready("p0", "p1", "d1")
        cells, cpu = asyncio.run(measure(running, arguments.repeats, arguments.seed))
    grid = [cell for cell in cells if cell.factor != 1.0]
    middle = [cell for cell in cells if cell.factor == 1.0]
    result = summary(grid, middle, cpu, arguments.repeats)
    record.check_cpu(cpu, MOST_CPU)
    if result["shortest_cell_s"] < SHORTEST_CELL_S:
        record.void(f"a cell took less than {SHORTEST_CELL_S} s")
    rows = [
        {
            "prompt_tokens": cell.prompt_tokens,
            "factor": cell.factor,
            "bytes_per_s": cell.bytes_per_s,
            "seconds": cell.seconds,
            "auto_took": cell.options[PolicyName.AUTO],
        }
        for cell in grid + middle
    ]
    text = as_text(grid, middle, result)
    print(text, end="")
    is_void = record.keep(arguments.out, "recovery_grid", {**result, "rows": rows}, text)
    draw_plot(grid, middle, arguments.out / "recovery_grid.png")
    reached = (
        result["cells_within_10_percent"] == result["cells"]
        and result["auto_below_better_static"] >= WANTED_BELOW
        and min(result["split_speed_up_at_crossover"].values()) >= WANTED_SPLIT
    )
    return 2 if is_void else 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
