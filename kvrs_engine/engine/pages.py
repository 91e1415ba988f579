"""The pages that the page server may send: full pages by tag, and the partial page of a retained
hand-off.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from kvrs.protocol.geometry import KvGeometry
from kvrs.transfer.peers import PagePlace, PinnedPages, PullRequest
from kvrs_engine.engine.staging import PagePool
from kvrs_engine.scheduling.pages import PageManager


class EnginePages:
    """The pages of an engine's own pool. Methods run on the event loop, like all use of pages."""

    def __init__(
        self,
        pages: PageManager,
        pool: PagePool,
        released: Callable[[], None],
        place: PagePlace | None = None,
    ) -> None:
        """`place` is the place of the first page, if all pages are in shared memory."""
        self._pages, self._place = pages, place
        self._pool = pool
        self._released = released  # A sequence may be waiting for sent pages.

    @asynccontextmanager
    async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
        """Hard-pin the longest held prefix of the requested pages, and the tail."""
        held = self._pages.match(request.tags)
        tail, tail_tokens = None, 0
        if request.handoff is not None and request.tail_index is not None:
            tail = self._pages.retained_page(request.handoff, request.tail_index)
            before = request.tail_index * self._pool.geometry.page_size_tokens
            tail_tokens = self._pages.retained_tokens(request.handoff) - before
        pages = list(held)
        if tail is not None:
            self._pages.pin(tail)
            pages.append(tail)
        try:
            staged = self._pool.stage(pages)
            try:
                await staged.save()
                if tail is not None:
                    _clear_behind(staged.views[-1], self._pool.geometry, tail_tokens)
                found = PinnedPages(
                    staged.views[: len(held)], None if tail is None else staged.views[-1]
                )
                if self._place is not None:
                    region, first = self._place
                    offsets = [first + page * self._pool.geometry.page_bytes for page in held]
                    found = replace(found, region=region, offsets=offsets)
                yield found
            finally:
                staged.free()
        finally:
            self._pages.release(pages)
            self._released()


def _clear_behind(page: memoryview, geometry: KvGeometry, tokens: int) -> None:
    """Zero a partial page after its tokens, so that no data of another request, perhaps of another
    tenant, is sent.
    """
    bytes_per_head = geometry.head_dim * geometry.dtype_bytes
    positions = np.frombuffer(page, np.uint8).reshape(-1, geometry.page_size_tokens, bytes_per_head)
    positions[:, max(0, tokens) :] = 0
