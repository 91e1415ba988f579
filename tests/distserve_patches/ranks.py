"""A stage without Ray: its ranks in this process, with caches of their own, and calls that are
answered from a thread.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from distserve_patches.pool import StagePool
from distserve_patches.shard import PageShard
from kvrs.protocol.geometry import KvGeometry
from kvrs_engine.engine.kv_pool import KvPool

DTYPES = {2: torch.bfloat16, 4: torch.float32}


class Rank(PageShard):
    """Upstream's layout, upstream's names."""

    def __init__(self, geometry: KvGeometry, blocks: int, parallel: SimpleNamespace) -> None:
        super().__init__()
        layers = geometry.layers // parallel.pipeline_parallel_size
        heads = geometry.kv_heads // parallel.tensor_parallel_size
        shape = (blocks, layers, heads, geometry.page_size_tokens, geometry.head_dim)
        self.k_cache = torch.zeros(shape, dtype=DTYPES[geometry.dtype_bytes])
        self.v_cache = torch.zeros(shape, dtype=DTYPES[geometry.dtype_bytes])
        self.parallel_config = parallel


@dataclass
class Stage:
    """Ranks and the pool over them."""

    geometry: KvGeometry
    blocks: int
    tensor_size: int = 1
    pipeline_size: int = 1
    max_pages: int = 64
    delay_s: float = 0.0  # Of every call, on its thread.
    failure: BaseException | None = None  # Of the last rank.
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = {
            "tensor_parallel_size": self.tensor_size,
            "pipeline_parallel_size": self.pipeline_size,
        }
        self.ranks = [
            Rank(
                self.geometry,
                self.blocks,
                SimpleNamespace(
                    **sizes, pipeline_parallel_rank=pipeline_rank, tensor_parallel_rank=tensor_rank
                ),
            )
            for pipeline_rank, tensor_rank in itertools.product(
                range(self.pipeline_size), range(self.tensor_size)
            )
        ]
        self.pool = StagePool(self.geometry, self.call_workers, self.swapped_out, self.max_pages)

    async def swapped_out(self) -> None:
        self.calls.append("swapped_out")

    def call_workers(self, method: str, *args: Any) -> Sequence[Awaitable[object]]:
        self.calls.append(method)
        return [
            asyncio.ensure_future(asyncio.to_thread(self._answer, rank, method, *args))
            for rank in self.ranks
        ]

    def _answer(self, rank: Rank, method: str, *args: Any) -> None:
        time.sleep(self.delay_s)
        if self.failure is not None and rank is self.ranks[-1]:
            raise self.failure
        getattr(rank, method)(*args)

    def fill(self, pool: KvPool) -> None:
        """Every rank gets its part of the pages of an embedded engine, by cutting its tensor up."""
        by_page = pool.tensor[: self.blocks]
        for rank, (layers, heads) in zip(self.ranks, self._parts(), strict=True):
            rank.k_cache.copy_(by_page[:, layers, heads, 0])
            rank.v_cache.copy_(by_page[:, layers, heads, 1])

    def whole(self) -> torch.Tensor:
        """The stage's pages put together again, `[blocks, layers, kv_heads, 2, page_size_tokens,
        head_dim]`.
        """
        together = KvPool(self.geometry, self.blocks, torch.device("cpu")).tensor[: self.blocks]
        for rank, (layers, heads) in zip(self.ranks, self._parts(), strict=True):
            together[:, layers, heads, 0] = rank.k_cache
            together[:, layers, heads, 1] = rank.v_cache
        return together

    def _parts(self) -> list[tuple[slice, slice]]:
        layers, heads = (
            self.geometry.layers // self.pipeline_size,
            self.geometry.kv_heads // self.tensor_size,
        )
        return [
            (slice(first_layer, first_layer + layers), slice(first_head, first_head + heads))
            for first_layer in range(0, self.geometry.layers, layers)
            for first_head in range(0, self.geometry.kv_heads, heads)
        ]
