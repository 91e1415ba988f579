"""Checkpoints of an engine's pages: pages are sent to agents as the batch loop fills them.

The batch loop does not wait for the sending. A sequence may wait for a page that is still being
sent and has no other owner any more.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice

from kvrs.config.backup import BackupSettings
from kvrs.ids import InstanceId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.transfer.checkpoint_backlog import RETRY_MOST_S, CheckpointDelivery
from kvrs.transfer.checkpoint_sender import CheckpointSender, DueRange, PagePusher
from kvrs.transfer.peers import HeldPages, Peer, StoredPages
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.engine.staging import PagePool
from kvrs_engine.scheduling.pages import PageManager


class PageSending(CheckpointSender, StepHook):
    """Sends the pages of streams as they are filled. Methods run on the event loop; those that the
    batch loop calls return at once.
    """

    def __init__(
        self,
        pages: PageManager,
        holders: Mapping[InstanceId, Peer],
        settings: BackupSettings,
        clock: Callable[[], float],
        released: Callable[[], None],
        retry_most_s: float = RETRY_MOST_S,
    ) -> None:
        """`released` is called when sent pages have lost their pins; a sequence may wait for
        them.
        """
        # Pin at most a quarter of a small pool.
        most = min(settings.staging_pages, max(1, pages.pages // 4))
        super().__init__(pages.page_size_tokens, holders, settings, most, clock, retry_most_s)
        self.pages = pages
        self._released = released

    @property
    def lag_pages(self) -> int:
        """Number of full pages that holders are to store and do not have yet."""
        return self.backlog.lag_pages

    @property
    def unprotected(self) -> int:
        """Number of streams without a holder that stores their pages."""
        return self.backlog.unprotected

    def filled(self, run: GenerationRun) -> None:
        self.wake(self.backlog.filled(run.sequence, self.clock()))

    def ended(self, run: GenerationRun) -> None:
        """Handle the end of a run. Pages of a prefill are still sent, because its stream goes
        on.
        """
        sequence = run.sequence
        whole = sequence.is_whole_prefill
        if whole:
            # If all full pages came from the prefix cache, no batch has reported them.
            self.filled(run)
        self.backlog.ended(sequence, send_rest=whole)

    def is_over(self, delivery: CheckpointDelivery) -> bool:
        """Return whether a stream's hand-off is no longer retained."""
        return not self.pages.retained_tokens(delivery.claim.stream)

    @asynccontextmanager
    async def pinned(self, ranges: Sequence[DueRange]) -> AsyncIterator[list[list[int]]]:
        """Pin and return the leading pages of each range that the prefix cache still has."""
        found = [self.pages.match(delivery.tags(first, end)) for delivery, first, end in ranges]
        try:
            yield found
        finally:
            self.pages.release([page for pages in found for page in pages])
            self._released()


class Checkpointer(PageSending):
    """Sends pages to agents, or to the pools of other instances; one object per instance."""

    def __init__(
        self,
        pages: PageManager,
        pool: PagePool,
        pusher: PagePusher,
        agents: Mapping[InstanceId, Peer],
        settings: BackupSettings,
        *,
        clock: Callable[[], float],
        released: Callable[[], None],
    ) -> None:
        super().__init__(pages, agents, settings, clock, released)
        self._pool, self._pusher = pool, pusher

    # Called by the batch loop.

    def began(self, run: GenerationRun) -> None:
        """Begin to send an accepted run's pages to its agents, except unknown ones."""
        # The proxy may have guessed the length of a text prompt; here it is known.
        full_pages = (run.sequence.prompt_tokens + run.max_tokens) // self.pages.page_size_tokens
        need_bytes = full_pages * self._pool.geometry.page_bytes
        checkpoints = [
            CheckpointTarget(checkpoint.agent, max(checkpoint.reserved_bytes, need_bytes))
            for checkpoint in run.checkpoints
            if checkpoint.agent in self.agents
        ]
        # The prefill instance of a hand-off sends the history's pages itself.
        handed_over = any(source.handoff is not None for source in run.sources)
        self.backlog.follow(run.sequence, checkpoints, handed_over=handed_over)

    def held(self, run: GenerationRun) -> Mapping[InstanceId, int]:
        return self.backlog.held(run.sequence)

    # Called by the sender.

    async def offer(self, agent: Peer, delivery: CheckpointDelivery) -> HeldPages:
        return await self._pusher.offer(
            agent, delivery.claim, delivery.reserved_bytes, delivery.known_tags
        )

    async def send(
        self, agent: Peer, ranges: Sequence[DueRange]
    ) -> list[tuple[int, HeldPages] | None]:
        async with self.pinned(ranges) as found:
            staged = self._pool.stage([page for pages in found for page in pages])
            try:
                await staged.save()
                views = iter(staged.views)
                batch = [
                    StoredPages(
                        delivery.claim,
                        first,
                        delivery.tags(first, first + len(pages)),
                        [*islice(views, len(pages))],
                    )
                    for (delivery, first, _), pages in zip(ranges, found, strict=True)
                    if pages
                ]
                answers = iter(await self._pusher.store(agent, batch) if batch else ())
                return [(len(pages), next(answers)) if pages else None for pages in found]
            finally:
                staged.free()
