"""Sessions of a stage's host: the processes that it serves, and the orders that it obeys.

    none --Begin--> open --the link of batches closes--> none, after the last order has ended
    open --Begin in the same or a higher epoch--> none, as above, then --> open

A host outlives the processes that use it. Each process has a session in the epoch of its start, and
every order names both. A process in a lower epoch is refused, and so is an order of another
session, so that a process that was suspended or cut off changes nothing later. Pages that an order
writes are not used in the next session before that order has ended.

The owner is the instance of the stage. While its session is open, another instance of the group may
have a second session, a loan, over pages that the owner lends and does not use meanwhile. Every
session of the owner begins without a loan. Batches of both are computed in order of arrival, and
each has one batch at a time.

Other hosts send parts of pages in the owner's session; the owner names their destination
(`replicate`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from kvrs.config.cluster import MAX_RANKS, EngineSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.transfer.peers import Identity
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.link import (
    VERSION,
    Begin,
    FromStage,
    LendPages,
    LoanAsked,
    LoanOver,
    OfferParts,
    Ordered,
    OwnerAnswer,
    PartsOffered,
    RefuseParts,
    StageChannel,
    StageLink,
    TakeParts,
)
from kvrs_engine.scheduling.sequences import Chunk

log = logging.getLogger(__name__)

_ASKED_S = 5.0  # Time limit for the owner's answer to a request.


class StageRefusedError(TransferError):
    """The host refuses an order or a process; the message is sent to that process."""


class StageSession:
    """The use of a host by one process. Its links end together."""

    def __init__(self, number: int, head: Identity, pages: frozenset[int] | None = None) -> None:
        """`pages` are those of a loan; None: the owner's session."""
        self.number, self.head, self.pages = number, head, pages
        self.terms: LendPages | None = None  # The terms of a loan.
        self.lent: frozenset[int] = frozenset()  # Pages that the owner lends in this session.
        self._links: list[StageLink] = []  # The link of batches first.
        self._beside: list[StageLink] = []
        self._ending, self._over = asyncio.Event(), asyncio.Event()

    def check(self, order: Ordered) -> None:
        """Raises StageRefusedError if the order is not of this session."""
        if order.epoch != self.head.epoch:
            raise StageRefusedError(
                f"an order of epoch {order.epoch}; allowed: {self.head.epoch}, the session's"
            )
        if order.session != self.number:
            raise StageRefusedError(
                f"an order of session {order.session}; allowed: {self.number}, the link's"
            )

    def check_pages(self, pages: Collection[int]) -> None:
        """Raises StageRefusedError if a page does not belong to this session."""
        if self.pages is None:
            others = self.lent.intersection(pages)
        else:
            others = frozenset(pages) - self.pages
        if others:
            allowed = "those that are not lent" if self.pages is None else "those that are lent"
            raise StageRefusedError(f"pages {sorted(others)[:8]}; allowed: {allowed}")

    @property
    def is_over(self) -> bool:
        """True if all links and orders of the session have ended."""
        return self._over.is_set()

    @contextmanager
    def using(self, link: StageLink) -> Iterator[None]:
        """Serve a link of the session; the session ends with the link."""
        self._links.append(link)
        try:
            yield
        finally:
            self._links.remove(link)
            self.shut()
            self._settle()

    @contextmanager
    def beside(self, link: StageLink) -> Iterator[None]:
        """Serve a link that ends with the session but does not end it."""
        self._beside.append(link)
        try:
            if not self._links:
                raise StageRefusedError(f"session {self.number} has ended")
            yield
        finally:
            self._beside.remove(link)
            self._settle()

    def _settle(self) -> None:
        if not self._links and not self._beside:
            self._over.set()

    async def tell(self, message: FromStage) -> None:
        """Send a message on the link of batches; the loss of the link is ignored here."""
        if self._links:
            with suppress(TransferError):
                await self._links[0].send(message)

    def shut(self) -> None:
        self._ending.set()
        for link in (*self._links, *self._beside):
            link.stream.shut()

    async def answered(self, answer: "asyncio.Future[Any]", patience_s: float) -> bool:
        """Wait for an answer of the process; False: it does not come within `patience_s`."""
        ending = asyncio.create_task(self._ending.wait())
        try:
            waited = asyncio.wait(
                {answer, ending}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            return answer in (await waited)[0]
        finally:
            ending.cancel()

    async def end(self) -> None:
        """End the session, and wait until its orders have ended."""
        self.shut()
        await self._over.wait()

    async def over(self) -> None:
        await self._over.wait()


class StageSessions:
    """The session of the owner, and that of a borrower."""

    def __init__(
        self, owner: InstanceId, pages: int, borrowers: Collection[InstanceId] = ()
    ) -> None:
        """`pages` is the number of the owner's pages; `borrowers` may ask for a loan."""
        self._owner, self._pages, self._borrowers = owner, pages, frozenset(borrowers)
        self._epochs: dict[InstanceId, int] = {}  # The highest epoch of each instance.
        self._number = 0
        self._own: StageSession | None = None
        self._loan: StageSession | None = None
        self._opening, self._lending = asyncio.Lock(), asyncio.Lock()
        # The loan for which the owner's answer is pending: its number, and the future answer.
        self._asked: tuple[int, asyncio.Future[LendPages | str]] | None = None
        self._ending: asyncio.Task[None] | None = None
        # Offers of parts for which the owner's answer is pending, by number.
        self._offers: dict[int, tuple[OfferParts, asyncio.Future[TakeParts | str]]] = {}
        self._offered = 0

    @asynccontextmanager
    async def of(
        self, link: StageLink, head: Identity, begin: object
    ) -> AsyncIterator[StageSession]:
        """Enter the session of a new link, given its first message. A link of batches opens a new
        session after the previous one has ended.

        Raises:
            StageRefusedError: the link is refused.
        """
        session = await self._begin(head, begin)
        is_beside = isinstance(begin, Begin) and begin.channel is StageChannel.REPLICAS
        with session.beside(link) if is_beside else session.using(link):
            yield session

    def answered(self, order: OwnerAnswer) -> bool:
        """Pass on the owner's answer; False: the other instance no longer waits.

        Raises:
            StageRefusedError: the answer does not fit the request.
        """
        if isinstance(order, TakeParts | RefuseParts):
            offer, taken = self._offers.get(order.offer) or (None, None)
            if offer is None or taken is None or taken.done():
                return False
            if isinstance(order, TakeParts):
                _check_taken(order, offer)
            taken.set_result(order if isinstance(order, TakeParts) else order.reason)
            return True
        number, answer = self._asked or (None, None)
        if answer is None or answer.done() or order.loan != number:
            return False
        answer.set_result(order if isinstance(order, LendPages) else order.reason)
        return True

    async def tell_all(self, message: FromStage) -> None:
        for session in (self._own, self._loan):
            if session is not None:
                await session.tell(message)

    async def over(self) -> None:
        """Wait for the end of the owner's session, and end that of a borrower."""
        while self._own is not None and not self._own.is_over:
            await self._own.over()
        await self.end_loan()

    async def end_loan(self) -> None:
        """End the session of a borrower, if there is one."""
        if self._loan is not None and not self._loan.is_over:
            await self._loan.end()

    async def _begin(self, head: Identity, begin: object) -> StageSession:
        if not isinstance(begin, Begin):
            raise StageRefusedError(f"a message out of turn: {type(begin).__name__}")
        self._check(head, begin)
        is_owner = head.instance == self._owner
        if begin.channel is not StageChannel.BATCHES:
            now = self._own if is_owner else self._loan
            is_open = now is not None and not now.is_over and now.head == head
            if now is None or not is_open or begin.session != now.number:
                raise StageRefusedError(
                    f"session {begin.session}; allowed: the one that is open, "
                    f"{now.number if now is not None and is_open else 'none'}"
                )
            return now
        if not is_owner:
            return await self._lend(head, begin)
        async with self._opening:
            # A process of a higher epoch may have opened a session meanwhile.
            self._check(head, begin)
            self._epochs[head.instance] = head.epoch
            if self._own is not None:
                await self._own.end()
            await self.end_loan()
            self._own = StageSession(self._next(), head)
            return self._own

    def _check(self, head: Identity, begin: Begin) -> None:
        check_version(begin)
        if head.instance != self._owner and head.instance not in self._borrowers:
            allowed = ", ".join(map(repr, (self._owner, *sorted(self._borrowers))))
            raise StageRefusedError(f"instance {head.instance!r}; allowed: {allowed}")
        least = self._epochs.get(head.instance, 0)
        if head.epoch < least:
            raise StageRefusedError(f"epoch {head.epoch}; allowed: {least} or above")

    def _next(self) -> int:
        self._number += 1
        log.info("session begins", extra={"session": self._number})
        return self._number

    # Loans.

    async def _lend(self, head: Identity, begin: Begin) -> StageSession:
        if begin.loan is None:
            raise StageRefusedError(
                f"instance {head.instance!r} asks for no loan; allowed: a loan of pages "
                f"of {self._owner!r}, the owner of the stage"
            )
        if (tags := len(begin.loan.tags)) > self._pages:
            raise StageRefusedError(
                f"a loan for {tags} tags; allowed: {self._pages}, the pages of an instance"
            )
        async with self._lending:
            self._check(head, begin)
            self._epochs[head.instance] = head.epoch
            if (before := self._loan) is not None and not before.is_over:
                if before.head.instance != head.instance:
                    raise StageRefusedError(
                        f"a loan to {head.instance!r}; allowed: one loan at a time, "
                        f"{before.head.instance!r} has one"
                    )
                await self.end_loan()
            if (owner := self._own) is None or owner.is_over:
                raise StageRefusedError(
                    f"a loan without a session of {self._owner!r}; allowed: during a session"
                )
            number = self._next()
            terms = await self._ask(owner, LoanAsked(number, head.instance, begin.loan))
            pages = frozenset(terms.pages)
            if self._own is not owner or owner.is_over:
                raise StageRefusedError(f"{self._owner!r} has ended meanwhile")
            self._loan = loan = StageSession(number, head, pages)
            loan.terms = terms
            owner.lent = pages
            self._ending = asyncio.create_task(self._take_back(loan, owner))
            return loan

    async def _ask(self, owner: StageSession, question: LoanAsked) -> LendPages:
        """Ask the owner for a loan; raises StageRefusedError if it does not lend."""
        answer: asyncio.Future[LendPages | str] = asyncio.get_running_loop().create_future()
        self._asked = question.loan, answer
        try:
            await owner.tell(question)
            if not await owner.answered(answer, _ASKED_S):
                raise StageRefusedError(f"{self._owner!r} has not answered")
        finally:
            self._asked = None
        if isinstance(found := answer.result(), str):
            raise StageRefusedError(found)
        return found

    # Parts that others bring.

    def receiving(self) -> StageSession | str:
        """Return the owner's session, or the reason why no parts are accepted: lent pages are no
        destination of replicas.
        """
        owner, loan = self._own, self._loan
        if owner is None or owner.is_over:
            return f"{self._owner!r} has no session"
        if self._lending.locked() or (loan is not None and not loan.is_over):
            return f"{self._owner!r} lends the stage"
        return owner

    async def offer(
        self, owner: StageSession, sender: InstanceId, offer: OfferParts
    ) -> TakeParts | str:
        """Pass an offer to the owner; return its answer, or the reason of a refusal.

        Raises:
            StageRefusedError: the session has ended.
        """
        self._offered += 1
        number = self._offered
        answer: asyncio.Future[TakeParts | str] = asyncio.get_running_loop().create_future()
        self._offers[number] = offer, answer
        try:
            await owner.tell(PartsOffered(number, sender, offer.ranges, offer.are_sent))
            is_answered = await owner.answered(answer, _ASKED_S)
        finally:
            del self._offers[number]
        if self._own is not owner or owner.is_over:
            raise StageRefusedError(f"{self._owner!r} has ended meanwhile")
        return answer.result() if is_answered else f"{self._owner!r} has not answered"

    async def _take_back(self, loan: StageSession, owner: StageSession) -> None:
        await loan.over()
        if owner.lent is loan.pages:
            owner.lent = frozenset()
        await owner.tell(LoanOver(loan.number))


def check_version(begin: Begin) -> None:
    """Raises StageRefusedError if the version of the messages differs."""
    if begin.version != VERSION:
        raise StageRefusedError(f"version {begin.version}; allowed: {VERSION}")


def _check_taken(order: TakeParts, offer: OfferParts) -> None:
    count = sum(len(each.tags) for each in offer.ranges) if offer.are_sent else 0
    if len(order.held) != len(offer.ranges) or len(order.pages) != count:
        raise StageRefusedError(
            f"{len(order.pages)} pages of {len(order.held)} streams are taken; allowed: {count} of "
            f"{len(offer.ranges)}, as offered"
        )


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch; the stage's ranks check nothing themselves."""

    vocabulary: int
    positions: int
    pages: int
    page_size_tokens: int
    batch_tokens: int

    @classmethod
    def of(cls, config: ModelConfig, settings: EngineSettings) -> Self:
        return cls(
            config.vocab,
            min(settings.max_model_len, config.max_positions),
            settings.pages,
            settings.page_size_tokens,
            settings.max_batch_tokens,
        )

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raises StageRefusedError if a chunk exceeds the limits."""
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if not 0 < tokens <= self.batch_tokens:
            raise StageRefusedError(f"{tokens} tokens; allowed: 1 to {self.batch_tokens}")
        for number, chunk in enumerate(chunks):
            last = chunk.first_position + len(chunk.token_ids)
            spans = {
                "token ids": (chunk.token_ids, range(self.vocabulary)),
                "positions": ((chunk.first_position, last - 1), range(self.positions)),
                "pages": (chunk.pages, range(self.pages)),
                "number of pages": (
                    (len(chunk.pages),),
                    range(-(-last // self.page_size_tokens), self.pages + 1),
                ),
                "logits": ((chunk.logits,), range(len(chunk.token_ids) + 1)),
                "base": ((chunk.base,), range(MAX_RANKS)),
            }
            for name, (found, allowed) in spans.items():
                if not found or min(found) not in allowed or max(found) not in allowed:
                    raise StageRefusedError(
                        f"chunk {number}: {name} {list(found)[:8]}; allowed: {allowed.start} to "
                        f"{allowed.stop - 1}"
                    )
