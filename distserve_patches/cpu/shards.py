"""The part of a model's KV at one rank, and the KV of a whole stage as a pool for the decoder of
kvrs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.pages import Part
from kvrs_engine.engine.layers.step import pages_per_block


def part_of(parallel: list[int], layers: int, heads: int) -> Part:
    """The part of the rank that upstream's `ParallelConfig.to_list` describes, in a model with
    these layers and heads.
    """
    tensor_size, tensor_rank, pipeline_size, pipeline_rank = parallel
    assert tensor_rank < tensor_size, "a rank lies in its group"
    assert pipeline_rank < pipeline_size, "a rank lies in its group"
    own_layers, own_heads = layers // pipeline_size, heads // tensor_size
    return Part(
        range(pipeline_rank * own_layers, (pipeline_rank + 1) * own_layers),
        range(tensor_rank * own_heads, (tensor_rank + 1) * own_heads),
    )


class ShardedPool:
    """A `KvStore` for the decoder of kvrs over the caches of all ranks of a stage."""

    def __init__(
        self, geometry: KvGeometry, shards: Sequence[Sequence[tuple[Tensor, Tensor]]]
    ) -> None:
        """Take the shards: `shards[pipeline rank][tensor rank]` are keys and values `[blocks + 1,
        layers, heads, block size, head_dim]` of that rank, with a last block of zeros.
        """
        self.geometry = geometry
        first = shards[0][0][0]
        self.device = first.device
        self.zero_page = first.shape[0] - 1
        self.head_counts = (geometry.kv_heads,)
        self._shards = shards
        self._own_layers, self._own_heads = first.shape[1], first.shape[2]
        run = geometry.page_size_tokens * geometry.head_dim
        self._runs = [
            [(keys.view(-1, run), values.view(-1, run)) for keys, values in stage]
            for stage in shards
        ]
        self._pages_per_block = pages_per_block(geometry.page_size_tokens)

    def begin(self, pages: Tensor) -> None:
        for stage in self._shards:
            for keys, values in stage:
                keys.index_fill_(0, pages, 0.0)
                values.index_fill_(0, pages, 0.0)

    def write(self, layer: int, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        stage, own_layer = divmod(layer, self._own_layers)
        for rank, caches in enumerate(self._shards[stage]):
            heads = slice(rank * self._own_heads, (rank + 1) * self._own_heads)
            for cache, new in zip(caches, (keys, values), strict=True):
                cache[:, own_layer].transpose(1, 2)[pages, slots] = new[:, heads]

    def first_runs(self, pages: Tensor, heads: int) -> Tensor:
        own = torch.arange(heads) % self._own_heads
        return pages.unsqueeze(-1) * (self._own_layers * self._own_heads) + own

    def gather(self, layer: int, runs: Tensor) -> tuple[Tensor, Tensor]:
        stage, own_layer = divmod(layer, self._own_layers)
        first = own_layer * self._own_heads
        if len(self._runs[stage]) == 1:
            ((keys, values),) = self._runs[stage]
            return keys[first:].index_select(0, runs), values[first:].index_select(0, runs)
        # `step` orders runs as (tile and block, head, page); each rank has its own heads.
        by_head = runs.view(-1, self.geometry.kv_heads, self._pages_per_block)
        gathered = []
        for kind in (0, 1):
            parts = [
                rank[kind][first:].index_select(0, own.reshape(-1)).view(*own.shape, -1)
                for rank, own in zip(
                    self._runs[stage], torch.split(by_head, self._own_heads, 1), strict=True
                )
            ]
            gathered.append(torch.cat(parts, 1).view(runs.shape[0], -1))
        return gathered[0], gathered[1]
