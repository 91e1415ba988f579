"""Sender of newly filled pages to agents, in the background.

The engine never waits for the sender. It lends at most `backup.staging_pages` of its pages at a
time, each until an agent has stored it, or has stalled for `transfer.stall_timeout_s`. That
includes waiting for hand-offs and recoveries to the same node.

Pusher of checkpoint pages to agents, with lower priority than all other traffic.

Whole pages are pushed, and a restore is an ordinary pull, since an agent is a peer like an
instance. Ranks do not push their cells, because the agent would keep incomplete pages.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvrs.config.backup import BackupSettings
from kvrs.config.sections import TransferSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol import frames
from kvrs.protocol.frames import AnswerHeader, Bytes, FrameType
from kvrs.protocol.pages import OfferFrame, StoredRange, StoreFrame, Tag, TrafficClass
from kvrs.transfer.checkpoint_backlog import (
    RETRY_MOST_S,
    RETRY_S,
    CheckpointBacklog,
    CheckpointDelivery,
)
from kvrs.transfer.connections import ConnectionPool, PageConnection, Question
from kvrs.transfer.links import SendingLinks, groups
from kvrs.transfer.peers import CheckpointClaim, HeldPages, Identity, Peer, StoredPages

log = logging.getLogger(__name__)


class PagePusher:
    """Offers and stores checkpoint pages for one instance."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        secret: bytes,
        settings: TransferSettings,
        links: SendingLinks,
    ) -> None:
        self._pool = ConnectionPool(identity, secret, settings.stall_timeout_s)
        self._links = links
        self.pushed_bytes = 0  # Bytes of sent pages that agents have acknowledged, since the start.

    async def offer(
        self, peer: Peer, claim: CheckpointClaim, reserved_bytes: int, tags: Sequence[Tag]
    ) -> HeldPages:
        """Ask the agent for room for a stream's checkpoint; return how much of it the agent has.

        Raises:
            TransferError: the agent cannot be reached, refuses, or answers out of turn.
        """

        async def question(connection: PageConnection) -> None:
            offer = OfferFrame(connection.request_id, claim, reserved_bytes, tuple(tags))
            with self._links.to(peer.node).sending(
                connection.stream, TrafficClass.CHECKPOINT
            ) as sender:
                frame = frames.encode_offer(offer)
                await sender.send(frame, connection.stream.session.seal(frame))

        return (await self._ask(peer, question, 1))[0]

    async def store(self, peer: Peer, batch: Sequence[StoredPages]) -> list[HeldPages]:
        """Send pages; return what the agent then holds of each stream, in the order of `batch`.

        Once this has returned, raised or was cancelled, the pages are not read any more.

        Raises:
            TransferError: the agent cannot be reached, refuses, found a page damaged, or answers
                out of turn. Some of the pages may be there: an offer returns how many.
        """
        pages = [page for stored in batch for page in stored.pages]
        ranges = _ranges(batch, await _checksums(pages))

        async def question(connection: PageConnection) -> None:
            assert all(page.nbytes == connection.own.page_bytes for page in pages)
            with self._links.to(peer.node).sending(
                connection.stream, TrafficClass.CHECKPOINT
            ) as sender:
                # The frame is sent in one call with the first pages: each call wakes the agent.
                session = connection.stream.session
                store = frames.encode_store(StoreFrame(connection.request_id, ranges))
                buffers: list[Bytes] = [store, session.seal(store)]
                for group in groups(pages):
                    for _, page in group:
                        payload = sender.payload(page)
                        buffers += (payload, session.seal(payload))
                    await sender.send(*buffers)
                    buffers = []

        held = await self._ask(peer, question, len(ranges))
        self.pushed_bytes += sum(page.nbytes for page in pages)
        return held

    async def close(self) -> None:
        """End all connections. Running sends end with a `TransferError`."""
        self._pool.close()

    async def _ask(self, peer: Peer, question: Question, count: int) -> list[HeldPages]:
        connection, answer = await self._pool.ask(peer, None, question, FrameType.HELD)
        with self._pool.using(connection):
            due = AnswerHeader(
                FrameType.HELD, connection.request_id, count, 0, frames.held_bytes(count)
            )
            if answer != due:
                raise TransferError(f"answer out of turn: {answer} where {due} is due")
            payload = memoryview(bytearray(answer.payload_bytes))
            await connection.stream.receive_into(payload)
            connection.stream.session.check_answer(connection.mac, answer, payload)
            return frames.decode_held(payload)


async def _checksums(pages: Sequence[memoryview]) -> Iterator[int]:
    """Return the checksums of pages; they are computed a few at a time, so that the event loop is
    not blocked.
    """
    checksums: list[int] = []
    for group in groups(pages):
        if checksums:
            await asyncio.sleep(0)
        checksums += (frames.checksum(page) for _, page in group)
    return iter(checksums)


def _ranges(batch: Sequence[StoredPages], checksums: Iterator[int]) -> tuple[StoredRange, ...]:
    """Return the descriptions of the page ranges that a STORE frame has before the pages."""
    return tuple(
        [
            StoredRange(
                stored.claim,
                stored.first_page,
                stored.tags,
                tuple([next(checksums) for _ in stored.pages]),
            )
            for stored in batch
        ]
    )


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
