"""Sending of newly filled pages to the agents that keep checkpoints, in the background.

The batch loop never waits for this. Its cost to a stream: of the pages that it pins, at most
`backup.staging_pages` at a time, some may have no other owner any more, and a sequence that needs
one of those waits until an agent has stored it, or has stalled for `transfer.stall_timeout_s`. That
includes the time in which checkpoints wait for hand-offs and recoveries to the same node.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from kvrs.config.backup import BackupSettings
from kvrs.engine.hooks import StepHook
from kvrs.engine.requests import GenerationRun
from kvrs.engine.staging import PagePool, StagedPages
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.tags import Tag
from kvrs.scheduling.checkpoint_backlog import (
    RETRY_MOST_S,
    RETRY_S,
    CheckpointBacklog,
    CheckpointDelivery,
)
from kvrs.scheduling.pages import PageManager
from kvrs.transfer.peers import CheckpointClaim, HeldPages, Peer, StoredPages

log = logging.getLogger(__name__)

_MAX_RANGES = 1024  # Of one batch: a STORE stays far below the largest frame.


class Pusher(Protocol):
    """`kvrs.transfer.pusher.PagePusher`. Both raise TransferError."""

    async def offer(
        self, peer: Peer, claim: CheckpointClaim, reserved_bytes: int, tags: Sequence[Tag]
    ) -> HeldPages: ...

    async def store(self, peer: Peer, batch: Sequence[StoredPages]) -> list[HeldPages]: ...


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
        self._pusher = pusher
        self._agents = dict(agents)
        self._senders: asyncio.TaskGroup | None = None
        self._settings = settings
        self._clock = clock
        self._released = released  # A sequence may be waiting for the pages that were being sent.
        # At most a quarter of a small pool is pinned.
        self._staging_pages = min(settings.staging_pages, max(1, pages.pages // 4))
        self._backlog = CheckpointBacklog(pages.page_size_tokens)
        self._wakes = {agent: asyncio.Event() for agent in agents}
        self._room = asyncio.Event()
        self.pinned_pages = 0

    def learn(self, agents: Mapping[InstanceId, Peer]) -> None:
        """Send to further agents, or to those that are known at another address."""
        known, self._agents = self._agents, {**self._agents, **agents}
        for agent in agents.keys() - known.keys():
            self._wakes[agent] = asyncio.Event()
            if self._senders is not None:
                self._senders.create_task(self._serve(agent))

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
            if checkpoint.agent in self._agents
        ]
        # A prefill instance that hands a history over sends the history's pages itself.
        handed_over = any(source.handoff is not None for source in run.sources)
        self._backlog.follow(run.sequence, checkpoints, handed_over=handed_over)

    def filled(self, run: GenerationRun) -> None:
        for agent in self._backlog.filled(run.sequence, self._clock()):
            self._wakes[agent].set()

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

    def check(self) -> None:
        """Assert that the backlog is consistent, and that at most the allowed pages are pinned."""
        self._backlog.check()
        assert 0 <= self.pinned_pages <= self._staging_pages

    # The background.

    async def run(self) -> None:
        """Serve all agents until cancelled, each by a task of its own: one that stalls delays no
        other.
        """
        async with asyncio.TaskGroup() as self._senders:
            for agent in self._agents:
                self._senders.create_task(self._serve(agent))
            await asyncio.get_running_loop().create_future()

    async def _serve(self, agent: InstanceId) -> None:
        pause_s, more = RETRY_S, False
        while True:
            await self._due(agent)
            if not more:
                await asyncio.sleep(self._settings.gather_s)
            try:
                sent, more = await self._round(self._agents[agent])
            except TransferError as error:
                log.info("checkpoints wait for %s: %s", agent, error)
                self._backlog.lost(agent)
                more = False
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
            else:
                # An answer to an offer alone does not prove that pages get through.
                pause_s = RETRY_S if sent else pause_s

    async def _due(self, agent: InstanceId) -> None:
        """Wait until there is something to do for that agent."""
        wake = self._wakes[agent]
        while (due_in_s := self._backlog.due_in_s(agent, self._clock())) != 0:
            wake.clear()
            timer = (
                asyncio.get_running_loop().call_later(due_in_s, wake.set)
                if due_in_s is not None
                else None
            )
            await wake.wait()
            if timer is not None:
                timer.cancel()

    async def _round(self, peer: Peer) -> tuple[int, bool]:
        """Make what offers are due, then send one batch. Returns how many pages were sent, and
        whether there were more.
        """
        agent = peer.instance
        for delivery in self._backlog.endings(agent):
            # Its stream is over when the hand-off is not retained any more.
            if not self._pages.retained_tokens(delivery.claim.stream):
                self._backlog.drop(delivery)
        for delivery in self._backlog.offers(agent, self._clock()):
            held = await self._pusher.offer(
                peer, delivery.claim, delivery.reserved_bytes, delivery.known_tags
            )
            self._backlog.offered(delivery, held, self._clock())
        budget = await self._budget()
        ranges = self._pin(agent, budget)
        if not ranges:
            return 0, False
        pinned = [page for _, _, pages in ranges for page in pages]
        self.pinned_pages += len(pinned)
        staged: StagedPages | None = None
        try:
            staged = self._pool.stage(pinned)
            await staged.save()
            views = iter(staged.views)
            batch = [
                StoredPages(
                    delivery.claim,
                    first,
                    delivery.tags(first, first + len(pages)),
                    list(islice(views, len(pages))),
                )
                for delivery, first, pages in ranges
            ]
            answers = await self._pusher.store(peer, batch)
        finally:
            if staged is not None:
                staged.free()
            self._pages.release(pinned)
            self.pinned_pages -= len(pinned)
            self._room.set()
            self._released()
        now_s = self._clock()
        for (delivery, first, _), held in zip(ranges, answers, strict=True):
            self._backlog.stored(delivery, first, held, now_s)
        return len(pinned), len(pinned) == budget

    async def _budget(self) -> int:
        """How many pages may be pinned for one agent: an equal share, so that a stalled one leaves
        room for the others.
        """
        while self.pinned_pages == self._staging_pages:
            self._room.clear()
            await self._room.wait()
        share = max(1, self._staging_pages // max(1, self._backlog.busy_holders))
        return min(share, self._staging_pages - self.pinned_pages)

    def _pin(
        self, agent: InstanceId, budget: int
    ) -> list[tuple[CheckpointDelivery, int, list[int]]]:
        """Deliveries with their next page's index and the pages, pinned."""
        ranges = []
        for delivery, first, end in islice(
            self._backlog.ranges(agent, self._clock(), budget), _MAX_RANGES
        ):
            pages = self._pages.match(delivery.tags(first, end))
            if pages:
                ranges.append((delivery, first, pages))
            else:
                self._backlog.missed(delivery)
        return ranges
