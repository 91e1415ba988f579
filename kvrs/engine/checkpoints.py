"""Brings newly filled pages to the agents that keep checkpoints, behind the streams' back.

Nothing in the batch loop waits for this. What it may cost a stream that is served: of the pages that it pins, at most
`backup.staging_pages` at a time, some may have no other owner any more, and a sequence that needs one of those waits until an
agent has taken it, or has stalled for `transfer.stall_timeout_s`. Checkpoints that wait behind hand-offs and recoveries on the
way to the same node are waited for, too.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from kvrs.agent.config import BackupSettings
from kvrs.engine.requests import Run
from kvrs.engine.staging import PagePool, StagedPages
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Checkpoint
from kvrs.protocol.tags import Tag
from kvrs.scheduling import sequences
from kvrs.scheduling.backlog import Backlog, Delivery
from kvrs.scheduling.pages import PageManager
from kvrs.transfer.peers import Claim, Held, Peer, StoredPages

log = logging.getLogger(__name__)

# An agent that does not answer is tried again after this long, doubling.
RETRY_S = 0.5
RETRY_MOST_S = 5.0

_MAX_RUNS = 1024  # Of one batch: a question to an agent stays far below the largest frame.


class Pusher(Protocol):
    """`kvrs.transfer.pusher.PagePusher`. Both raise TransferError."""

    async def offer(self, peer: Peer, claim: Claim, reserved_bytes: int, tags: Sequence[Tag]) -> Held: ...

    async def store(self, peer: Peer, batch: Sequence[StoredPages]) -> list[Held]: ...


class Checkpointer:
    """One per instance. All methods run on the event loop; those that the batch loop calls return at once."""

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
        self._agents = agents
        self._settings = settings
        self._clock = clock
        self._released = released  # A sequence may be waiting for just the pages that were being sent.
        # A pool that is small for its staging shall not be held up by it.
        self._staging_pages = min(settings.staging_pages, max(1, pages.pages // 4))
        self._backlog = Backlog(pages.page_size_tokens)
        self._wakes = {agent: asyncio.Event() for agent in agents}
        self._room = asyncio.Event()
        self.pinned_pages = 0

    # What the batch loop calls.

    def began(self, run: Run) -> None:
        """The run is accepted: from now on its pages go to its agents. Those that are not configured are left out."""
        # Who placed them may have guessed how long a text is; here it is known.
        full_pages = (run.sequence.prompt_tokens + run.max_tokens) // self._pages.page_size_tokens
        need_bytes = full_pages * self._pool.geometry.page_bytes
        checkpoints = [
            Checkpoint(checkpoint.agent, max(checkpoint.reserved_bytes, need_bytes))
            for checkpoint in run.checkpoints
            if checkpoint.agent in self._agents
        ]
        # Who hands a history over sends the history's pages itself.
        handed_over = any(source.handoff is not None for source in run.sources)
        self._backlog.follow(run.sequence, checkpoints, handed_over=handed_over)

    def filled(self, sequence: sequences.Sequence) -> None:
        """After a batch, or an arrival, that left the sequence with more full pages that are computed without a gap."""
        for agent in self._backlog.filled(sequence, self._clock()):
            self._wakes[agent].set()

    def ended(self, sequence: sequences.Sequence) -> None:
        """Nothing more is computed. What a prefill has computed goes on being sent: its stream has only begun."""
        whole = sequence.prefill_only and sequence.computed_tokens >= sequence.history_tokens
        if whole:
            # Where all full pages were found in the prefix cache, no batch has filled one.
            self.filled(sequence)
        self._backlog.ended(sequence, send_rest=whole)

    @property
    def lag_pages(self) -> int:
        """Full pages of streams that their agents would take and do not have yet."""
        return self._backlog.lag_pages

    @property
    def unprotected(self) -> int:
        """How many streams no agent takes pages of."""
        return self._backlog.unprotected

    def check(self) -> None:
        """Assert that the books agree, and that nothing is pinned beyond what is allowed."""
        self._backlog.check()
        assert 0 <= self.pinned_pages <= self._staging_pages

    # The background.

    async def run(self) -> None:
        """Serve all agents until cancelled, each at its own pace: one that stalls holds up no other."""
        async with asyncio.TaskGroup() as couriers:
            for peer in self._agents.values():
                couriers.create_task(self._serve(peer))
            await asyncio.get_running_loop().create_future()

    async def _serve(self, peer: Peer) -> None:
        pause_s, more = RETRY_S, False
        while True:
            await self._due(peer.instance)
            if not more:
                await asyncio.sleep(self._settings.gather_s)
            try:
                sent, more = await self._round(peer)
            except TransferError as error:
                log.info("checkpoints wait for %s: %s", peer.instance, error)
                self._backlog.lost(peer.instance)
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
            timer = asyncio.get_running_loop().call_later(due_in_s, wake.set) if due_in_s is not None else None
            await wake.wait()
            if timer is not None:
                timer.cancel()

    async def _round(self, peer: Peer) -> tuple[int, bool]:
        """Make what offers are due, then send one batch. Returns how many pages were sent, and whether there were more."""
        agent = peer.instance
        for delivery in self._backlog.endings(agent):
            # Its stream is over when the hand-off is not retained any more.
            if not self._pages.retained_tokens(delivery.claim.stream):
                self._backlog.drop(delivery)
        for delivery in self._backlog.offers(agent, self._clock()):
            held = await self._pusher.offer(peer, delivery.claim, delivery.reserved_bytes, delivery.known_tags)
            self._backlog.offered(delivery, held, self._clock())
        budget = await self._budget()
        runs = self._pin(agent, budget)
        if not runs:
            return 0, False
        pinned = [page for _, _, pages in runs for page in pages]
        self.pinned_pages += len(pinned)
        staged: StagedPages | None = None
        try:
            staged = self._pool.stage(pinned)
            await staged.save()
            views = iter(staged.views)
            batch = [
                StoredPages(delivery.claim, first, delivery.tags(first, first + len(pages)), list(islice(views, len(pages))))
                for delivery, first, pages in runs
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
        for (delivery, first, _), held in zip(runs, answers, strict=True):
            self._backlog.stored(delivery, first, held, now_s)
        return len(pinned), len(pinned) == budget

    async def _budget(self) -> int:
        """How many pages may be pinned for one agent: an equal share, so that one that stalls leaves room for the others."""
        while self.pinned_pages == self._staging_pages:
            self._room.clear()
            await self._room.wait()
        share = max(1, self._staging_pages // max(1, self._backlog.busy_holders))
        return min(share, self._staging_pages - self.pinned_pages)

    def _pin(self, agent: InstanceId, budget: int) -> list[tuple[Delivery, int, list[int]]]:
        """Deliveries with their next page's index and the pages, pinned."""
        runs = []
        for delivery, first, end in islice(self._backlog.runs(agent, self._clock(), budget), _MAX_RUNS):
            pages = self._pages.match(delivery.tags(first, end))
            if pages:
                runs.append((delivery, first, pages))
            else:
                self._backlog.missed(delivery)
        return runs
