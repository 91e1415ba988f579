"""The recovery of a stage that has lost its host: by the host of another instance, and back.

    lost --a donor lends--> borrowed --the own host is there--> copying --> at home
    lost --the own host is there--> at home
    copying --the own host is lost again--> borrowed
    borrowed, copying --the donor is lost, or ends the loan--> lost

A lender that has replicas of the stage's pages lends them with the loan. Written pages of a loan
are copied to the own host while the donor goes on computing; batches stop only for the last pages.
A page counts as written after the writing batch has ended, because a concurrent copy may miss it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrs.errors import KvrsError, TransferError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.pages import Tag
from kvrs_engine.elastic.lending import FEW_PAGES, MOST_ROUNDS
from kvrs_engine.engine.ranks.connection import HOST_WAIT_S, StageAt, StageConnection
from kvrs_engine.engine.ranks.link import LoanWanted, StageReady
from kvrs_engine.scheduling.sequences import Chunk

log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # Interval between two rounds of requests to donors.
_JOIN_S = 0.1  # Predicted time to begin a loan, before the first loan.


class Gate:
    """A lock with many users, who enter while it is open, and one exclusive holder, who closes
    it.
    """

    def __init__(self) -> None:
        self._open, self._unused = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._unused.set()
        self._users = 0

    @asynccontextmanager
    async def using(self) -> AsyncIterator[None]:
        await self._open.wait()
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        self._open.clear()
        try:
            await self._unused.wait()
            yield
        finally:
            self._open.set()


@dataclass(slots=True, eq=False)
class StageLoan:
    """Pages of a stage that another instance lends."""

    lender: InstanceId
    node: NodeId  # Node of the lender's host.
    pages: Sequence[int]  # The lender's page numbers.
    page_size_tokens: int
    tags: Sequence[Tag] = ()  # Tags of the content of the first pages.
    # Lender's page by own page; None: the pages to keep are not chosen yet.
    table: dict[int, int] | None = None
    touched: set[int] = field(default_factory=set)  # Own pages written since their last copy.
    copied: set[int] = field(default_factory=set)  # Own pages copied to the own host.

    def take(self, kept: Sequence[int], adopted: Mapping[int, int] = {}) -> None:
        """Choose the own pages that stay in use, at most as many as are lent. `adopted` maps own
        pages to the lender's pages that have their content.
        """
        assert len(kept) <= len(self.pages), "a page without memory"
        others, theirs = {*adopted}, {*adopted.values()}
        fresh = (page for page in kept if page not in others)
        free = (page for page in self.pages if page not in theirs)
        self.table = {**adopted, **dict(zip(fresh, free, strict=False))}
        self.touched.update(adopted)

    def theirs(self, pages: Iterable[int]) -> list[int]:
        """Translate own pages to the lender's; raises TransferError if a page is not in use."""
        table, own = self.table or {}, list(pages)
        if not table.keys() >= {*own}:
            raise TransferError("cells of these pages were lost meanwhile")
        return [table[page] for page in own]

    def translated(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return the chunks with the lender's page numbers."""
        table = self.table or {}
        return [
            msgspec.structs.replace(chunk, pages=[table[page] for page in chunk.pages])
            for chunk in chunks
        ]

    def computed(self, chunks: Iterable[Chunk]) -> None:
        """Note the pages written by a batch that has ended or failed."""
        size = self.page_size_tokens
        for chunk in chunks:
            first, end = chunk.first_position, chunk.first_position + len(chunk.token_ids)
            self.touched.update(chunk.pages[first // size : -(-end // size)])


class LostStage(Protocol):
    """The interface of `kvrs_engine.engine.ranks.hosted.HostedStage` for `StageReturn`."""

    gate: Gate
    ready: StageReady
    is_lost: asyncio.Event
    connection: StageConnection

    async def wanted(self) -> LoanWanted: ...
    def waits(self) -> None:
        """Predict the end by the load of the own host, because no donor lends."""
        ...

    def borrow(self, connection: StageConnection, loan: StageLoan) -> None: ...
    def come_home(self, connection: StageConnection, ready: StageReady) -> None: ...


class StageReturn:
    def __init__(
        self,
        stage: LostStage,
        connect: Callable[[StageAt], StageConnection],
        own: StageAt,
        donors: Sequence[StageAt],
        page_size_tokens: int,
    ) -> None:
        self._stage, self._connect, self._own, self._donors = stage, connect, own, donors
        self._page_size_tokens = page_size_tokens
        self.join_s = _JOIN_S  # Time that the last loan took to begin.

    @property
    def borrows(self) -> bool:
        """True if a donor's host is predicted to be ready before the own host."""
        return bool(self._donors) and self.join_s < self._stage.ready.load_s

    async def run(self) -> None:
        """Run until the own host serves the stage again.

        Raises:
            KvrsError: no host serves the stage.
        """
        await self._stage.connection.close()
        home = self._to_home()
        try:
            while True:
                found = await self._find(home)
                if found is None:
                    self._stage.come_home(*home.result())
                    return
                connection, loan = found
                self._stage.borrow(connection, loan)
                while await self._is_back(home):
                    if await self._hand_back(connection, loan, *home.result()):
                        await connection.close()
                        return
                    if home.result()[0].error is None:
                        break
                    home = await self._again(home, loan)
                await connection.close()  # The end of the loan is a loss.
                if home.done() and home.result()[0].error is not None:
                    home = await self._again(home, loan)
        finally:
            await self._drop(home)

    async def _again(
        self, home: "asyncio.Task[tuple[StageConnection, StageReady]]", loan: StageLoan
    ) -> "asyncio.Task[tuple[StageConnection, StageReady]]":
        """Wait for the next own host after another loss: all copied pages must be copied again."""
        await home.result()[0].close()
        loan.touched |= loan.copied
        loan.copied.clear()
        return self._to_home()

    def _to_home(self) -> "asyncio.Task[tuple[StageConnection, StageReady]]":
        return asyncio.create_task(self._go_home())

    async def _go_home(self) -> tuple[StageConnection, StageReady]:
        """Open a session with the own host, without a time limit.

        Raises:
            KvrsError: the host refuses, or has other weights.
        """
        connection = self._connect(self._own)
        try:
            ready = await connection.open(float("inf"))
            if not self._has_same(ready):
                raise KvrsError("the host has other weights than the previous host")
        except BaseException:
            await connection.close()
            raise
        return connection, ready

    def _has_same(self, ready: StageReady) -> bool:
        loaded, known = ready.facts, self._stage.ready.facts
        return (loaded.arithmetic, loaded.hashes) == (known.arithmetic, known.hashes)

    async def _find(
        self, home: "asyncio.Task[tuple[StageConnection, StageReady]]"
    ) -> tuple[StageConnection, StageLoan] | None:
        """Find a donor that lends; None: the own host is there first.

        Raises:
            KvrsError: the own host refuses, or there is no host for `HOST_WAIT_S`.
        """
        began_s = time.monotonic()
        until_s, due_s = began_s + HOST_WAIT_S, began_s + self._stage.ready.load_s
        while not home.done():
            # Ask donors too if the own host is later than predicted.
            asks = self.borrows or time.monotonic() >= due_s
            for donor in self._donors if asks else ():
                if (found := await self._ask(donor)) is not None:
                    if not home.done():
                        return found
                    await found[0].close()
            if home.done():
                break
            self._stage.waits()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                where = (
                    f"node {self._own.peer.node!r} ({self._own.peer.host}:{self._own.peer.port})"
                )
                raise KvrsError(f"no host of the stage on {where} for {HOST_WAIT_S:.0f} s")
            again_s = _AGAIN_S if asks else max(0.0, due_s - time.monotonic())
            await asyncio.wait({home}, timeout=min(left_s, again_s) if self._donors else left_s)
        home.result()
        return None

    async def _is_back(self, home: "asyncio.Task[tuple[StageConnection, StageReady]]") -> bool:
        """Wait for the own host; return False if the loan is lost before."""
        lost = asyncio.create_task(self._stage.is_lost.wait())
        try:
            await asyncio.wait({home, lost}, return_when=asyncio.FIRST_COMPLETED)
            return not lost.done()
        finally:
            lost.cancel()

    async def _ask(self, donor: StageAt) -> tuple[StageConnection, StageLoan] | None:
        connection, began_s = self._connect(donor), time.monotonic()
        assert donor.lender is not None, "a donor is another instance"
        extra = {"donor": donor.lender}
        try:
            ready = await connection.open(0.0, await self._stage.wanted())
            if not self._has_same(ready) or ready.pages is None:
                raise KvrsError("the donor has other weights")
        except KvrsError as error:
            log.info("a donor does not lend", extra=extra | {"cause": str(error)})
            await connection.close()
            return None
        except BaseException:
            await connection.close()
            raise
        self.join_s = time.monotonic() - began_s
        lent = {"pages": len(ready.pages), "replicas": len(ready.tags)}
        log.info("a donor lends", extra={**extra, **lent})
        size, tags = self._page_size_tokens, ready.tags[: len(ready.pages)]
        loan = StageLoan(donor.lender, donor.peer.node, ready.pages, size, tags)
        return connection, loan

    async def _hand_back(
        self,
        connection: StageConnection,
        loan: StageLoan,
        home: StageConnection,
        ready: StageReady,
    ) -> bool:
        """Copy the written pages and go on at the own host; False: either host was lost."""
        try:
            for _ in range(MOST_ROUNDS):
                if len(loan.touched) <= FEW_PAGES:
                    break
                await self._copy(connection, loan, home)
            async with self._stage.gate.closed():
                await self._copy(connection, loan, home)
                if connection.error is not None or home.error is not None:
                    return False
                self._stage.come_home(home, ready)
                return True
        except TransferError as error:
            log.warning("a stage is not handed back", extra={"cause": str(error)})
            return False

    async def _copy(
        self, connection: StageConnection, loan: StageLoan, home: StageConnection
    ) -> None:
        pages, loan.touched = sorted(loan.touched), set()
        try:
            if pages:
                parts = await connection.read(loan.theirs(pages))
                await home.write(pages, parts, None)
                loan.copied.update(pages)
        except BaseException:
            loan.touched.update(pages)
            raise

    async def _drop(self, home: "asyncio.Task[tuple[StageConnection, StageReady]]") -> None:
        """Close the session with the own host, unless the stage uses it."""
        home.cancel()
        with suppress(asyncio.CancelledError, KvrsError):
            connection, _ = await home
            if self._stage.connection is not connection:
                await connection.close()
