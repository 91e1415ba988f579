"""Checkpoints of the pages of one engine, which the batch loop fills and agents keep.

The batch loop never waits for this. Its cost to a stream: of the pages that are lent to be sent,
some may have no other owner any more, and a sequence that needs one of those waits until it has
been sent.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice

from kvrs.config.backup import BackupSettings
from kvrs.ids import InstanceId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.transfer.checkpoint_backlog import RETRY_MOST_S, CheckpointDelivery
from kvrs.transfer.checkpoint_sender import CheckpointSender, DueRange
from kvrs.transfer.peers import HeldPages, Peer, StoredPages
from kvrs.transfer.pusher import PagePusher
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.engine.staging import PagePool
from kvrs_engine.scheduling.pages import PageManager


class PageSending(CheckpointSender, StepHook):
    """Sends the pages of streams away as they are filled. All methods run on the event loop; those
    that the batch loop calls return at once.
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
        """`released`: called when pages that were being sent have lost their pins: a sequence may
        be waiting for them.
        """
        # At most a quarter of a small pool is lent.
        most = min(settings.staging_pages, max(1, pages.pages // 4))
        super().__init__(pages.page_size_tokens, holders, settings, most, clock, retry_most_s)
        self.pages = pages
        self._released = released

    @property
    def lag_pages(self) -> int:
        """Full pages that holders would store and do not have yet."""
        return self.backlog.lag_pages

    @property
    def unprotected(self) -> int:
        """How many streams have no holder that stores their pages."""
        return self.backlog.unprotected

    def filled(self, run: GenerationRun) -> None:
        self.wake(self.backlog.filled(run.sequence, self.clock()))

    def ended(self, run: GenerationRun) -> None:
        """Nothing more is computed. Pages of a prefill are still sent, because its stream has only
        begun.
        """
        sequence = run.sequence
        whole = sequence.is_whole_prefill
        if whole:
            # Where all full pages were found in the prefix cache, no batch has filled one.
            self.filled(run)
        self.backlog.ended(sequence, send_rest=whole)

    def is_over(self, delivery: CheckpointDelivery) -> bool:
        """A stream is over when its hand-off is not retained any more."""
        return not self.pages.retained_tokens(delivery.claim.stream)

    @asynccontextmanager
    async def pinned(self, ranges: Sequence[DueRange]) -> AsyncIterator[list[list[int]]]:
        """The leading pages of each range that the prefix cache still has."""
        found = [self.pages.match(delivery.tags(first, end)) for delivery, first, end in ranges]
        try:
            yield found
        finally:
            self.pages.release([page for pages in found for page in pages])
            self._released()


class Checkpointer(PageSending):
    """To agents, or to the pools of other instances. One per instance."""

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

    # What the batch loop calls.

    def began(self, run: GenerationRun) -> None:
        """The run is accepted: send its pages to its agents from now on. Agents that are not
        configured are left out.
        """
        # The proxy may have estimated the length of a text; here it is known.
        full_pages = (run.sequence.prompt_tokens + run.max_tokens) // self.pages.page_size_tokens
        need_bytes = full_pages * self._pool.geometry.page_bytes
        checkpoints = [
            CheckpointTarget(checkpoint.agent, max(checkpoint.reserved_bytes, need_bytes))
            for checkpoint in run.checkpoints
            if checkpoint.agent in self.agents
        ]
        # A prefill instance that hands a history over sends the history's pages itself.
        handed_over = any(source.handoff is not None for source in run.sources)
        self.backlog.follow(run.sequence, checkpoints, handed_over=handed_over)

    def held(self, run: GenerationRun) -> Mapping[InstanceId, int]:
        return self.backlog.held(run.sequence)

    # What the sender calls.

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
