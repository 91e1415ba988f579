"""Bytes of logits and KV cells of mixtures of experts, whatever is where.

    python -m experiments.experts.exact [--rows 200000]

Real: the code of ranks in threads of one process, with owners, copies, stages and bases drawn at
random, for both families and for experts of 1, 2 and 8 parts. In every other trial the holders of a
copied expert divide its rows at random in place of evenly. Layouts change between batches, and
some batches are abandoned and computed again by other ranks. Each row is compared with what one
process computes of its sequence alone. Exit status 1: a byte differs, or ranks compute more tiles
than the rows of their experts fill.
"""

import asyncio
import random
import sys
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.engine import EngineSettings
from kvrs.elastic import on_demand
from kvrs.elastic.experts import assign
from kvrs.elastic.layouts import Layout
from kvrs.engine.layers.proofs import same_bytes
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.random_experts import ExpertsModel, write_experts_model
from kvrs.engine.ranks import exchange
from kvrs.engine.worker import Worker
from kvrs.scheduling.sequences import Chunk
from kvrs_testkit.ranks_in_threads import ThreadRanks, random_layout

NAME = "exact"
MODELS = {
    "mixtral, 8 experts of 1 part": ExpertsModel.tiny("mixtral", skew=1.0),
    "mixtral, 5 experts of 2 parts": ExpertsModel("mixtral", 4, 64, 8, 4, 16, 5, 2, 2100, 0.5),
    "mixtral, 4 experts of 8 parts": ExpertsModel("mixtral", 2, 32, 4, 2, 16, 4, 2, 8192, 1.0),
    "qwen3_moe, 32 experts of 1 part": ExpertsModel.tiny(
        "qwen3_moe", experts=32, chosen=4, skew=1.0
    ),
}
SEQUENCES, LENGTH, PAGE_TOKENS = 6, 240, 16
CHUNKS = (1, 1, 1, 5, 16, 17, 33, 60)
_EACH = -(-LENGTH // PAGE_TOKENS)
_CHANGES, _ABANDONED = 0.08, 0.05


@dataclass(slots=True)
class Count:
    model: str
    rows: int = 0
    rows_different: int = 0
    cells_different: int = 0  # Pages of them.
    batches: int = 0
    layouts: int = 0
    copies: int = 0
    abandoned: int = 0
    tiles: int = 0  # Computed by all ranks.
    tiles_needed: int = 0

    @property
    def passes(self) -> bool:
        differ = self.rows_different or self.cells_different
        return not differ and self.tiles == self.tiles_needed and self.copies > 0


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rows", type=int, default=200_000, help="of all models together")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    each = -(-options.rows // len(MODELS))
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as jobs:
        found = [jobs.submit(measured, *model, each, options.seed) for model in MODELS.items()]
        counts = [one.result() for one in found]
    record.keep(options.out, NAME, {"rows": [asdict(each) for each in counts]}, as_text(counts))
    return not all(count.passes for count in counts)


def measured(name: str, model: ExpertsModel, rows: int, seed: int) -> Count:
    count, choose = Count(name), random.Random(f"{name} {seed}")
    settings = EngineSettings(
        page_size_tokens=PAGE_TOKENS,
        pages=2 * SEQUENCES * _EACH,
        max_batch_tokens=SEQUENCES * max(CHUNKS),
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        write_experts_model(Path(directory), model, seed)
        bench = _Bench(Path(directory), settings, choose)
        while count.rows < rows:
            asyncio.run(bench.trial(count))
    return count


class _Bench:
    """A model, and what one process computes of some sequences."""

    def __init__(self, directory: Path, settings: EngineSettings, choose: random.Random) -> None:
        self._directory, self._settings, self._choose = directory, settings, choose
        self._config = ModelConfig.from_directory(directory)
        self._worker = Worker(directory, settings)
        vocabulary = range(self._config.vocab)
        self._token_ids = [choose.choices(vocabulary, k=LENGTH) for _ in range(SEQUENCES)]
        pages = [range(at * _EACH, (at + 1) * _EACH) for at in range(SEQUENCES)]
        self._expected = [
            self._worker.execute([Chunk(ids, 0, own, logits=LENGTH)])
            for ids, own in zip(self._token_ids, pages, strict=True)
        ]

    async def trial(self, count: Count) -> None:
        """All sequences to their ends."""
        choose, salt = self._choose, self._choose.random()
        ranks = self._ranks(self._layout(), count)
        pages = choose.sample(range(self._settings.pages), k=SEQUENCES * _EACH)
        held = [pages[at * _EACH : (at + 1) * _EACH] for at in range(SEQUENCES)]
        bases, done = choose.choices(range(6), k=SEQUENCES), [0] * SEQUENCES

        def at_random(runs: Sequence[int], holders: Sequence[tuple[int, ...]]) -> object:
            """The same on every rank."""
            given = random.Random(zlib.crc32(repr((salt, runs, holders)).encode()))
            return {
                piece: given.choices(own, k=number)
                for piece, (number, own) in enumerate(zip(runs, holders, strict=True))
                if len(own) > 1 and number
            }

        with patch.object(exchange, "assign", choose.choice([assign, at_random])):
            while open_ones := [at for at in range(SEQUENCES) if done[at] < LENGTH]:
                chunks, expected = [], []
                for at in choose.sample(open_ones, choose.randint(1, len(open_ones))):
                    first, done[at] = done[at], min(LENGTH, done[at] + choose.choice(CHUNKS))
                    ids = self._token_ids[at][first : done[at]]
                    chunks.append(Chunk(ids, first, held[at], len(ids), bases[at]))
                    expected.append(self._expected[at][first : done[at]])
                if choose.random() < _ABANDONED:
                    ranks.execute(chunks)
                    count.abandoned += 1
                    ranks = self._changed(ranks, count)
                elif choose.random() < _CHANGES:
                    ranks = self._changed(ranks, count)
                logits = ranks.execute(chunks)
                count.batches += 1
                count.rows += len(logits)
                for row, own in zip(logits, torch.cat(expected), strict=True):
                    count.rows_different += not same_bytes(row, own)
        self._close(ranks, count)
        whole = [at for own in held for at in own]
        ours = ranks.pages.stage(whole)
        theirs = self._worker.pool.stage(range(SEQUENCES * _EACH))
        await ours.save()
        await theirs.save()
        for one, other in zip(ours.views, theirs.views, strict=True):
            count.cells_different += bytes(one) != bytes(other)

    def _layout(self) -> Layout:
        return random_layout(self._config.grain, self._config.layers, self._choose)

    def _changed(self, ranks: ThreadRanks, count: Count) -> ThreadRanks:
        """A rank is lost, or everything lies elsewhere; cells stay where they are in memory."""
        self._close(ranks, count)
        before, choose = ranks.layout, self._choose
        after = self._layout()
        large = [stage for stage in before.stages if len(stage.ranks) > 1]
        if large and choose.random() < 0.6:
            lost = choose.choice(choose.choice(large).ranks)
            left = on_demand.survivors(before, [lost])
            after = on_demand.reshaped(before, self._config.units, left)
        new = self._ranks(after, count)
        new.pages.memory.copy_(ranks.pages.memory)
        return new

    def _ranks(self, layout: Layout, count: Count) -> ThreadRanks:
        count.layouts += 1
        count.copies += sum(map(len, layout.copies))
        return ThreadRanks(self._directory, self._settings, layout)

    def _close(self, ranks: ThreadRanks, count: Count) -> None:
        ranks.close()
        count.tiles += int(ranks.memory.computed.sum())
        count.tiles_needed += int(ranks.memory.tiles.sum()) * self._config.grain.expert_parts


def as_text(counts: Sequence[Count]) -> str:
    lines = [
        f"{'model':34}     rows  differ  pages differ  batches  layouts  copies  abandoned  "
        f"tiles computed / needed"
    ]
    lines += [
        f"{each.model:34} {each.rows:8} {each.rows_different:7} {each.cells_different:13} "
        f"{each.batches:8} {each.layouts:8} {each.copies:7} {each.abandoned:10}  "
        f"{each.tiles} / {each.tiles_needed}"
        for each in counts
    ]
    rows = sum(each.rows for each in counts)
    differ = sum(each.rows_different for each in counts)
    passed = all(each.passes for each in counts)
    return "\n".join([*lines, "", f"{differ} of {rows} rows differ", f"passed: {passed}"])


if __name__ == "__main__":
    sys.exit(main())
