"""Checkpoints of the pages of one engine, which the batch loop fills and agents keep.

The batch loop never waits for this. Its cost to a stream: of the pages that are lent to be sent,
some may have no other owner any more, and a sequence that needs one of those waits until it has
been sent.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice

from kvrs.config.backup import BackupSettings
from kvrs.engine.hooks import StepHook
from kvrs.engine.requests import GenerationRun
from kvrs.engine.staging import PagePool, StagedPages
from kvrs.ids import InstanceId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.scheduling.pages import PageManager
from kvrs.transfer.checkpoint_backlog import CheckpointBacklog, CheckpointDelivery
from kvrs.transfer.checkpoint_sender import CheckpointSender, DueRange, Pusher
from kvrs.transfer.peers import Peer


class Checkpointer(StepHook):
    """One per instance. All methods run on the event loop; those that the batch loop calls return
    at once.
    """

    def __init__(
        self,
        pages: PageManager,
        pool: PagePool,
        pusher: Pusher,
        agents: Mapping[InstanceId, Peer],
        settings: BackupSettings,
        *,
        clock: Callable[[], float],
        released: Callable[[], None],
    ) -> None:
        self._pages = pages
        self._pool = pool
        self._clock = clock
        self._released = released  # A sequence may be waiting for the pages that were being sent.
        self._backlog = CheckpointBacklog(pages.page_size_tokens)
        # At most a quarter of a small pool is lent.
        most = min(settings.staging_pages, max(1, pages.pages // 4))
        self._sender = CheckpointSender(self._backlog, self, pusher, agents, settings, most, clock)
        self.learn, self.run, self.check = self._sender.learn, self._sender.run, self._sender.check

    @property
    def pinned_pages(self) -> int:
        return self._sender.lent_pages

    # What the batch loop calls.

    def began(self, run: GenerationRun) -> None:
        """The run is accepted: send its pages to its agents from now on. Agents that are not
        configured are left out.
        """
        # The proxy may have estimated the length of a text; here it is known.
        full_pages = (run.sequence.prompt_tokens + run.max_tokens) // self._pages.page_size_tokens
        need_bytes = full_pages * self._pool.geometry.page_bytes
        checkpoints = [
            CheckpointTarget(checkpoint.agent, max(checkpoint.reserved_bytes, need_bytes))
            for checkpoint in run.checkpoints
            if checkpoint.agent in self._sender.agents
        ]
        # A prefill instance that hands a history over sends the history's pages itself.
        handed_over = any(source.handoff is not None for source in run.sources)
        self._backlog.follow(run.sequence, checkpoints, handed_over=handed_over)

    def filled(self, run: GenerationRun) -> None:
        self._sender.wake(self._backlog.filled(run.sequence, self._clock()))

    def held(self, run: GenerationRun) -> Mapping[InstanceId, int]:
        return self._backlog.held(run.sequence)

    def ended(self, run: GenerationRun) -> None:
        """Nothing more is computed. Pages of a prefill are still sent, because its stream has only
        begun.
        """
        sequence = run.sequence
        whole = sequence.prefill_only and sequence.computed_tokens >= sequence.history_tokens
        if whole:
            # Where all full pages were found in the prefix cache, no batch has filled one.
            self.filled(run)
        self._backlog.ended(sequence, send_rest=whole)

    @property
    def lag_pages(self) -> int:
        """Full pages that agents would store and do not have yet."""
        return self._backlog.lag_pages

    @property
    def unprotected(self) -> int:
        """How many streams have no agent that stores their pages."""
        return self._backlog.unprotected

    # What the sender calls.

    def is_over(self, delivery: CheckpointDelivery) -> bool:
        """A stream is over when its hand-off is not retained any more."""
        return not self._pages.retained_tokens(delivery.claim.stream)

    @asynccontextmanager
    async def lend(self, ranges: Sequence[DueRange]) -> AsyncIterator[list[list[memoryview]]]:
        """Pages that the prefix cache still has, pinned."""
        found = [self._pages.match(delivery.tags(first, end)) for delivery, first, end in ranges]
        pinned = [page for pages in found for page in pages]
        staged: StagedPages | None = None
        try:
            staged = self._pool.stage(pinned)
            await staged.save()
            views = iter(staged.views)
            yield [list(islice(views, len(pages))) for pages in found]
        finally:
            if staged is not None:
                staged.free()
            self._pages.release(pinned)
            self._released()
