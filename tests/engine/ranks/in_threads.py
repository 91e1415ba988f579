"""The ranks of an instance in threads of one process: the same code and the same exchange as in
processes, without their start.
"""

import mmap
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.elastic.grain import Grain
from kvrs.elastic.layouts import Layout, Stage
from kvrs.elastic.shares import Share
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.models.loading import load_decoder
from kvrs.engine.models.weights import Weights
from kvrs.engine.ranks.cells import CellPool, WholePages, memory_bytes
from kvrs.engine.ranks.exchange import Areas, FormationMemory
from kvrs.engine.ranks.rank import ShareWorker
from kvrs.engine.worker import geometry_of
from kvrs.scheduling.sequences import Chunk


class ThreadRanks:
    def __init__(self, directory: Path, settings: EngineSettings, layout: Layout) -> None:
        config, self._layout = ModelConfig.from_directory(directory), layout
        geometry = geometry_of(config, settings)
        areas = Areas.of(
            layout,
            hidden=config.hidden,
            vocabulary=config.vocab,
            batch_tokens=settings.max_batch_tokens,
        )
        self.memory = FormationMemory(mmap.mmap(-1, areas.size_bytes), areas)
        cells = torch.frombuffer(
            mmap.mmap(-1, memory_bytes(geometry, settings.pages)), dtype=torch.uint8
        )
        self.pages = WholePages(geometry, settings.pages, cells)
        self._workers = []
        for rank in layout.ranks:
            share = Share.of(layout, rank)
            with torch.inference_mode():
                decoder = load_decoder(
                    config,
                    Weights(directory),
                    settings.max_model_len,
                    torch.device("cpu"),
                    share,
                )
            pool = CellPool(share, geometry, settings.pages, cells)
            self._workers.append(ShareWorker(config, layout, rank, decoder, pool, self.memory))
        self._threads = ThreadPoolExecutor(len(self._workers))
        self._batch = 0

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        self._batch += 1
        list(self._threads.map(lambda worker: self._compute(worker, chunks), self._workers))
        return self.memory.logits(sum(chunk.wants_logits for chunk in chunks)).clone()

    def _compute(self, worker: ShareWorker, chunks: Sequence[Chunk]) -> None:
        with torch.inference_mode():
            worker.execute(chunks, self._batch)

    def close(self) -> None:
        self._threads.shutdown()


def random_layout(grain: Grain, layers: int, choose: random.Random) -> Layout:
    """1 to 6 ranks in 1 to 4 stages; each unit of a layer at any rank of its stage."""
    count = choose.randint(1, 6)
    stages = choose.randint(1, min(4, count, layers))
    numbers = choose.sample(range(10), count)
    # Each stage has a rank, and the others are anywhere.
    members = [[rank] for rank in numbers[:stages]]
    for rank in numbers[stages:]:
        choose.choice(members).append(rank)
    cuts = [0, *sorted(choose.sample(range(1, layers), stages - 1)), layers]
    spans = [
        Stage(first, last, tuple(ranks))
        for first, last, ranks in zip(cuts, cuts[1:], members, strict=False)
    ]

    def deal(units: Sequence[range], stage: Stage) -> tuple[int, ...]:
        return tuple(choose.choice(stage.ranks) for _ in units)

    return Layout(
        number=1,
        stages=tuple(spans),
        attention=tuple(deal(grain.attention, stage) for stage in spans for _ in stage.layers),
        mlp=tuple(deal(grain.mlp, stage) for stage in spans for _ in stage.layers),
        vocabulary=deal(grain.vocabulary, spans[-1]),
    )
