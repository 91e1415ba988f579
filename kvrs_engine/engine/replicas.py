"""Replicas of other instances' pages in this instance's pool (KevlarFlow's replicas at a peer). A
stream that moves here after a loss finds them in the prefix cache.
"""

from collections.abc import Callable, Sequence

from kvrs.protocol.pages import CheckpointClaim, HeldPages, Identity, Tag
from kvrs_engine.engine.staging import PagePool, StagedPages
from kvrs_engine.scheduling.replicas import ReplicaBook, ReplicaRun


class PeerReplicas:
    """The `PageSink` of an instance. All methods run on its event loop."""

    def __init__(self, book: ReplicaBook, pool: PagePool, released: Callable[[], None]) -> None:
        """`released` is called when written pages have lost their pins."""
        self.book = book
        self._pool, self._released = pool, released

    def adopt(self, client: Identity) -> None:
        """Accept a client; the caller compares the fingerprints."""

    def offer(self, claim: CheckpointClaim, reserved_bytes: int, tags: Sequence[Tag]) -> HeldPages:
        return self.book.offer(claim.stream, tags)

    def begin(
        self, claim: CheckpointClaim, first_page: int, tags: Sequence[Tag]
    ) -> "IncomingPages":
        """Begin to receive a range of pages; raises TransferError if the pool is gone."""
        run = self.book.begin(claim.stream, first_page, tags)
        try:
            staged = self._pool.stage([page for page in run.taken if page is not None])
        except BaseException:
            self.end(run)
            raise
        return IncomingPages(self, run, staged)

    def end(self, run: ReplicaRun) -> HeldPages:
        """End the writing of a range of pages."""
        held = self.book.end(run)
        self._released()
        return held


class IncomingPages:
    """A range of pages that is being received into the pool."""

    def __init__(self, replicas: PeerReplicas, run: ReplicaRun, staged: StagedPages) -> None:
        self._replicas, self._run, self._staged = replicas, run, staged
        views = iter(staged.views)
        self.views = [None if page is None else next(views) for page in run.taken]
        self._right: list[int] = []  # Places in the range of pages whose checksums are right.

    def commit(self, index: int, checksum: int) -> None:
        self._right.append(index)

    async def settle(self) -> None:
        """Write the right pages into the pool; raises TransferError if the pool is gone, or has
        lost cells of the pages.
        """
        await self._staged.restore(len(self._right))
        for index in self._right:
            self._replicas.book.arrived(self._run, index)

    def end(self) -> HeldPages:
        self.views = []
        self._staged.free()
        return self._replicas.end(self._run)
