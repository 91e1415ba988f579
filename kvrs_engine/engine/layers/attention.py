"""Causal attention over pages, exact for every row.

Each query tile and block of keys has one product for the scores, exp(score - row maximum), and one
product with the values. The maximum is exact in any order. Blocks are summed by `pair_sum`; the
blocks that pad a shorter sequence are zeros.
"""

import torch
from torch import Tensor

from kvrs_engine.engine.kv_pool import KvStore
from kvrs_engine.engine.layers.step import BatchStep, TileGroup
from kvrs_engine.engine.layers.tiles import TILE_ROWS, batched_product, fold_sum, pair_sum


def attend(queries: Tensor, pool: KvStore, layer: int, step: BatchStep) -> Tensor:
    """Return the results `[rows, heads * head_dim]` for queries `[rows, kv_heads, heads per KV
    head, head_dim]`. The batch's own KV must be in the pool.
    """
    grouping = step.groupings[queries.shape[1]]
    results = [_attend_group(queries, pool, layer, group) for group in grouping.groups]
    joined = results[0] if len(results) == 1 else torch.cat(results)
    return joined.index_select(0, grouping.row_in_groups)


def _attend_group(queries: Tensor, pool: KvStore, layer: int, group: TileGroup) -> Tensor:
    """Return the results of one group, `[tiles * rows used, heads * head_dim]`."""
    # The query heads of one KV head are stacked in one matrix.
    _, kv_heads, shared, head_dim = queries.shape
    tiles, blocks, used = group.mask.shape[0], group.blocks, group.rows_used
    keys, values = pool.gather(layer, group.runs)
    keys, values = (kv.view(tiles * blocks * kv_heads, -1, head_dim) for kv in (keys, values))

    scaled = queries.index_select(0, group.rows) * head_dim**-0.5
    by_head = scaled.view(tiles, 1, TILE_ROWS, kv_heads, shared, head_dim).permute(0, 1, 3, 4, 2, 5)
    left = by_head.expand(-1, blocks, -1, -1, -1, -1).reshape(
        tiles * blocks * kv_heads, shared * TILE_ROWS, head_dim
    )
    scores = batched_product(left, keys.transpose(1, 2)).view(
        tiles, blocks, kv_heads, shared, TILE_ROWS, -1
    )

    scores = scores[..., :used, :] + group.mask
    highest = scores.amax(1).amax(-1, keepdim=True)
    weights = torch.exp(scores - highest.unsqueeze(1))
    total = fold_sum(pair_sum(weights))

    if used < TILE_ROWS:
        tiled = weights.new_zeros(*weights.shape[:-2], TILE_ROWS, weights.shape[-1])
        tiled[..., :used, :] = weights
        weights = tiled
    weighted = batched_product(
        weights.view(tiles * blocks * kv_heads, shared * TILE_ROWS, -1), values
    )
    parts = weighted.view(tiles, blocks, kv_heads, shared, TILE_ROWS, head_dim)[..., :used, :]
    mixed = pair_sum(parts) / total
    return mixed.permute(0, 3, 1, 2, 4).reshape(tiles * used, -1)
