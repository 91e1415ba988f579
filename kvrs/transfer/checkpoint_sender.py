"""The checkpoint sender sends newly filled pages to agents in the background.

The engine never waits for this. It lends at most `backup.staging_pages` of its pages at a time,
each until an agent has stored it, or has stalled for `transfer.stall_timeout_s`. That includes the
time in which checkpoints wait for hand-offs and recoveries to the same node.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvrs.config.backup import BackupSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.tags import Tag
from kvrs.transfer.checkpoint_backlog import (
    RETRY_MOST_S,
    RETRY_S,
    CheckpointBacklog,
    CheckpointDelivery,
)
from kvrs.transfer.peers import CheckpointClaim, HeldPages, Peer, StoredPages

log = logging.getLogger(__name__)

GATHER_S = 0.05  # Pages that streams fill meanwhile go in one message; a checkpoint lags so far.

DueRange = tuple[CheckpointDelivery, int, int]  # The first page and the end of what is sent next.


class HolderMovedError(TransferError):
    """Another one stands in the holder's place from now on."""


class PageCarrier(Protocol):
    """The engine whose pages are sent."""

    def is_over(self, delivery: CheckpointDelivery) -> bool:
        """The stream of a sequence that has ended needs no checkpoint any more."""
        ...

    async def offer(self, agent: Peer, delivery: CheckpointDelivery) -> HeldPages:
        """Raises TransferError: the agent does not answer."""
        ...

    async def send(
        self, agent: Peer, ranges: Sequence[DueRange]
    ) -> list[tuple[int, HeldPages] | None]:
        """Send the leading pages of each range that are there: how many, and the agent's answer;
        None: not even the first is.

        Raises:
            HolderMovedError: nothing was sent; the offers are to be made again at once.
            TransferError: they cannot be read, or the agent does not answer.
        """
        ...


class Pusher(Protocol):
    """`kvrs.transfer.pusher.PagePusher`. Both raise TransferError."""

    async def offer(
        self, peer: Peer, claim: CheckpointClaim, reserved_bytes: int, tags: Sequence[Tag]
    ) -> HeldPages: ...

    async def store(self, peer: Peer, batch: Sequence[StoredPages]) -> list[HeldPages]: ...


class PageLender(Protocol):
    """An engine whose pages are sent out of its own memory."""

    def is_over(self, delivery: CheckpointDelivery) -> bool:
        """`PageCarrier.is_over`."""
        ...

    def lend(
        self, ranges: Sequence[DueRange]
    ) -> AbstractAsyncContextManager[list[list[memoryview]]]:
        """For each range the bytes of its leading pages, as far as they are there. They do not
        change while they are lent.

        Raises:
            TransferError: they cannot be read.
        """
        ...


class PushedPages:
    """The `PageCarrier` of such an engine."""

    def __init__(self, lender: PageLender, pusher: Pusher) -> None:
        self._lender, self._pusher = lender, pusher
        self.is_over = lender.is_over

    async def offer(self, agent: Peer, delivery: CheckpointDelivery) -> HeldPages:
        return await self._pusher.offer(
            agent, delivery.claim, delivery.reserved_bytes, delivery.known_tags
        )

    async def send(
        self, agent: Peer, ranges: Sequence[DueRange]
    ) -> list[tuple[int, HeldPages] | None]:
        async with self._lender.lend(ranges) as lent:
            batch = [
                StoredPages(delivery.claim, first, tags, views)
                for (delivery, first, _), views in zip(ranges, lent, strict=True)
                if (tags := delivery.tags(first, first + len(views)))
            ]
            answers = iter(await self._pusher.store(agent, batch) if batch else ())
            return [(len(views), next(answers)) if views else None for views in lent]


class CheckpointSender:
    """One per instance. All methods run on its event loop."""

    def __init__(
        self,
        backlog: CheckpointBacklog,
        carrier: PageCarrier,
        agents: Mapping[InstanceId, Peer],
        settings: BackupSettings,
        staging_pages: int,
        clock: Callable[[], float],
        retry_most_s: float = RETRY_MOST_S,
    ) -> None:
        self.lent_pages = 0
        self._backlog, self._carrier = backlog, carrier
        self._agents = dict(agents)
        self._settings, self._staging_pages, self._clock = settings, staging_pages, clock
        self._retry_most_s = retry_most_s
        self._senders: asyncio.TaskGroup | None = None
        self._wakes = {agent: asyncio.Event() for agent in agents}
        self._room = asyncio.Event()

    @property
    def agents(self) -> Mapping[InstanceId, Peer]:
        return self._agents

    def learn(self, agents: Mapping[InstanceId, Peer]) -> None:
        """Send to further agents, or to those that are known at another address."""
        known, self._agents = self._agents, {**self._agents, **agents}
        for agent in agents.keys() - known.keys():
            self._wakes[agent] = asyncio.Event()
            if self._senders is not None:
                self._senders.create_task(self._serve(agent))

    def wake(self, agents: Sequence[InstanceId]) -> None:
        """There is something to send to these."""
        for agent in agents:
            self._wakes[agent].set()

    def check(self) -> None:
        """Assert that the backlog is consistent, and that at most the allowed pages are lent."""
        self._backlog.check()
        assert 0 <= self.lent_pages <= self._staging_pages

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
                await asyncio.sleep(GATHER_S)
            try:
                sent, more = await self._round(self._agents[agent])
            except HolderMovedError:
                self._backlog.lost(agent)
                more = True
            except TransferError as error:
                log.info("checkpoints wait for %s: %s", agent, error)
                self._backlog.lost(agent)
                more = False
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._retry_most_s)
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
            if self._carrier.is_over(delivery):
                self._backlog.drop(delivery)
        for delivery in self._backlog.offers(agent, self._clock()):
            held = await self._carrier.offer(peer, delivery)
            self._backlog.offered(delivery, held, self._clock())
        budget = await self._budget()
        ranges = list(self._backlog.ranges(agent, self._clock(), budget))
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
        """Send what there is of these ranges; returns how many pages that were."""
        answers = await self._carrier.send(peer, ranges)
        now_s, sent = self._clock(), 0
        for (delivery, first, _), answer in zip(ranges, answers, strict=True):
            if answer is None:
                self._backlog.missed(delivery)
            else:
                self._backlog.stored(delivery, first, answer[1], now_s)
                sent += answer[0]
        return sent

    async def _budget(self) -> int:
        """How many pages may be lent for one agent, when any may."""
        while self.lent_pages == self._staging_pages:
            self._room.clear()
            await self._room.wait()
        return self._backlog.budget_pages(self._staging_pages, self.lent_pages)
