"""What the page server may read of this engine: full pages by tag, and the partial page of a retained hand-off."""

from collections.abc import Callable

from kvrs.engine.kv_pool import KvPool
from kvrs.engine.staging import Staged
from kvrs.scheduling.pages import PageManager
from kvrs.transfer.peers import PinnedPages, PullRequest


class EnginePages:
    """A `PageSource` over the engine's own pool. Called on the event loop, like everything that touches pages."""

    def __init__(self, pages: PageManager, pool: KvPool, released: Callable[[], None]) -> None:
        self._pages = pages
        self._pool = pool
        self._released = released  # A sequence may be waiting for just the pages that were being sent.

    def pin(self, request: PullRequest) -> PinnedPages:
        """Hard-pin the longest leading run of the asked pages that is held, and the tail only behind a whole run."""
        held = self._pages.match(request.tags)
        tail = None
        if request.handoff is not None and request.tail_index is not None and len(held) == len(request.tags):
            tail = self._pages.retained_page(request.handoff, request.tail_index)
        pinned = list(held)
        if tail is not None:
            self._pages.pin(tail)
            pinned.append(tail)
        try:
            staged = self._pool.stage(pinned)
            # A source answers at once, so beside a GPU the loop stands still while the pages are copied: 20 ms for a gigabyte.
            staged.begin_save()
            staged.wait()
        except BaseException:
            # The driver may have no host memory left to pin. The connection ends; the pages must not stay with it.
            self._pages.release(pinned)
            raise
        return PinnedPages(
            pages=staged.views[: len(held)], tail=None if tail is None else staged.views[-1], token=(pinned, staged)
        )

    def unpin(self, pinned: PinnedPages) -> None:
        assert isinstance(pinned.token, tuple)
        pages, staged = pinned.token
        assert isinstance(staged, Staged)
        staged.free()
        self._pages.release(pages)
        self._released()
