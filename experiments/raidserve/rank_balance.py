"""CPU time of each rank at 8, 7, 6 and 5 ranks, in naive layouts and in those that balance heads.

A machine with a processor for each rank is as fast as its busiest rank, so tokens per CPU second of
that rank stand for its throughput. No rank sleeps, and waiting takes no CPU time.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command_line import parser_of
from experiments.random_model import VOCAB, write_random_llama
from experiments.record import Record
from kvrs.config.cluster import ElasticSettings, EngineSettings
from kvrs_engine.elastic import on_demand
from kvrs_engine.elastic.layouts import Layout, hybrid, staged, uneven
from kvrs_engine.elastic.placing import least_loaded
from kvrs_engine.elastic.units import Units
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.layouts import even

FULL = 8
LEFT = (7, 6, 5)
BAR = 0.95
# RaidServe, figure 11: throughput of hybrid over naive, by ranks.
PUBLISHED = {
    "decode": {5: 1.16, 6: 1.51, 7: 1.78},
    "prefill": {5: 1.00, 6: 1.16, 7: 1.25},
}
LAYERS = 8
PAGE_TOKENS = 16


TILE = 16  # Rows of a product.


@dataclass(frozen=True, slots=True)
class Sizes:
    sequences: int
    context_tokens: int
    steps: int


def layouts_of(units: Units) -> Iterator[tuple[str, int, Layout]]:
    """Naive: contiguous shares, the same in every layer. Hybrid: heads that are left over are
    spread by sequences. Whole: they go to one rank each, from layer to layer to another one, as an
    instance comes to it that does not spread heads.
    """
    full = even(units, FULL)
    yield "even", FULL, full
    for left in LEFT:
        stages = staged(units.layers, [range(left)])
        yield "naive", left, uneven(units, stages)
        yield "hybrid", left, hybrid(units, stages)
        layout = full
        for lost in range(FULL - 1, left - 1, -1):
            groups = on_demand.survivors(layout, [lost])
            layout = on_demand.reshaped(layout, units, groups, spread=False)
        yield "whole", left, layout


def measured(model: Path, layout: Layout, sizes: Sizes) -> dict[str, Any]:
    """CPU seconds of each rank for the prompts, and for the decode steps behind them."""
    settings = EngineSettings(
        pages=sizes.sequences * pages_of(sizes) + 2,
        max_model_len=sizes.context_tokens + sizes.steps + PAGE_TOKENS,
        max_running=sizes.sequences,
        max_batch_tokens=max(512, sizes.sequences * TILE),
    )
    group = RankGroup(model, settings, layout, ElasticSettings(enabled=False))
    bases = bases_of(layout, sizes)
    try:
        first = worked_s(group)
        for at in range(0, sizes.context_tokens, TILE):
            group.execute([prompt_of(each, base, at, sizes) for each, base in enumerate(bases)])
        filled = worked_s(group)
        for step in range(sizes.steps):
            group.execute([token_of(each, base, step, sizes) for each, base in enumerate(bases)])
        last = worked_s(group)
    finally:
        group.close()
    return {
        "loads": [
            [load_of(layout, rank, layer, bases) for layer in range(LAYERS)]
            for rank in layout.ranks
        ],
        "prefill_s": [filled[rank] - first[rank] for rank in layout.ranks],
        "decode_s": [last[rank] - filled[rank] for rank in layout.ranks],
    }


def worked_s(group: RankGroup) -> dict[int, float]:
    """Processor time of each rank's batches so far."""
    assert group.formation is not None, "the ranks compute"
    return {rank: line.worked_ms.value / 1e3 for rank, line in group.formation.memory.lines.items()}


def bases_of(layout: Layout, sizes: Sizes) -> list[int]:
    """The bases of requests of one length that arrive one after the other."""
    pending = dict.fromkeys(range(layout.bases), 0)
    bases = []
    for _ in range(sizes.sequences):
        bases.append(least_loaded(pending))
        pending[bases[-1]] += sizes.context_tokens
    return bases


def load_of(layout: Layout, rank: int, layer: int, bases: Sequence[int]) -> list[float]:
    """The load of a rank in a layer: heads over all sequences (of spread ones a share), products of
    spread heads, which each have a cost of their own, and tiles.
    """
    spread = len(layout.spread(layer))
    turns = sum(layout.turn(layer, base) == rank for base in bases) if spread else 0
    heads = len(layout.heads(rank, layer)) + spread * turns / len(bases)
    return [heads, float(spread * bool(turns)), float(len(layout.tiles(rank, layer)))]


def pages_of(sizes: Sizes) -> int:
    return -(-(sizes.context_tokens + sizes.steps) // PAGE_TOKENS)


def _pages(sequence: int, sizes: Sizes) -> list[int]:
    count = pages_of(sizes)
    return list(range(sequence * count, (sequence + 1) * count))


def prompt_of(sequence: int, base: int, first: int, sizes: Sizes) -> Chunk:
    """A piece of a prompt."""
    last = min(first + TILE, sizes.context_tokens)
    ids = [(17 * at * at + 31 * sequence) % VOCAB for at in range(first, last)]
    return Chunk(ids, first, _pages(sequence, sizes), logits=0, base=base)


def token_of(sequence: int, base: int, step: int, sizes: Sizes) -> Chunk:
    at = sizes.context_tokens + step
    ids = [(7 * at + sequence) % VOCAB]
    return Chunk(ids, at, _pages(sequence, sizes), logits=1, base=base)


def by_layer_s(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[float], float]:
    """CPU seconds of each layout's busiest rank of attention and of MLP, layer by layer: ranks meet
    behind both. From costs that fit all ranks of all layouts: of a head, of products of spread
    heads, of a tile and of the rest. Also the largest error of the fit, of a rank's seconds.
    """
    facts = np.array([[1.0, *np.sum(loads, 0)] for row in rows for loads in row["loads"]])
    seconds = np.array([each for row in rows for each in row[key]])
    costs, *_ = np.linalg.lstsq(facts, seconds, rcond=None)
    rest, head, spread, tile = costs
    error = float(np.max(np.abs(facts @ costs - seconds) / seconds))
    found = []
    for row in rows:
        loads = np.array(row["loads"])  # [ranks, layers, 3]
        attention = (loads[..., 0] * head + loads[..., 1] * spread).max(0).sum()
        found.append(float(rest + attention + (loads[..., 2] * tile).max(0).sum()))
    return found, error


def read_options() -> tuple[argparse.Namespace, Sizes]:
    """`seed` and `out`, and the sizes of the load."""
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--sequences", type=int, default=80)
    parser.add_argument("--steps", type=int, default=8, help="decode steps of all sequences")
    parser.add_argument("--context", type=int, default=192)
    options = parser.parse_args()
    return options, Sizes(options.sequences, options.context, options.steps)


def main() -> None:
    options, sizes = read_options()
    record = Record(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "random"
        write_random_llama(model, options.seed, layers=LAYERS, kv_heads=FULL)
        units = ModelConfig.from_directory(model).units_of_ranks
        rows: list[dict[str, Any]] = []
        for name, ranks, layout in layouts_of(units):
            rows.append({"layout": name, "ranks": ranks} | measured(model, layout, sizes))
            print(name, ranks, [round(each, 2) for each in rows[-1]["decode_s"]], flush=True)
    errors = {}
    for phase in PUBLISHED:
        by_layer, errors[phase] = by_layer_s(rows, f"{phase}_s")
        for row, layer_s in zip(rows, by_layer, strict=True):
            row[f"{phase}_busiest_s"], row[f"{phase}_by_layer_s"] = max(row[f"{phase}_s"]), layer_s
    text = as_text(rows, sizes, errors)
    print(text)
    void = record.keep(options.out, "rank_balance", {"rows": rows, "errors": errors}, text)
    (whole,) = (row for row in rows if (row["layout"], row["ranks"]) == ("whole", LEFT[0]))
    missed = share_of_even(whole, rows[0], "decode_busiest_s") < BAR
    raise SystemExit(1 if void or missed else 0)


def share_of_even(row: dict[str, Any], full: dict[str, Any], key: str) -> float:
    """Throughput, of that of all ranks times the share of ranks that are left."""
    return float(full[key] / row[key] * full["ranks"] / row["ranks"])


def as_text(rows: Sequence[dict[str, Any]], sizes: Sizes, errors: dict[str, float]) -> str:
    full, *others = rows
    naive = {row["ranks"]: row for row in others if row["layout"] == "naive"}
    lines = [
        f"{sizes.sequences} sequences of {sizes.context_tokens} tokens, {sizes.steps} decode "
        f"steps; a model of {FULL} KV heads",
        "CPU seconds of the busiest rank: in sum (measured), and layer by layer (fitted to it)",
    ]
    for phase, published in PUBLISHED.items():
        lines += [
            "",
            f"{phase:<15}{'in sum':>9}{'of n/8':>8}{'over naive':>12}{'layers':>9}{'of n/8':>8}"
            f"{'over naive':>12}{'RaidServe':>11}",
        ]
        for row in rows:
            cells = [f"{row['layout']} at {row['ranks']}".ljust(15)]
            for key in (f"{phase}_busiest_s", f"{phase}_by_layer_s"):
                over = "-"
                if row["ranks"] in naive:
                    over = f"{naive[row['ranks']][key] / row[key]:.2f}"
                cells.append(f"{row[key]:>9.2f}{share_of_even(row, full, key):>8.2f}{over:>12}")
            is_theirs = row["layout"] == "hybrid"
            beside = f"{published[row['ranks']]:.2f}" if is_theirs else "-"
            lines.append("".join(cells) + f"{beside:>11}")
        lines.append(f"largest error of the fit, of a rank: {errors[phase]:.0%}")
    lines += ["", f"bar: decode of whole at {LEFT[0]} ranks, in sum: {BAR} of {LEFT[0]}/{FULL}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
