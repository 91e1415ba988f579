"""Bytes of logits and of KV cells of a model divided among ranks at random, against one process.

Oracle: an engine that computes each sequence alone. Compared: every row of logits of random batches
and, at the end of a trial, every position of every cell.
"""

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.elastic_bits.formation import Formation, all_rows
from experiments.elastic_bits.models import MODELS, write_model
from experiments.record import Record
from kvrs.config.engine import EngineSettings
from kvrs.engine.layers.proofs import same_bytes
from kvrs.engine.layers.step import build_step
from kvrs.engine.worker import Worker
from kvrs.scheduling.sequences import Chunk

SEQUENCES, LENGTH = 5, 110
CHUNKS = (1, 1, 1, 2, 5, 16, 17, 33, 64)


@dataclass
class Count:
    rows: int = 0
    rows_different: int = 0
    cells: int = 0
    cells_different: int = 0
    batches: int = 0
    deals: int = 0


class Bench:
    """A model, and what one engine computes of some sequences."""

    def __init__(self, directory: Path, page_size_tokens: int, seed: int) -> None:
        self.size = page_size_tokens
        self.each = -(-LENGTH // page_size_tokens)
        self.worker = Worker(
            directory,
            EngineSettings(page_size_tokens=page_size_tokens, pages=2 * SEQUENCES * self.each),
        )
        choose = random.Random(seed)
        self.token_ids = [
            choose.choices(range(self.worker.vocab_size), k=LENGTH) for _ in range(SEQUENCES)
        ]
        self.expected = [self._alone(sequence) for sequence in range(SEQUENCES)]

    def _alone(self, sequence: int) -> Tensor:
        """Logits of every position."""
        pages = range(sequence * self.each, (sequence + 1) * self.each)
        chunk = Chunk(self.token_ids[sequence], 0, pages, logits=1)
        with torch.inference_mode():
            step = all_rows(build_step([chunk], self.worker.pool))
            return self.worker.model.forward(step, self.worker.pool)

    def trial(self, choose: random.Random, count: Count, *, in_order: bool = False) -> None:
        """All sequences to their ends in random batches, with new owners now and then."""
        pages = choose.sample(range(self.worker.pool.pages), k=SEQUENCES * self.each)
        held = [pages[at * self.each : (at + 1) * self.each] for at in range(SEQUENCES)]
        done = [0] * SEQUENCES
        formation = Formation(
            self.worker.model,
            self.worker.geometry,
            self.worker.pool.pages,
            choose,
            in_order=in_order,
        )
        count.deals += 1
        while open_ones := [at for at in range(SEQUENCES) if done[at] < LENGTH]:
            if choose.random() < 0.1:
                formation.deal()
                count.deals += 1
            members = choose.sample(open_ones, choose.randint(1, len(open_ones)))
            chunks, expected = [], []
            for at in members:
                last = min(LENGTH, done[at] + choose.choice(CHUNKS))
                chunks.append(Chunk(self.token_ids[at][done[at] : last], done[at], held[at], True))
                expected.append(self.expected[at][done[at] : last])
                done[at] = last
            logits = formation.forward(chunks)
            count.batches += 1
            count.rows += logits.shape[0]
            for row, own in zip(logits, torch.cat(expected), strict=True):
                count.rows_different += not same_bytes(row, own)
        self._compare_cells(formation, held, count)

    def _compare_cells(self, formation: Formation, held: list[list[int]], count: Count) -> None:
        geometry, oracle = self.worker.geometry, self.worker.pool.tensor
        for layer in range(geometry.layers):
            for head in range(geometry.kv_heads):
                cells = formation.cell(layer, head)
                for sequence, pages in enumerate(held):
                    for at, page in enumerate(pages):
                        filled = slice(min(self.size, LENGTH - at * self.size))
                        own = oracle[sequence * self.each + at, layer, head]
                        count.cells += 1
                        count.cells_different += not same_bytes(
                            cells[page][:, filled], own[:, filled]
                        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of trials for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    record, rows = Record(options.seed, timed=False), []
    for number, name in enumerate(MODELS):
        with tempfile.TemporaryDirectory() as scratch:
            size = write_model(name, Path(scratch), options.seed)
            bench = Bench(Path(scratch), size, options.seed)
        choose = random.Random(options.seed * 1000 + number)
        count, control = Count(), Count()
        until_s = time.monotonic() + options.seconds
        with torch.inference_mode():
            bench.trial(choose, control, in_order=True)
            while time.monotonic() < until_s:
                bench.trial(choose, count)
        seen = {"control_rows": control.rows, "control_different": control.rows_different}
        rows.append({"model": name, **vars(count), **seen})
        print(rows[-1], flush=True)
    text = as_text(rows)
    print(text)
    different = sum(row["rows_different"] + row["cells_different"] for row in rows)
    blind = all(row["control_different"] == 0 for row in rows)
    void = record.keep(options.out, "elastic_bits", {"rows": rows}, text)
    raise SystemExit(1 if different or blind or void else 0)


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        lines += [
            row["model"],
            f"  {row['rows']:,} rows, {row['rows_different']} differ; {row['cells']:,} cells, "
            f"{row['cells_different']} differ; {row['deals']} ownerships, {row['batches']} batches",
            f"  control, sums in the order of ranks: {row['control_different']} of "
            f"{row['control_rows']} rows differ",
        ]
    total = {key: sum(row[key] for row in rows) for key in vars(Count())}
    lines.append(
        f"in all {total['rows']:,} rows, {total['rows_different']} differ; {total['cells']:,} "
        f"cells, {total['cells_different']} differ; {total['deals']} ownerships"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
