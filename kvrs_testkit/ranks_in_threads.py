"""The ranks of an instance in threads of one process: the same code and the same exchange as in
processes, without their start.
"""

import mmap
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs_engine.elastic.grain import Grain
from kvrs_engine.elastic.layouts import SPREAD, Layout, Stage
from kvrs_engine.elastic.shares import Share
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.loading import load_decoder
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.ranks.cells import CellPool, WholePages, memory_bytes
from kvrs_engine.engine.ranks.exchange import Areas, FormationMemory
from kvrs_engine.engine.ranks.rank import ShareWorker
from kvrs_engine.engine.ranks.spread import RankPart
from kvrs_engine.engine.worker import geometry_of
from kvrs_engine.scheduling.sequences import Chunk


class ThreadRanks:
    def __init__(
        self, directory: Path, settings: EngineSettings, layout: Layout, *, apart: bool = False
    ) -> None:
        """`apart`: each rank has memory of its own, in which it finds what it has written."""
        config, self.layout = ModelConfig.from_directory(directory), layout
        geometry = geometry_of(config, settings)
        areas = Areas(
            layout,
            config=config,
            batch_tokens=settings.max_batch_tokens,
        )
        self.memory = FormationMemory(mmap.mmap(-1, areas.size_bytes), areas)

        def whole() -> WholePages:
            memory = mmap.mmap(-1, memory_bytes(geometry, settings.pages))
            return WholePages(geometry, settings.pages, torch.frombuffer(memory, dtype=torch.uint8))

        def part(share: Share, pages: WholePages) -> RankPart:
            with torch.inference_mode():
                decoder = load_decoder(
                    config,
                    Weights(directory),
                    settings.max_model_len,
                    torch.device("cpu"),
                    share,
                )
            memory = pages.memory.view(-1)
            return RankPart(decoder, CellPool(share, geometry, settings.pages, memory))

        self.pages = whole()
        self._own = {rank: whole() if apart else self.pages for rank in layout.ranks}
        self._workers = []
        for rank, pages in self._own.items():
            share = Share.of(layout, rank)
            own = part(share, pages)
            spread = part(share.spread_heads, pages) if any(share.spread) else None
            self._workers.append(
                ShareWorker(config, layout, rank, own.decoder, own.pool, self.memory, spread)
            )
        self._threads = ThreadPoolExecutor(len(self._workers))
        self._batch = 0

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        self._batch += 1
        list(self._threads.map(lambda worker: self._compute(worker, chunks), self._workers))
        return self.memory.logits(sum(chunk.logits for chunk in chunks), self._batch).clone()

    def _compute(self, worker: ShareWorker, chunks: Sequence[Chunk]) -> None:
        with torch.inference_mode():
            worker.execute(chunks, self._batch)

    def gather(self, bases: Mapping[int, int]) -> None:
        """Put pages, of each the base, together of the cells that ranks have apart."""
        heads = self.pages.geometry.kv_heads
        for page, base in bases.items():
            for rank, own in self._own.items():
                for layer, head in self.layout.cells(rank, base):
                    cell = layer * heads + head
                    self.pages.memory[cell, page] = own.memory[cell, page]

    def close(self) -> None:
        self._threads.shutdown()


def random_layout(grain: Grain, layers: int, choose: random.Random) -> Layout:
    """1 to 6 ranks in 1 to 4 stages; each unit of a layer at any rank of its stage, or spread over
    all with turns in any order.
    """
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

    def deal_mlp(layer: int, stage: Stage) -> tuple[int, ...]:
        owners = deal(grain.mlp_of(layer), stage)
        if not grain.expert_parts or choose.random() < 0.5:
            return owners
        # Whole experts, where the layer has some.
        return tuple(owners[at - at % grain.expert_parts] for at in range(len(owners)))

    def heads(stage: Stage) -> tuple[int, ...]:
        chance = choose.choice((0.0, 0.4, 1.0))
        owners = deal(grain.attention, stage)
        return tuple(SPREAD if choose.random() < chance else owner for owner in owners)

    def copies(layer: int, stage: Stage) -> tuple[tuple[int, int], ...]:
        """Copies of whole experts or of parts, each on any number of other ranks."""
        if not grain.expert_parts or layer in grain.dense_layers or choose.random() < 0.3:
            return ()
        found, whole = set(), choose.random() < 0.5
        for place, owner in enumerate(mlp[layer]):
            if not whole or place % grain.expert_parts == 0:
                on = choose.sample(stage.ranks, choose.randint(0, len(stage.ranks)))
            found |= {(place, rank) for rank in on if rank != owner}
        return tuple(sorted(found))

    by_layer = [stage for stage in spans for _ in stage.layers]
    mlp = tuple(deal_mlp(layer, stage) for layer, stage in enumerate(by_layer))
    bases = [range(0)] * choose.randint(1, 5)
    return Layout(
        number=1,
        stages=tuple(spans),
        attention=tuple(heads(stage) for stage in by_layer),
        mlp=mlp,
        vocabulary=deal(grain.vocabulary, spans[-1]),
        turns=tuple(deal(bases, stage) for stage in by_layer),
        copies=tuple(copies(layer, stage) for layer, stage in enumerate(by_layer)),
    )
