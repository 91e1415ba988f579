"""Sender of newly filled pages to agents, in the background.

The engine never waits for the sender. It lends at most `backup.staging_pages` of its pages at a
time, each until an agent has stored it, or has stalled for `transfer.stall_timeout_s`. That
includes waiting for hand-offs and recoveries to the same node.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from kvrs.config.backup import BackupSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.transfer.checkpoint_backlog import (
    RETRY_MOST_S,
    RETRY_S,
    CheckpointBacklog,
    CheckpointDelivery,
)
from kvrs.transfer.peers import HeldPages, Peer

log = logging.getLogger(__name__)

# Time for which filled pages are gathered in one message, and so the lag of a checkpoint.
GATHER_S = 0.05

# A delivery, and first page and end (exclusive) of its next range.
DueRange = tuple[CheckpointDelivery, int, int]


class HolderMovedError(TransferError):
    """Another process now receives the pages meant for a holder, and has had no offers."""


class CheckpointSender(ABC):
    """Sends the pages of one instance to their holders. All methods run on its event loop."""

    def __init__(
        self,
        page_size_tokens: int,
        agents: Mapping[InstanceId, Peer],
        settings: BackupSettings,
        staging_pages: int,
        clock: Callable[[], float],
        retry_most_s: float = RETRY_MOST_S,
    ) -> None:
        """`staging_pages`: most pages that may be lent at a time. `retry_most_s`: longest pause
        before a silent holder is asked again.
        """
        self.lent_pages = 0
        self.backlog = CheckpointBacklog(page_size_tokens)
        self.clock = clock
        self._agents = dict(agents)
        self._settings, self._staging_pages = settings, staging_pages
        self._retry_most_s = retry_most_s
        self._senders: asyncio.TaskGroup | None = None
        self._wakes = {agent: asyncio.Event() for agent in agents}
        self._room = asyncio.Event()

    @abstractmethod
    def is_over(self, delivery: CheckpointDelivery) -> bool:
        """Return whether the stream of this ended sequence no longer needs a checkpoint."""

    @abstractmethod
    async def offer(self, agent: Peer, delivery: CheckpointDelivery) -> HeldPages:
        """Offer a delivery to the agent; return its answer. Raises TransferError: the agent does
        not answer.
        """

    @abstractmethod
    async def send(
        self, agent: Peer, ranges: Sequence[DueRange]
    ) -> list[tuple[int, HeldPages] | None]:
        """Send the leading pages of each range up to the first evicted page; return for each range
        the number of sent pages and the agent's answer, or None if its first page was evicted.

        Raises:
            HolderMovedError: nothing was sent; the offers must be repeated at once.
            TransferError: the pages cannot be read, or the agent does not answer.
        """

    @property
    def agents(self) -> Mapping[InstanceId, Peer]:
        return self._agents

    def learn(self, agents: Mapping[InstanceId, Peer]) -> None:
        """Add agents, or update their addresses."""
        known, self._agents = self._agents, {**self._agents, **agents}
        for agent in agents.keys() - known.keys():
            self._wakes[agent] = asyncio.Event()
            if self._senders is not None:
                self._senders.create_task(self.serve(agent))

    def wake(self, agents: Sequence[InstanceId]) -> None:
        """Wake the tasks of these agents: something is to be sent."""
        for agent in agents:
            self._wakes[agent].set()

    def check(self) -> None:
        """Assert that the backlog is consistent, and that at most the allowed pages are lent."""
        self.backlog.check()
        assert 0 <= self.lent_pages <= self._staging_pages

    async def run(self) -> None:
        """Serve all agents until cancelled, each by a task of its own, so that a stalling agent
        delays no other.
        """
        async with asyncio.TaskGroup() as self._senders:
            for agent in self._agents:
                self._senders.create_task(self.serve(agent))
            await asyncio.get_running_loop().create_future()

    async def serve(self, agent: InstanceId) -> None:
        """Make offers and send pages to one agent until cancelled."""
        pause_s, more = RETRY_S, False
        while True:
            await self._due(agent)
            if not more:
                await asyncio.sleep(GATHER_S)
            try:
                sent, more = await self._round(self._agents[agent])
            except HolderMovedError:
                self.backlog.lost(agent)
                more = True
            except TransferError as error:
                log.info("checkpoints wait for %s: %s", agent, error)
                self.backlog.lost(agent)
                more = False
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._retry_most_s)
            else:
                # An answer to an offer alone does not prove that pages get through.
                pause_s = RETRY_S if sent else pause_s

    async def _due(self, agent: InstanceId) -> None:
        """Wait until an offer or pages for the agent are due."""
        wake = self._wakes[agent]
        while (due_in_s := self.backlog.due_in_s(agent, self.clock())) != 0:
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
        """Make due offers, then send one batch of pages. Returns the number of sent pages, and
        whether more pages are probably due.
        """
        agent = peer.instance
        for delivery in self.backlog.endings(agent):
            if self.is_over(delivery):
                self.backlog.drop(delivery)
        for delivery in self.backlog.offers(agent, self.clock()):
            held = await self.offer(peer, delivery)
            self.backlog.offered(delivery, held, self.clock())
        budget = await self._budget()
        ranges = list(self.backlog.ranges(agent, self.clock(), budget))
        pages = sum(end - first for _, first, end in ranges)
        if not pages:
            return 0, False
        self.lent_pages += pages
        try:
            return await self._send(peer, ranges), pages == budget
        finally:
            self.lent_pages -= pages
            self._room.set()

    async def _send(self, peer: Peer, ranges: Sequence[DueRange]) -> int:
        """Send these ranges, up to the first evicted page of each; return the number of sent
        pages.
        """
        answers = await self.send(peer, ranges)
        now_s, sent = self.clock(), 0
        for (delivery, first, _), answer in zip(ranges, answers, strict=True):
            if answer is None:
                self.backlog.missed(delivery)
            else:
                self.backlog.stored(delivery, first, answer[1], now_s)
                sent += answer[0]
        return sent

    async def _budget(self) -> int:
        """Wait until a page may be lent; return how many may be lent for one agent."""
        while self.lent_pages == self._staging_pages:
            self._room.clear()
            await self._room.wait()
        return self.backlog.budget_pages(self._staging_pages, self.lent_pages)
