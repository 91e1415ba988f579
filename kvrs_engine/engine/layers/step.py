"""One batch as index tensors: the token of each row, the place of its KV, and the pages that its
query reads.

The tensors are built once per batch on the host and used by every layer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrs_engine.engine.kv_pool import KvStore
from kvrs_engine.engine.layers.tiles import GROUP_MATRICES, TILE_ROWS, padded_rows
from kvrs_engine.scheduling.sequences import Chunk

# Number of keys of one attention product (one page if pages are larger): large enough for a BLAS,
# small enough for short streams.
BLOCK_TOKENS = 64
# Number of blocks (times KV heads) per pass; they about fit into a core's cache.
_GROUP_BLOCKS = 256
# Largest size, in rows of scores, of a group that mixes tiles of different heights: up to this size
# the wasted rows cost less than another group.
_MIXED_ROWS = 1024


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Query tiles that are computed together: they have equal numbers of blocks, and similar
    numbers of real rows (one in decode, several with drafts, a whole tile in prefill).
    """

    rows_used: int  # Limit of the real rows of a tile; a power of two.
    blocks: int
    rows: Tensor  # [tiles * TILE_ROWS]: batch row of each row of each tile
    runs: Tensor  # [tiles * blocks * kv_heads * pages per block]: argument of `KvPool.gather`
    # [tiles, blocks, 1, 1, rows_used, block tokens]: 0 for visible keys, else -inf
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of a batch's query tiles, for one number of KV heads."""

    groups: list[TileGroup]
    row_in_groups: Tensor  # [rows]: index of each row's result in the concatenated groups


@dataclass(frozen=True, slots=True)
class BatchStep:
    """The index tensors of a batch. Rows are padded to whole tiles; padding repeats row 0, and its
    KV is not written.
    """

    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    real_rows: int
    pages: Tensor  # [real rows]
    slots: Tensor  # [real rows]
    begun_pages: Tensor  # pages whose first position is in this batch
    groupings: Mapping[int, Grouping]  # By the number of KV heads in a layer.
    logit_rows: Tensor  # [whole tiles]
    logits: int


@dataclass(frozen=True, slots=True)
class _Tile:
    first_row: int
    first_position: int
    rows: int
    pages: Sequence[int]

    @property
    def last_position(self) -> int:
        return self.first_position + self.rows - 1


def build_step(chunks: Sequence[Chunk], pool: KvStore) -> BatchStep:
    page_size = pool.geometry.page_size_tokens
    token_ids: list[int] = []
    positions: list[int] = []
    pages: list[int] = []
    tiles: list[_Tile] = []
    logit_rows: list[int] = []
    for chunk in chunks:
        last = chunk.first_position + len(chunk.token_ids)
        assert chunk.token_ids, "a chunk computes at least one token"
        assert (last - 1) // page_size < len(chunk.pages), "a chunk's pages cover it"
        tiles += _query_tiles(chunk, len(token_ids))
        token_ids += chunk.token_ids
        positions += range(chunk.first_position, last)
        pages += [
            chunk.pages[position // page_size] for position in range(chunk.first_position, last)
        ]
        assert 0 <= chunk.logits <= len(chunk.token_ids), "logits are those of a chunk's own tokens"
        logit_rows += range(len(token_ids) - chunk.logits, len(token_ids))
    device = pool.device
    real_rows = len(token_ids)
    row_padding = padded_rows(real_rows) - real_rows
    logit_padding = padded_rows(len(logit_rows)) - len(logit_rows)
    begun = [
        page for page, position in zip(pages, positions, strict=True) if position % page_size == 0
    ]

    def indices(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    def grouping(heads: int) -> Grouping:
        groups, row_in_groups = _group(tiles, real_rows, pool, heads)
        return Grouping(groups, indices(row_in_groups + [row_in_groups[0]] * row_padding))

    return BatchStep(
        token_ids=indices(token_ids + [token_ids[0]] * row_padding),
        positions=indices(positions + [positions[0]] * row_padding),
        real_rows=real_rows,
        pages=indices(pages),
        slots=indices([position % page_size for position in positions]),
        begun_pages=indices(begun),
        groupings={heads: grouping(heads) for heads in pool.head_counts},
        logit_rows=indices(logit_rows + [0] * logit_padding),
        logits=len(logit_rows),
    )


def pages_per_block(page_size_tokens: int) -> int:
    return max(1, BLOCK_TOKENS // page_size_tokens)


def _query_tiles(chunk: Chunk, first_row: int) -> Iterator[_Tile]:
    for offset in range(0, len(chunk.token_ids), TILE_ROWS):
        rows = min(TILE_ROWS, len(chunk.token_ids) - offset)
        yield _Tile(first_row + offset, chunk.first_position + offset, rows, chunk.pages)


def _group(
    tiles: list[_Tile], real_rows: int, pool: KvStore, heads: int
) -> tuple[list[TileGroup], list[int]]:
    """Sort tiles into groups; return the groups, and the index of every real row's result."""
    block_tokens = pages_per_block(pool.geometry.page_size_tokens) * pool.geometry.page_size_tokens
    classes: dict[int, list[_Tile]] = {}
    for tile in sorted(tiles, key=lambda tile: -tile.rows):
        blocks = _rounded_up(tile.last_position // block_tokens + 1)
        classes.setdefault(blocks, []).append(tile)
    groups: list[TileGroup] = []
    row_in_groups = [0] * real_rows
    offset = 0
    for blocks, members in classes.items():
        matrices_per_tile = blocks * heads
        # The number of a group's matrices must be a multiple of `GROUP_MATRICES`.
        multiple = GROUP_MATRICES // math.gcd(GROUP_MATRICES, matrices_per_tile)
        size = max(1, _GROUP_BLOCKS // (matrices_per_tile * multiple)) * multiple
        for rows_used, part in _parts(members, size, _MIXED_ROWS // matrices_per_tile):
            count = -(-len(part) // multiple) * multiple
            groups.append(_tile_group(part, count, rows_used, blocks, pool, heads))
            for index, tile in enumerate(part):
                for row in range(tile.rows):
                    row_in_groups[tile.first_row + row] = offset + index * rows_used + row
            offset += count * rows_used
    return groups, row_in_groups


def _parts(tiles: list[_Tile], size: int, mixed_rows: int) -> Iterator[tuple[int, list[_Tile]]]:
    """Divide tiles, sorted by rows in descending order, into parts of at most `size`; yield the
    used rows and the tiles of each part. A part of at most `mixed_rows` may mix heights.
    """
    while tiles:
        rows_used = _rows_used(tiles[0])
        alike = sum(_rows_used(tile) == rows_used for tile in tiles)
        count = min(size, max(alike, mixed_rows // rows_used))
        yield rows_used, tiles[:count]
        tiles = tiles[count:]


def _rows_used(tile: _Tile) -> int:
    return 1 << (tile.rows - 1).bit_length()


def _rounded_up(blocks: int) -> int:
    """Round up to two significant bits: few different sizes, and at most half of the work is
    wasted.
    """
    unit = 1 << max(0, blocks.bit_length() - 2)
    return -(-blocks // unit) * unit


def _tile_group(
    tiles: list[_Tile], count: int, rows_used: int, blocks: int, pool: KvStore, heads: int
) -> TileGroup:
    """Build a group of `count` tiles; tiles beyond `tiles` are padding, with row 0 and the zero
    page.
    """
    page_size = pool.geometry.page_size_tokens
    per_block = pages_per_block(page_size)
    device = pool.device
    rows: list[int] = []
    pages: list[int] = []
    firsts: list[int] = []
    for tile in tiles:
        rows += range(tile.first_row, tile.first_row + tile.rows)
        rows += [tile.first_row] * (TILE_ROWS - tile.rows)
        held = tile.last_position // page_size + 1
        pages += tile.pages[:held]
        pages += [pool.zero_page] * (blocks * per_block - held)
        firsts.append(tile.first_position)
    padding = count - len(tiles)
    rows += [0] * (padding * TILE_ROWS)
    pages += [pool.zero_page] * (padding * blocks * per_block)
    firsts += [0] * padding
    # A padding row attends to finite keys; its result is not used.
    queries = torch.tensor(firsts)[:, None] + torch.arange(rows_used)
    keys = torch.arange(blocks * per_block * page_size).view(1, blocks, 1, -1)
    mask = torch.zeros(()).where(keys <= queries[:, None, :, None], -torch.inf)
    # Runs are ordered by tile, block, KV head, page in the block.
    by_block = torch.tensor(pages).view(count, blocks, per_block)
    runs = pool.first_runs(by_block, heads).transpose(2, 3)
    return TileGroup(
        rows_used=rows_used,
        blocks=blocks,
        rows=torch.tensor(rows).to(device),
        runs=runs.reshape(-1).to(device),
        mask=mask[:, :, None, None].to(device),
    )
