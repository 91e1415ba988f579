"""The pages of a stage as one pool over all its ranks: the counterpart of
`kvrs_engine.engine.kv_pool.KvPool`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from ray.exceptions import RayActorError

from distserve_patches.staging import SEGMENT_BYTES, StagingSlots
from kvrs.errors import TransferError
from kvrs.protocol.geometry import KvGeometry

if TYPE_CHECKING:
    from distserve_patches.blocks import PagedBlockManager

# Calls a method of every worker of the stage.
CallWorkers = Callable[..., Sequence[Awaitable[object]]]


def geometry_of(model_config: Any, cache_config: Any) -> KvGeometry:
    """The geometry of the whole model, by upstream's configuration."""
    return KvGeometry(
        layers=model_config.get_num_layers(),
        kv_heads=model_config.get_num_heads(),
        head_dim=model_config.get_head_size(),
        dtype_bytes=model_config.get_dtype_size(),
        page_size_tokens=cache_config.block_size,
    )


class StagePool:
    """The pool of one generation of a stage. All calls come on the event loop."""

    def __init__(
        self,
        geometry: KvGeometry,
        call_workers: CallWorkers,
        swapped_out: Callable[[], Awaitable[None]],
        max_pages: int,
    ) -> None:
        """Create a pool that stages at most `max_pages` at a time. Their host memory is kept for
        reuse.
        """
        self.geometry = geometry
        self.slots = StagingSlots(geometry.page_bytes, max_pages)
        self._call_workers = call_workers
        self._swapped_out = swapped_out
        # Pieces keep a long transfer from delaying a short one.
        self._pages_per_call = max(1, SEGMENT_BYTES // geometry.page_bytes)
        # Pages to export together, and the call that will export them.
        self._asked: list[tuple[Sequence[int], Sequence[int]]] = []
        self._exporting: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, blocks: "PagedBlockManager") -> Self:
        """Create a pool that can stage all blocks of the stage, which suffices unless many peers
        request the same blocks.
        """
        geometry = geometry_of(blocks.model_config, blocks.cache_config)
        return cls(
            geometry,
            blocks.engine_remote_call_all_workers_async,
            blocks.swapped_out,
            blocks.pages.pages,
        )

    def stage(self, pages: Sequence[int]) -> "StagedShards":
        """Reserve host memory for pages, to send after `save` or to receive before `restore`.

        Raises:
            TransferError: not enough room.
        """
        return StagedShards(self, pages)

    def close(self) -> None:
        """Stage no more pages: the stage is dead, or the server ends."""
        self.slots.close()

    async def export_pages(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Export pages, together with all exports of this moment: a call costs the workers and the
        server far more than the pages, and checkpoints go to two agents at a time.
        """
        self._asked.append((slots, pages))
        if self._exporting is None:
            self._exporting = asyncio.create_task(self._export())
        await self._exporting

    async def _export(self) -> None:
        await asyncio.sleep(0)
        asked, self._asked, self._exporting = self._asked, [], None
        slots, pages = (list(chain.from_iterable(each)) for each in zip(*asked, strict=True))
        await self._in_pieces("export_pages", slots, pages)

    async def import_pages(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        await self._in_pieces("import_pages", slots, pages)

    async def _in_pieces(self, method: str, slots: Sequence[int], pages: Sequence[int]) -> None:
        try:
            if method == "import_pages":
                await self._swapped_out()
            for first in range(0, len(pages), self._pages_per_call):
                if self.slots.closed:
                    # The workers are those of the next generation, with other pages.
                    raise TransferError("the stage that had the pages is gone")
                piece = slice(first, first + self._pages_per_call)
                calls = self._call_workers(method, self.slots.file, slots[piece], pages[piece])
                # Wait for all calls, also after a failure: others may still write into the memory.
                results = await asyncio.gather(*calls, return_exceptions=True)
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
        except RayActorError as error:
            raise TransferError(f"a worker died that has part of the pages: {error}") from error


class StagedShards:
    """A `kvrs_engine.engine.staging.StagedPages`."""

    def __init__(self, pool: StagePool, pages: Sequence[int]) -> None:
        self._pool = pool
        self._pages = list(pages)
        self._slots = pool.slots.take(len(self._pages))
        self.views = [pool.slots.view(slot) for slot in self._slots]

    async def save(self) -> None:
        await _to_the_end(self._pool.export_pages(self._slots, self._pages))

    async def restore(self, count: int) -> None:
        await _to_the_end(self._pool.import_pages(self._slots[:count], self._pages[:count]))

    def free(self) -> None:
        self.views = []
        self._pool.slots.give_back(self._slots)
        self._slots = []


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work to its end, also when cancelled: neither slots nor pages may get another owner
    while workers copy.
    """
    working = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait({working})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not working.cancelled():
            working.exception()  # A retrieved exception is not reported by asyncio.
        raise cancelled
    await working
