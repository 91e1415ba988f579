"""Host memory between a pool and sockets: in place on a CPU, in pinned buffers beside a GPU.

Copies to and from a GPU run on a separate CUDA stream. They wait on the device for the kernels that
were launched before them, and no kernel waits for them; users of the result wait on the host
(`Staged.wait`), off the event loop.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvrs.protocol.geometry import KvGeometry

# Size of a block of pinned buffers: every call into the driver costs milliseconds.
_BLOCK_BYTES = 64 << 20


class StagedPages(Protocol):
    """Pages that are transferred between a pool and sockets; implemented by `Staged`."""

    views: list[memoryview]  # One per page; valid until `free`.

    async def save(self) -> None:
        """Fill the views with the pages.

        Raises:
            TransferError: the pool is gone.
        """
        ...

    async def restore(self, count: int) -> None:
        """Fill the first `count` pages from their views. A cancelled call returns when the pages
        are no longer written.

        Raises:
            TransferError: the pool is gone.
        """
        ...

    def free(self) -> None:
        """Release the views; further calls do nothing."""
        ...


class PagePool(Protocol):
    """The memory of an instance's pages; implemented by `kvrs_engine.engine.kv_pool.KvPool`."""

    geometry: KvGeometry

    def stage(self, pages: Sequence[int]) -> StagedPages:
        """Stage pages on the host: send them after `save`, or receive them before `restore`. The
        caller must free them.

        Raises:
            TransferError: there is not enough room.
        """
        ...


class StagingArea:
    """Reusable host buffers of one page each; their number is the largest that was in use at a
    time.
    """

    def __init__(self, rows: Tensor) -> None:
        """`rows` is the pool as bytes `[pages, page_bytes]` on its device."""
        self.rows = rows
        on_gpu = rows.device.type == "cuda"
        # torch has no types here
        self.stream = torch.cuda.Stream(rows.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._free: list[Tensor] = []

    def take(self, count: int) -> list[Tensor]:
        missing = count - len(self._free)
        page_bytes = self.rows.shape[1]
        while missing > 0:
            block = min(missing, max(1, _BLOCK_BYTES // page_bytes))
            pinned = torch.empty(
                (block, page_bytes), dtype=torch.uint8, pin_memory=self.stream is not None
            )
            self._free += pinned.unbind()
            missing -= block
        return [self._free.pop() for _ in range(count)]

    def give_back(self, buffers: list[Tensor]) -> None:
        self._free += buffers


class Staged:
    """Pages that are transferred; `views[i]` are the writable bytes of the i-th page.

    The caller must own the pages from before `save` or `restore` until after `free`.
    """

    def __init__(self, pages: Sequence[int], where: Tensor | StagingArea) -> None:
        """`where` is the pool as bytes `[pages, page_bytes]` on the host, or the buffers beside a
        GPU.
        """
        self._pages = pages
        self._area = where if isinstance(where, StagingArea) else None
        self._buffers = (
            [where[page] for page in pages] if isinstance(where, Tensor) else where.take(len(pages))
        )
        self._copied: torch.cuda.Event | None = None
        self.views = [buffer.numpy().data for buffer in self._buffers]

    async def save(self) -> None:
        """Fill the views with the pages."""
        self.begin_save()
        if self._copied is not None:
            await asyncio.to_thread(self.wait)

    async def restore(self, count: int) -> None:
        """Fill the first `count` pages from their views."""
        self.begin_restore(count)
        if self._copied is not None:
            await asyncio.to_thread(self.wait)

    def begin_save(self) -> None:
        self._copy(len(self._pages), to_host=True)

    def begin_restore(self, count: int) -> None:
        self._copy(count, to_host=False)

    def wait(self) -> None:
        """Block this thread until the copies are done."""
        if self._copied is not None:
            self._copied.synchronize()

    def free(self) -> None:
        """Release the views."""
        if self._area is not None:
            self._area.give_back(self._buffers)
            self._buffers = []

    def _copy(self, count: int, *, to_host: bool) -> None:
        if self._area is None or not count:
            return
        rows, stream = self._area.rows, self._area.stream
        if stream is not None:
            # Kernels that fill a page, or used it under its last owner, were launched before.
            stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            for buffer, page in zip(self._buffers[:count], self._pages, strict=False):
                if to_host:
                    buffer.copy_(rows[page], non_blocking=True)
                else:
                    rows[page].copy_(buffer, non_blocking=True)
        if stream is not None:
            # A waiting thread sleeps instead of spinning: the core is the event loop's.
            # torch has no types here
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(stream)
