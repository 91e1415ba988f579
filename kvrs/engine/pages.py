"""What the page server may read of this engine: full pages by tag, and the partial page of a retained hand-off."""

from collections.abc import Callable

from kvrs.engine.kv_pool import KvPool
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
        for page in pinned:
            self._pool.load(page)
        return PinnedPages(
            pages=[self._pool.view(page) for page in held],
            tail=None if tail is None else self._pool.view(tail),
            token=pinned,
        )

    def unpin(self, pinned: PinnedPages) -> None:
        assert isinstance(pinned.token, list)
        self._pages.release(pinned.token)
        self._released()
