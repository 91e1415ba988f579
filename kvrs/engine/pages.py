"""What the page server may read of this engine: full pages by tag, and the partial page of a retained hand-off."""

from collections.abc import Callable

from kvrs.engine.staging import PagePool
from kvrs.scheduling.pages import PageManager
from kvrs.transfer.peers import PinnedPages, PullRequest


class EnginePages:
    """A `PageSource` over the engine's own pool. Called on the event loop, like everything that touches pages."""

    def __init__(self, pages: PageManager, pool: PagePool, released: Callable[[], None]) -> None:
        self._pages = pages
        self._pool = pool
        self._released = released  # A sequence may be waiting for just the pages that were being sent.

    async def pin(self, request: PullRequest) -> PinnedPages:
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
            try:
                await staged.save()
            except BaseException:
                staged.free()
                raise
        except BaseException:
            # There may be no host memory left, the pages' worker may die, or the server may be closed.
            self._let_go(pinned)
            raise
        return PinnedPages(
            pages=staged.views[: len(held)], tail=None if tail is None else staged.views[-1], token=(pinned, staged)
        )

    def unpin(self, pinned: PinnedPages) -> None:
        assert isinstance(pinned.token, tuple)
        pages, staged = pinned.token
        staged.free()
        self._let_go(pages)

    def _let_go(self, pages: list[int]) -> None:
        self._pages.release(pages)
        self._released()
