"""The connections of an instance's process to the host of a stage: one session, and its orders."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from kvrs.config.sections import TransferSettings
from kvrs.errors import KvrsError, RanksLostError, TransferError
from kvrs.ids import InstanceId
from kvrs.net.names import first_address
from kvrs.protocol.pages import Cell, Part, TrafficClass
from kvrs.protocol.secrets import Scope
from kvrs.transfer.connections import PeerRefusedError, introduce
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.stream import SocketStream, page_socket
from kvrs_engine.engine.ranks.link import (
    VERSION,
    WORDS,
    Begin,
    BringParts,
    CellsLost,
    ComputeStage,
    EndRank,
    FromOthers,
    FromStage,
    LoanAsked,
    LoanOver,
    LoanWanted,
    Mended,
    MoveRank,
    OwnerAnswer,
    PagesDone,
    PagesLost,
    PartsHeld,
    PartsOffered,
    PartsOver,
    PartsRange,
    PartsRefused,
    RankMoved,
    ReadPages,
    StageChanged,
    StageChannel,
    StageComputed,
    StageComputing,
    StageLink,
    StageLost,
    StageReady,
    StageRefused,
    StageServes,
    StageStopped,
    ToStage,
    WritePages,
    max_page_payload,
    page_groups,
)
from kvrs_engine.engine.ranks.reformed import RanksNow
from kvrs_engine.engine.ranks.sessions import StageRefusedError
from kvrs_engine.engine.ranks.wire import batch_of
from kvrs_engine.scheduling.sequences import Chunk

# Time limit for a host's start: a host starts with its instance, and loads similar weights.
HOST_WAIT_S = 100.0
_AGAIN_S = 0.1
_ON_THE_WAY_S = 0.25  # Time for sending a batch and its answer, beside the compute time.
# Limit of the wait for parts to be sent, in stall timeouts. The sending host gives up one timeout
# earlier, so that pages are not read after their pins have ended.
BRINGING = 4

Answer = TypeVar("Answer", StageReady, PagesDone)


class PartsRefusedError(TransferError):
    """The host of another instance accepts no parts, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class StageAt:
    """The address of a stage's host, and the credentials for it."""

    peer: Peer
    own: Identity  # Has the epoch of the sessions.
    secret: bytes
    transfer: TransferSettings
    lender: InstanceId | None = None  # The instance that owns the host; None: this instance.

    @property
    def stall_timeout_s(self) -> float:
        return self.transfer.stall_timeout_s

    @property
    def lost(self) -> str:
        return f"is lost with its node {self.peer.node}"


async def open_link(
    at: StageAt, begin: Begin, max_payload_bytes: int, kind: type[Answer]
) -> tuple[StageLink, Answer]:
    """Open a link; return the link and its first answer, of the given type.

    Raises:
        OSError, TransferError: the host is not there, or refuses.
    """
    peer = replace(at.peer, host=await first_address(at.peer.host))
    sock = page_socket(peer.host)
    stream = SocketStream(sock, at.stall_timeout_s)
    try:
        async with asyncio.timeout(at.stall_timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, (peer.host, peer.port))
            await introduce(stream, at.secret, at.own, peer, Scope.STAGES)
        link = StageLink(stream, FromStage, max_payload_bytes)
        await link.send(begin)
        # The host answers when the previous session has ended.
        answer, _ = await link.receive(at.stall_timeout_s)
        if isinstance(answer, StageRefused):
            raise StageRefusedError(answer.reason)
        if not isinstance(answer, kind):
            raise TransferError(f"a message out of turn: {type(answer).__name__}")
    except BaseException:
        stream.close()
        raise
    return link, answer


class StageConnection:
    """A session with the host of a stage. All methods must run in one event loop."""

    def __init__(
        self,
        at: StageAt,
        stage: int,
        ranks: Sequence[int],
        part_bytes: int,
        max_bytes: int,
        links: SendingLinks,
    ) -> None:
        """`part_bytes` is the size of the stage's part of a page; `max_bytes` limits the size of a
        result; `links` are those of this event loop.
        """
        self._at, self._stage, self._ranks, self._sending = at, stage, ranks, links
        self._part_bytes, self._max_bytes = part_bytes, max_bytes
        self._batch = 0
        # The result of the running batch, or the error that ended it.
        self._answer: asyncio.Future[Tensor | RanksLostError] | None = None
        self._answer_bytes = 0
        self._is_heard = False  # A report has arrived since the last check.
        self._links: list[StageLink] = []
        self._session = 0, 0  # Number and epoch of the session, which every order names.
        self._listening: asyncio.Task[None] | None = None
        self._asking, self._bringing = asyncio.Lock(), asyncio.Lock()
        self._replicas: StageLink | None = None
        self.error: RanksLostError | None = None  # The final error; None: the session is open.
        self.is_refused = False  # The host has refused the session for good.
        # The ranks lost in a batch, until the other ranks compute again.
        self.stopped: RanksLostError | None = None
        # Called with each message of others, and with None when `stopped`, `error` or `now` has
        # changed. The host refuses requests that are not answered in time.
        self.on_news: Callable[[FromOthers | None], object] = lambda message: None

    async def open(self, wait_s: float = HOST_WAIT_S, loan: LoanWanted | None = None) -> StageReady:
        """Begin a session when the host has loaded the stage.

        Raises:
            KvrsError: the host refuses, or does not answer within `wait_s`.
        """
        until_s = time.monotonic() + wait_s
        peer = self._at.peer
        where = f"stage {self._stage} on node {peer.node!r} ({peer.host}:{peer.port})"
        while True:
            try:
                return await self._begin(loan)
            except PeerRefusedError as error:
                raise KvrsError(
                    f"{where}: {error}; allowed: the same secret, model, engine settings and "
                    f"stages at both ends"
                ) from None
            except StageRefusedError as error:
                raise KvrsError(f"{where}: {error}") from None
            except (OSError, TransferError) as error:
                if time.monotonic() > until_s:
                    raise KvrsError(f"{where} cannot be used: {error}") from None
                await asyncio.sleep(_AGAIN_S)

    async def _begin(self, loan: LoanWanted | None) -> StageReady:
        links: list[StageLink] = []
        try:
            begin = Begin(VERSION, StageChannel.BATCHES, loan=loan)
            link, ready = await open_link(self._at, begin, self._max_bytes, StageReady)
            links.append(link)
            begin = Begin(VERSION, StageChannel.PAGES, ready.session)
            payload_bytes = max_page_payload(self._part_bytes)
            link, _ = await open_link(self._at, begin, payload_bytes, PagesDone)
            links.append(link)
            link.limit(self._sending.to(self._at.peer.node), TrafficClass.HANDOFF)
        except BaseException:
            for link in links:
                link.stream.close()
            raise
        self._batches, self._pages = self._links = links
        self._session = ready.session, self._at.own.epoch
        self.use = ready.use
        self._learn(ready.now)
        self._listening = asyncio.get_running_loop().create_task(self._listen())
        return ready

    async def _listen(self) -> None:
        """Receive the messages on the link of batches until the session ends."""
        try:
            while True:
                message, payload = await self._batches.receive()
                match message:
                    case StageComputing():
                        self._expected(message)
                        self._is_heard = True
                    case StageComputed():
                        if len(payload) != self._answer_bytes:
                            raise TransferError(
                                f"a result of {len(payload)} bytes; allowed: {self._answer_bytes}"
                            )
                        self.use = message.use
                        self._expected(message).set_result(payload)
                    case StageStopped(ranks=ranks, reason=reason):
                        answer = self._expected(message)
                        self.stopped = RanksLostError(ranks, reason)
                        self.on_news(None)
                        answer.set_result(self.stopped)
                    case StageServes():
                        self.stopped = None
                        self.on_news(None)
                    case StageChanged(now=now):
                        self._learn(now)
                        self.on_news(None)
                    case LoanAsked() | LoanOver() | PartsOffered() | PartsOver():
                        self.on_news(message)
                    case StageLost(ranks=ranks, reason=reason):
                        self._lost(ranks, reason)
                        return
                    case StageRefused(reason=reason):
                        self.is_refused = True
                        self._lost(self._ranks, f"is refused by its host: {reason}")
                        return
                    case _:
                        raise TransferError(f"a message out of turn: {type(message).__name__}")
        except TransferError as error:
            self._lost(self._ranks, f"{self._at.lost}: {error}")

    def _learn(self, told: RanksNow) -> None:
        self.now = told.later(time.monotonic())

    def _expected(
        self, message: StageComputing | StageComputed | StageStopped
    ) -> "asyncio.Future[Tensor | RanksLostError]":
        """Return the future of the running batch; raises TransferError if the message is of another
        batch.
        """
        if self._answer is None or self._answer.done() or message.batch != self._batch:
            raise TransferError(f"{type(message).__name__} of batch {message.batch} out of turn")
        return self._answer

    async def execute(
        self,
        chunks: Sequence[Chunk],
        rows: Tensor | None,
        limit_s: float,
        page_size_tokens: int,
        answer_bytes: int,
    ) -> Tensor:
        """Compute a batch, one at a time; return its result of `answer_bytes` bytes.

        Raises:
            RanksLostError: the batch has failed.
        """
        if (lost := self.error or self.stopped) is not None:
            raise lost
        self._batch, self._answer_bytes = self._batch + 1, answer_bytes
        answer: asyncio.Future[Tensor | RanksLostError] = asyncio.get_running_loop().create_future()
        self._answer = answer
        wire = batch_of(0, self._batch, chunks, page_size_tokens)
        message = ComputeStage(*self._session, self._batch, wire.chunks, limit_s)
        silent_s = limit_s + _ON_THE_WAY_S
        try:
            async with asyncio.timeout(silent_s):
                await self._batches.send(message, rows)
            found = await self._answered(answer, silent_s)
            if isinstance(found, RanksLostError):
                raise found
            return found
        except TimeoutError:
            self._lost(self._ranks, f"has not answered for {silent_s:.1f} s")
        except TransferError as error:
            self._lost(self._ranks, f"{self._at.lost}: {error}")
        assert self.error is not None, "the session is lost"
        raise self.error

    async def _answered(
        self, answer: "asyncio.Future[Tensor | RanksLostError]", silent_s: float
    ) -> Tensor | RanksLostError:
        """Wait for the answer; raises TimeoutError if no report arrives for `silent_s`."""
        looks = 0
        while not answer.done():
            self._is_heard = False
            await asyncio.wait({answer}, timeout=silent_s / WORDS)
            looks = 0 if self._is_heard else looks + 1
            if looks == WORDS and not answer.done():
                raise TimeoutError
        return answer.result()

    async def mended(self) -> None:
        # The link of batches keeps the order with later batches.
        with suppress(TransferError):  # `_listen` handles the loss.
            await self._batches.send(Mended(*self._session))

    async def read(self, pages: Sequence[int]) -> Tensor:
        size = self._part_bytes
        parts = torch.empty(len(pages), size, dtype=torch.uint8)
        for group in page_groups(pages, size):
            wanted = [pages[place] for place in group]
            _, found = await self._ask(ReadPages(*self._session, wanted), None, len(wanted) * size)
            parts[group.start : group.stop] = found.view(len(wanted), -1)
        return parts

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None) -> None:
        spans: list[tuple[int, int]] = []
        if cells is not None:
            spans = [(each.start, each.stop) for each in (cells.layers, cells.heads)]
        for group in page_groups(pages, self._part_bytes):
            wanted = [pages[place] for place in group]
            own = parts[group.start : group.stop].contiguous()
            await self._ask(WritePages(*self._session, wanted, *spans), own)

    async def lose_device(self, rank: int, bases: Sequence[int]) -> dict[int, frozenset[Cell]]:
        answer, _ = await self._ask(EndRank(*self._session, rank, list(bases)), None)
        assert isinstance(answer, CellsLost), "the answer fits the order"
        return {base: frozenset(cells) for base, cells in answer.cells.items()}

    async def move(self, rank: int, *, leaves: bool) -> str | None:
        answer, _ = await self._ask(MoveRank(*self._session, rank, leaves), None)
        assert isinstance(answer, RankMoved), "the answer fits the order"
        return answer.refused

    async def answer(self, order: OwnerAnswer) -> None:
        """Answer `LoanAsked` or `PartsOffered`, filling in the session.

        Raises:
            TransferError: the host is lost, or the other instance no longer waits.
        """
        session, epoch = self._session
        await self._ask(msgspec.structs.replace(order, session=session, epoch=epoch), None)

    async def bring(
        self, to: InstanceId, ranges: Sequence[PartsRange], pages: Sequence[int]
    ) -> PartsHeld:
        """Send parts of pages to another instance's host; return the pages held there.

        Raises:
            TransferError: the parts were not sent completely; the session goes on.
        """
        async with self._bringing:
            try:
                if self.error is not None:
                    raise TransferError(str(self.error))
                if self._replicas is None:
                    begin = Begin(VERSION, StageChannel.REPLICAS, self._session[0])
                    self._replicas, _ = await open_link(self._at, begin, 0, PagesDone)
                link = self._replicas
                await link.send(BringParts(*self._session, to, list(ranges), list(pages)))
                # The other host may stall too, before this one gives up.
                answer, _ = await link.receive(BRINGING * self._at.stall_timeout_s)
            except OSError as error:
                self._drop_replicas()
                raise TransferError(str(error)) from None
            except BaseException:
                self._drop_replicas()
                raise
            match answer:
                case PartsHeld():
                    return answer
                case PartsRefused(reason=reason):
                    raise PartsRefusedError(reason)
                case StageRefused(reason=reason):
                    self._drop_replicas()
                    raise StageRefusedError(reason)
                case _:
                    self._drop_replicas()
                    raise TransferError(f"a message out of turn: {type(answer).__name__}")

    def _drop_replicas(self) -> None:
        link, self._replicas = self._replicas, None
        if link is not None:
            link.stream.close()

    async def _ask(
        self, order: ToStage, payload: Tensor | None, answer_bytes: int = 0
    ) -> tuple[PagesDone | CellsLost | RankMoved, Tensor]:
        async with self._asking:
            if self.error is not None:
                raise TransferError(str(self.error))
            try:
                await self._pages.send(order, payload)
                answer, found = await self._pages.receive(self._at.stall_timeout_s)
                match answer:
                    case PagesLost(reason=reason):
                        pass
                    case StageRefused(reason=reason):
                        self.is_refused = True
                        raise StageRefusedError(reason)
                    case PagesDone() | CellsLost() | RankMoved() if len(found) == answer_bytes:
                        return answer, found
                    case _:
                        raise TransferError(f"{len(found)} bytes of pages; allowed: {answer_bytes}")
            except TransferError as error:
                self._lost(self._ranks, f"{self._at.lost}: {error}")
                raise
            raise TransferError(reason)

    def _lost(self, ranks: Sequence[int], reason: str) -> None:
        if self.error is not None:
            return
        self.error = RanksLostError(ranks, reason)
        self.give_up()

    def give_up(self) -> None:
        """End the session: the running batch and all later ones fail with RanksLostError."""
        self.error = self.error or RanksLostError(self._ranks, "has ended")
        self.on_news(None)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self.error)
        for link in (*self._links, *filter(None, [self._replicas])):
            link.stream.shut()

    async def close(self) -> None:
        self.give_up()
        if self._listening is not None:
            await self._listening
        async with self._asking, self._bringing:
            for link in self._links:
                link.stream.close()
            self._drop_replicas()
