"""The pages that the page server may read: full pages by tag, and the partial page of a retained
hand-off.
"""

from collections.abc import Callable

from kvrs.engine.staging import PagePool
from kvrs.scheduling.pages import PageManager
from kvrs.transfer.peers import PinnedPages, PullRequest


class EnginePages:
    """A `PageSource` over the engine's own pool. Called on the event loop, like everything that
    touches pages.
    """

    def __init__(self, pages: PageManager, pool: PagePool, released: Callable[[], None]) -> None:
        self._pages = pages
        self._pool = pool
        self._released = released  # A sequence may be waiting for the pages that were being sent.

    async def pin(self, request: PullRequest) -> PinnedPages:
        """Hard-pin the longest held prefix of the requested pages, and the tail only behind all of
        them.
        """
        held = self._pages.match(request.tags)
        tail = None
        if (
            request.handoff is not None
            and request.tail_index is not None
            and len(held) == len(request.tags)
        ):
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
            # No host memory is left, the pages' worker died, or the server was closed.
            self._release(pinned)
            raise
        return PinnedPages(
            pages=staged.views[: len(held)],
            tail=None if tail is None else staged.views[-1],
            token=(pinned, staged),
        )

    def unpin(self, pinned: PinnedPages) -> None:
        assert isinstance(pinned.token, tuple)
        pages, staged = pinned.token
        staged.free()
        self._release(pages)

    def _release(self, pages: list[int]) -> None:
        self._pages.release(pages)
        self._released()
