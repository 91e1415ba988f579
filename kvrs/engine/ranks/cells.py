"""The KV of an instance of several ranks: each has the cells of its own heads in memory of its own,
and the instance's process sees whole pages.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvrs.elastic.shares import Share
from kvrs.protocol.geometry import KvGeometry

_SMALL_BYTES = 1 << 20  # Up to this size a copy takes less time than a switch to another thread.


class CellMap:
    """Which cells a rank has, in which order: by layer, then by head."""

    def __init__(self, share: Share, geometry: KvGeometry) -> None:
        self.geometry = geometry
        self.first: dict[int, int] = {}  # Of each layer.
        self.heads: dict[int, int] = {}  # Of each layer, how many.
        self.cells: list[int] = []  # By their places in a whole page.
        for layer, own in zip(share.layers, share.heads, strict=True):
            self.first[layer], self.heads[layer] = len(self.cells), len(own)
            self.cells += [layer * geometry.kv_heads + head for head in own]

    @property
    def cell_bytes(self) -> int:
        return self.geometry.page_bytes // (self.geometry.layers * self.geometry.kv_heads)

    def memory_bytes(self, pages: int) -> int:
        """Of that many pages and the one that is always zero."""
        return (pages + 1) * len(self.cells) * self.cell_bytes


class CellPool:
    """A `KvStore` over the cells of one rank, `[pages + 1, cells, 2, page_size_tokens, head_dim]`;
    the last page is always zero.
    """

    def __init__(self, cells: CellMap, pages: int, memory: Tensor) -> None:
        """`memory`: bytes that are all finite numbers."""
        self.geometry, self.device = cells.geometry, memory.device
        self.zero_page = pages
        self._cells = cells
        size, width = self.geometry.page_size_tokens, self.geometry.head_dim
        floats = memory[: cells.memory_bytes(pages)].view(torch.float32)
        self.tensor = floats.view(pages + 1, len(cells.cells), 2, size, width)
        self._runs = floats.view(-1, size * width)
        self.head_counts = sorted(set(cells.heads.values()) - {0})

    def begin(self, pages: Tensor) -> None:
        self.tensor.index_fill_(0, pages, 0.0)

    def write(self, layer: int, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        first = self._cells.first[layer]
        own = self.tensor[:, first : first + self._cells.heads[layer]]
        own.permute(0, 3, 1, 2, 4)[pages, slots] = torch.stack((keys, values), 2)

    def first_runs(self, pages: Tensor, heads: int) -> Tensor:
        return pages.unsqueeze(-1) * (len(self._cells.cells) * 2) + torch.arange(heads) * 2

    def gather(self, layer: int, runs: Tensor) -> tuple[Tensor, Tensor]:
        first = self._cells.first[layer] * 2
        keys = self._runs[first:].index_select(0, runs)
        return keys, self._runs[first + 1 :].index_select(0, runs)


class WholePages:
    """A `PagePool` of whole pages over the memory of all ranks: a page is gathered when it is sent,
    and scattered when it has arrived.
    """

    def __init__(self, geometry: KvGeometry, pages: int) -> None:
        self.geometry, self.pages = geometry, pages
        # Of each rank its cells by their places in a page, and its memory `[pages, cells, bytes]`.
        self.parts: Mapping[int, tuple[Tensor, Tensor]] = {}

    def attach(self, memories: Mapping[int, tuple[CellMap, Tensor]]) -> None:
        """Take the memory of these ranks from now on, which have every cell once."""
        self.parts = {
            rank: (
                torch.tensor(cells.cells, dtype=torch.int64),
                memory[: cells.memory_bytes(self.pages)].view(
                    self.pages + 1, len(cells.cells), cells.cell_bytes
                ),
            )
            for rank, (cells, memory) in memories.items()
        }
        found = sorted(cell for places, _ in self.parts.values() for cell in places.tolist())
        assert found == list(range(self.geometry.layers * self.geometry.kv_heads)), (
            "every cell has one rank"
        )

    def stage(self, pages: Sequence[int]) -> "GatheredPages":
        return GatheredPages(self, pages)


class GatheredPages:
    """Copies of pages on their way between the ranks' memory and sockets."""

    def __init__(self, pool: WholePages, pages: Sequence[int]) -> None:
        self._pool = pool
        self._pages = torch.tensor(pages, dtype=torch.int64)
        self._buffer = torch.empty(len(pages), pool.geometry.page_bytes, dtype=torch.uint8)
        self.views = [page.numpy().data for page in self._buffer]

    async def save(self) -> None:
        await self._carry(self._gather, len(self._pages))

    async def restore(self, count: int) -> None:
        await self._carry(lambda: self._scatter(count), count)

    def free(self) -> None:
        """The views stay valid for their holders, as any memory does."""

    async def _carry(self, copy: Callable[[], None], count: int) -> None:
        if count * self._pool.geometry.page_bytes <= _SMALL_BYTES:
            copy()
            return
        # A cancelled call returns only when the pages are not written any more.
        work = asyncio.ensure_future(asyncio.to_thread(copy))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise

    def _gather(self) -> None:
        whole = self._buffer.view(len(self._pages), -1, self._cell_bytes)
        for places, memory in self._pool.parts.values():
            whole[:, places] = memory[self._pages]

    def _scatter(self, count: int) -> None:
        whole = self._buffer.view(len(self._pages), -1, self._cell_bytes)
        for places, memory in self._pool.parts.values():
            memory[self._pages[:count]] = whole[:count, places]

    @property
    def _cell_bytes(self) -> int:
        geometry = self._pool.geometry
        return geometry.page_bytes // (geometry.layers * geometry.kv_heads)
