"""CPU time of each rank at 8, 7, 6 and 5 ranks, in layouts that balance heads and in the naive one.

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

from experiments.random_model import VOCAB, write_random_llama
from experiments.record import Record
from kvrs.config.elastic import ElasticSettings
from kvrs.config.engine import EngineSettings
from kvrs.elastic import on_demand
from kvrs.elastic.layouts import Layout, even, staged, uneven
from kvrs.elastic.units import Units
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.ranks.group import RankGroup
from kvrs.scheduling.sequences import Chunk

FULL = 8
LEFT = (7, 6, 5)
BAR = 0.95
# RaidServe, figure 11: decode of hybrid over naive; and the most that counting heads allows.
PUBLISHED = {5: 1.16, 6: 1.51, 7: 1.78}
LAYERS = 8
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    sequences: int
    context_tokens: int
    steps: int


def layouts_of(units: Units) -> Iterator[tuple[str, int, Layout]]:
    """Naive: contiguous shares, the same in every layer. Ours: what an instance comes to."""
    full = even(units, FULL)
    yield "even", FULL, full
    for left in LEFT:
        yield "naive", left, uneven(units, staged(units.layers, [range(left)]))
        layout = full
        for lost in range(FULL - 1, left - 1, -1):
            groups = on_demand.survivors(layout, [lost])
            layout = on_demand.reshaped(layout, units, groups, spread=False)
        yield "ours", left, layout


def measured(model: Path, layout: Layout, sizes: Sizes) -> dict[str, Any]:
    """CPU seconds of each rank for the prompts, and for the decode steps behind them."""
    settings = EngineSettings(
        pages=sizes.sequences * pages_of(sizes) + 2,
        max_model_len=sizes.context_tokens + sizes.steps + PAGE_TOKENS,
        max_running=sizes.sequences,
        max_batch_tokens=max(512, sizes.context_tokens),
    )
    group = RankGroup(model, settings, layout, ElasticSettings(enabled=False))
    try:
        first = dict(group.worked_s)
        for sequence in range(sizes.sequences):
            group.execute([prompt_of(sequence, sizes)])
        filled = dict(group.worked_s)
        for step in range(sizes.steps):
            group.execute([token_of(each, step, sizes) for each in range(sizes.sequences)])
        last = dict(group.worked_s)
    finally:
        group.close()
    heads = {
        rank: sum(len(layout.heads(rank, layer)) for layer in range(LAYERS))
        for rank in layout.ranks
    }
    tiles = {
        rank: sum(len(layout.tiles(rank, layer)) for layer in range(LAYERS))
        for rank in layout.ranks
    }
    return {
        "heads": list(heads.values()),
        "tiles": list(tiles.values()),
        "prefill_s": [filled[rank] - first[rank] for rank in layout.ranks],
        "decode_s": [last[rank] - filled[rank] for rank in layout.ranks],
        "most_by_layer": [
            [
                max(len(layout.heads(rank, layer)) for rank in layout.ranks),
                max(len(layout.tiles(rank, layer)) for rank in layout.ranks),
            ]
            for layer in range(LAYERS)
        ],
    }


def pages_of(sizes: Sizes) -> int:
    return -(-(sizes.context_tokens + sizes.steps) // PAGE_TOKENS)


def _pages(sequence: int, sizes: Sizes) -> list[int]:
    count = pages_of(sizes)
    return list(range(sequence * count, (sequence + 1) * count))


def prompt_of(sequence: int, sizes: Sizes) -> Chunk:
    ids = [(17 * at * at + 31 * sequence) % VOCAB for at in range(sizes.context_tokens)]
    return Chunk(ids, 0, _pages(sequence, sizes), wants_logits=False)


def token_of(sequence: int, step: int, sizes: Sizes) -> Chunk:
    at = sizes.context_tokens + step
    return Chunk([(7 * at + sequence) % VOCAB], at, _pages(sequence, sizes), wants_logits=True)


def by_layer_s(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Of each layout the CPU seconds of its busiest rank, layer by layer: ranks meet in each. From
    costs of a head, of a tile and of the rest that fit all ranks of all layouts.
    """
    facts = [
        (1.0, heads, tiles)
        for row in rows
        for heads, tiles in zip(row["heads"], row["tiles"], strict=True)
    ]
    seconds = [each for row in rows for each in row[key]]
    (rest, head, tile), *_ = np.linalg.lstsq(np.array(facts), np.array(seconds), rcond=None)
    return [
        float(rest + sum(head * heads + tile * tiles for heads, tiles in row["most_by_layer"]))
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="decode steps of 16 sequences")
    parser.add_argument("--context", type=int, default=448)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    record = Record(options.seed)
    sizes = Sizes(16, options.context, options.steps)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "random"
        write_random_llama(model, options.seed, layers=LAYERS, kv_heads=FULL)
        units = ModelConfig.from_directory(model).units_of_ranks
        rows: list[dict[str, Any]] = []
        for name, ranks, layout in layouts_of(units):
            rows.append({"layout": name, "ranks": ranks} | measured(model, layout, sizes))
            print(name, ranks, [round(each, 2) for each in rows[-1]["decode_s"]], flush=True)
    for key in ("decode", "prefill"):
        for row, layer_s in zip(rows, by_layer_s(rows, f"{key}_s"), strict=True):
            row[f"{key}_busiest_s"], row[f"{key}_by_layer_s"] = max(row[f"{key}_s"]), layer_s
    text = as_text(rows, sizes)
    print(text)
    void = record.keep(options.out, "rank_balance", {"rows": rows}, text)
    (ours,) = (row for row in rows if (row["layout"], row["ranks"]) == ("ours", LEFT[0]))
    missed = share_of_even(ours, rows[0], "decode_busiest_s") < BAR
    raise SystemExit(1 if void or missed else 0)


def share_of_even(row: dict[str, Any], full: dict[str, Any], key: str) -> float:
    """Throughput, of that of all ranks times the share of ranks that are left."""
    return float(full[key] / row[key] * full["ranks"] / row["ranks"])


def as_text(rows: Sequence[dict[str, Any]], sizes: Sizes) -> str:
    full, *others = rows
    naive = {row["ranks"]: row for row in others if row["layout"] == "naive"}
    lines = [
        f"{sizes.sequences} sequences of {sizes.context_tokens} tokens, {sizes.steps} decode "
        f"steps; a model of {FULL} KV heads",
        "CPU seconds of the busiest rank: in sum (measured), and layer by layer (fitted to it)",
        "",
        f"{'':<15}{'decode: sum':>12}{'of n/8':>8}{'over naive':>12}{'layers':>9}{'of n/8':>8}"
        f"{'over naive':>12}{'RaidServe':>11}{'prefill: sum':>14}{'of n/8':>8}",
    ]
    for row in rows:
        cells = [f"{row['layout']} at {row['ranks']}".ljust(15)]
        for key in ("decode_busiest_s", "decode_by_layer_s"):
            over = "-"
            if row["layout"] == "ours":
                over = f"{naive[row['ranks']][key] / row[key]:.2f}"
            width = 12 if key == "decode_busiest_s" else 9
            cells.append(f"{row[key]:>{width}.2f}{share_of_even(row, full, key):>8.2f}{over:>12}")
        published = PUBLISHED.get(row["ranks"]) if row["layout"] == "ours" else None
        cells.append(f"{'-' if published is None else published:>11}")
        key = "prefill_busiest_s"
        cells.append(f"{row[key]:>14.2f}{share_of_even(row, full, key):>8.2f}")
        lines.append("".join(cells))
    lines += ["", f"bar: at {LEFT[0]} ranks {BAR} of {LEFT[0]}/{FULL}, in sum"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    main()
