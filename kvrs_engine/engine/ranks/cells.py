"""The KV of an instance of several ranks, in one shared memory: for each cell (a layer and a KV
head) all pages, one after the other. Each rank writes and reads the cells of its own heads; the
instance's process reads and writes whole pages.

The place of a cell does not depend on its rank: a rank that takes over the heads of a lost rank
finds their cells in place.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec
import torch
from torch import Tensor

from kvrs.errors import TransferError
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.pages import Cell, Part
from kvrs.transfer.shared_memory import in_threads
from kvrs_engine.elastic.shares import Share
from kvrs_engine.engine.layers.step import pages_per_block

# Two more pages follow the pages of sequences: the zero page and the probe page.
_MORE_PAGES = 2


def zero_page(pages: int) -> int:
    return pages


def probe_page(pages: int) -> int:
    return pages + 1


def of_layers(geometry: KvGeometry, layers: range) -> KvGeometry:
    """Return the geometry of the pages' part for these consecutive layers."""
    return msgspec.structs.replace(geometry, layers=len(layers))


def memory_bytes(geometry: KvGeometry, pages: int) -> int:
    return (pages + _MORE_PAGES) * geometry.page_bytes


@dataclass(frozen=True, slots=True)
class _Own:
    """The cells of a rank in one layer."""

    heads: Tensor  # Columns in the memory.
    first: int | None  # The first column; None: the columns are not consecutive.
    count: int


class CellPool:
    """A `KvStore` over the cells of one rank. The memory is `[cells, pages + 2, 2,
    page_size_tokens, head_dim]`, with the cells of all layers or of consecutive layers.
    """

    def __init__(
        self,
        share: Share,
        geometry: KvGeometry,
        pages: int,
        memory: Tensor,
        first_layer: int = 0,
    ) -> None:
        """`memory` begins with the cells of `first_layer`, has `geometry.layers` layers, and must
        contain finite numbers.
        """
        self.geometry, self.device = geometry, memory.device
        self.zero_page = zero_page(pages)
        size, width = geometry.page_size_tokens, geometry.head_dim
        floats = memory[: memory_bytes(geometry, pages)].view(torch.float32)
        self._column_runs = (pages + _MORE_PAGES) * 2
        self.tensor = floats.view(-1, pages + _MORE_PAGES, 2, size, width)
        self._runs = floats.view(-1, size * width)
        self._own: dict[int, _Own] = {}
        columns: list[int] = []
        for layer, heads in zip(share.layers, share.heads, strict=True):
            cells = [(layer - first_layer) * geometry.kv_heads + head for head in heads]
            beside = cells == list(range(cells[0], cells[0] + len(cells))) if cells else False
            self._own[layer] = _Own(torch.tensor(cells), cells[0] if beside else None, len(cells))
            columns += cells
        self._columns = torch.tensor(columns, dtype=torch.int64)
        self._per_block = pages_per_block(size)
        self.head_counts = sorted({own.count for own in self._own.values()} - {0})

    def begin(self, pages: Tensor) -> None:
        if pages.numel():
            self.tensor[self._columns[:, None], pages] = 0.0

    def begin_layer(self, layer: int, pages: Tensor) -> None:
        """Clear the pages as `begin` does, but in one layer."""
        if pages.numel():
            self.tensor[self._own[layer].heads[:, None], pages] = 0.0

    def write(self, layer: int, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        own, both = self._own[layer], torch.stack((keys, values), 2)
        if own.first is not None:
            cells = self.tensor[own.first : own.first + own.count]
            cells.permute(1, 3, 0, 2, 4)[pages, slots] = both
        else:
            by_slot = self.tensor.permute(0, 1, 3, 2, 4)
            by_slot[own.heads, pages[:, None], slots[:, None]] = both

    def first_runs(self, pages: Tensor, heads: int) -> Tensor:
        return pages.unsqueeze(-1) * 2 + torch.arange(heads) * self._column_runs

    def gather(self, layer: int, runs: Tensor) -> tuple[Tensor, Tensor]:
        own = self._own[layer]
        first = 0
        if own.first is not None:
            first = own.first * self._column_runs
        else:
            apart = (own.heads - torch.arange(own.count)) * self._column_runs
            runs = (runs.view(-1, own.count, self._per_block) + apart[:, None]).view(-1)
        keys = self._runs[first:].index_select(0, runs)
        return keys, self._runs[first + 1 :].index_select(0, runs)


class WholePages:
    """A `PagePool` of whole pages, or of the pages' part for consecutive layers, over the cells'
    memory. A page is gathered before it is sent, and scattered after it has arrived.
    """

    def __init__(
        self, geometry: KvGeometry, pages: int, memory: Tensor, first_layer: int = 0
    ) -> None:
        """`geometry` has the layers from the model's `first_layer` on; cells are named by the
        model's layers.
        """
        self.geometry, self.pages = geometry, pages
        self.layers = range(first_layer, first_layer + geometry.layers)
        self._cells = geometry.layers * geometry.kv_heads
        self.memory = memory[: memory_bytes(geometry, pages)].view(
            self._cells, pages + _MORE_PAGES, -1
        )
        # Number of losses of cells; pages that were staged before a loss may lack cells.
        self.losses = 0
        self.is_whole = True

    def stage(self, pages: Sequence[int], part: Part | None = None) -> "GatheredPages":
        """Stage pages as `PagePool.stage` does, or with `part` only these cells of each page."""
        cells = None if part is None else self._rows(product(part.layers, part.heads))
        return GatheredPages(self, pages, cells)

    def lose(self, cells: Mapping[int, Iterable[Cell]], bases: Sequence[int] = ()) -> None:
        """Clear lost cells, which depend on the base of a page. `bases` has the base of each page;
        empty: all have base 0. No page is sent until `mended`.
        """
        self.is_whole = False
        self.losses += 1
        for base, own in cells.items():
            pages = [page for page, of in enumerate(bases or [0] * self.pages) if of == base]
            self.memory[self._rows(own)[:, None], torch.tensor(pages, dtype=torch.int64)] = 0

    def _rows(self, cells: Iterable[Cell]) -> Tensor:
        first, heads = self.layers.start, self.geometry.kv_heads
        return torch.tensor([(layer - first) * heads + head for layer, head in cells])

    def mended(self) -> None:
        """Allow sending again, after all page tables have dropped the pages that lost cells."""
        self.is_whole = True

    def check(self, losses: int | None) -> None:
        """Raises TransferError if cells were lost after the loss number `losses`."""
        if not self.is_whole or losses != self.losses:
            raise TransferError("cells of these pages are lost")


class GatheredPages:
    """Copies of pages, or of some of their cells, between the ranks' memory and sockets."""

    def __init__(self, pool: WholePages, pages: Sequence[int], cells: Tensor | None) -> None:
        """`cells` are rows of the memory; None: all."""
        # None: cells are lost, and page tables may still have their pages.
        self._pool, self._losses = pool, pool.losses if pool.is_whole else None
        self._pages = torch.tensor(pages, dtype=torch.int64)
        self._cells = slice(None) if cells is None else cells[:, None]
        count = pool.memory.shape[0] if cells is None else len(cells)
        self._shape = count, pool.memory.shape[2]
        # `[pages, bytes of a page, or of its cells]`
        self.buffer = torch.empty(len(pages), math.prod(self._shape), dtype=torch.uint8)
        self.views = [page.numpy().data for page in self.buffer]

    async def save(self) -> None:
        self._pool.check(self._losses)
        await in_threads(self.buffer.numel(), [self._gather])
        # Check again: cells may have been lost during the copy.
        self._pool.check(self._losses)

    async def restore(self, count: int) -> None:
        # Arrived data may be written after a loss, but not during one.
        losses = self._pool.losses
        await in_threads(count * self.buffer.shape[1], [lambda: self._scatter(count)])
        if losses != self._pool.losses:
            raise TransferError("cells of these pages were lost as they were written")

    def free(self) -> None:
        """Do nothing: the memory lives as long as its views."""

    def _gather(self) -> None:
        pages = self.buffer.view(len(self._pages), *self._shape)
        pages.copy_(self._pool.memory[self._cells, self._pages].transpose(0, 1))

    def _scatter(self, count: int) -> None:
        pages = self.buffer[:count].view(count, *self._shape)
        self._pool.memory[self._cells, self._pages[:count]] = pages.transpose(0, 1)
