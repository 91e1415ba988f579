"""Sessions of a stage's host: which processes it serves, and which orders it obeys.

    none --Begin--> open --its link of batches closes--> none, once its last order has ended
    open --Begin in an epoch that is not lower--> the same, then --> open

A host outlives the processes that use it. Each has a session, under the epoch of its start; every
order names both. A process in a lower epoch is refused, and so is an order of another session: one
that was stopped, or cut off, and goes on later reaches nothing. Pages that an order of a session
writes are not used in the next one before that order has ended.

The instance that has the stage, its owner, has one session. While that is open another one of the
group may have one beside it, a loan: over pages of the owner's, which it gives and does not use
meanwhile. Every session of the owner begins without a loan; those of its batches and of the
borrower's are computed as they come, and neither has more than one at a time.

Hosts of others bring parts of pages in a session of the owner, which says into which (`replicate`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from kvrs.config.cluster import MAX_RANKS
from kvrs.config.engine import EngineSettings
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

_ASKED_S = 5.0  # For an owner to say whether it lends.


class StageRefusedError(TransferError):
    """An order, or a process, that the host does not serve; the message is for that process."""


class StageSession:
    """The use of a host by one process. Its links end together."""

    def __init__(self, number: int, head: Identity, pages: frozenset[int] | None = None) -> None:
        """`pages`: those of a loan; None: it is the owner's."""
        self.number, self.head, self.pages = number, head, pages
        self.terms: LendPages | None = None  # Of a loan.
        self.lent: frozenset[int] = frozenset()  # By the owner, in this session.
        self._links: list[StageLink] = []  # That of batches first.
        self._beside: list[StageLink] = []
        self._ending, self._over = asyncio.Event(), asyncio.Event()

    def check(self, order: Ordered) -> None:
        """Raises StageRefusedError: it is not of this session."""
        if order.epoch != self.head.epoch:
            raise StageRefusedError(
                f"an order of epoch {order.epoch}; allowed: {self.head.epoch}, the session's"
            )
        if order.session != self.number:
            raise StageRefusedError(
                f"an order of session {order.session}; allowed: {self.number}, the link's"
            )

    def check_pages(self, pages: Collection[int]) -> None:
        """Raises StageRefusedError: some are not this session's."""
        if self.pages is None:
            others = self.lent.intersection(pages)
        else:
            others = frozenset(pages) - self.pages
        if others:
            allowed = "those that are not lent" if self.pages is None else "those that are lent"
            raise StageRefusedError(f"pages {sorted(others)[:8]}; allowed: {allowed}")

    @property
    def is_over(self) -> bool:
        """Nothing of it is carried out any more."""
        return self._over.is_set()

    @contextmanager
    def using(self, link: StageLink) -> Iterator[None]:
        """While a link is served. The end of one is the end of all."""
        self._links.append(link)
        try:
            yield
        finally:
            self._links.remove(link)
            self.shut()
            self._settle()

    @contextmanager
    def beside(self, link: StageLink) -> Iterator[None]:
        """While a link is served that ends with the others, and they not with it."""
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
        """Send it on the link of batches, if there is one; its loss is found by others as well."""
        if self._links:
            with suppress(TransferError):
                await self._links[0].send(message)

    def shut(self) -> None:
        self._ending.set()
        for link in (*self._links, *self._beside):
            link.stream.shut()

    async def answered(self, answer: "asyncio.Future[Any]", patience_s: float) -> bool:
        """Wait for an answer of its process; False: none comes, or not so soon."""
        ending = asyncio.create_task(self._ending.wait())
        try:
            waited = asyncio.wait(
                {answer, ending}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            return answer in (await waited)[0]
        finally:
            ending.cancel()

    async def end(self) -> None:
        """Let it end, and wait until it has."""
        self.shut()
        await self._over.wait()

    async def over(self) -> None:
        await self._over.wait()


class StageSessions:
    """One session of the instance that has the stage, and one of a borrower."""

    def __init__(
        self, owner: InstanceId, pages: int, borrowers: Collection[InstanceId] = ()
    ) -> None:
        """`pages`: of an instance; `borrowers`: those that may ask for a loan."""
        self._owner, self._pages, self._borrowers = owner, pages, frozenset(borrowers)
        self._epochs: dict[InstanceId, int] = {}  # The highest one so far of each.
        self._number = 0
        self._own: StageSession | None = None
        self._loan: StageSession | None = None
        self._opening, self._lending = asyncio.Lock(), asyncio.Lock()
        # A loan of which the owner has not answered yet: its number, and its pages or why not.
        self._asked: tuple[int, asyncio.Future[LendPages | str]] | None = None
        self._ending: asyncio.Task[None] | None = None
        # Offers of parts of which the owner has not said yet what comes, by their numbers.
        self._offers: dict[int, tuple[OfferParts, asyncio.Future[TakeParts | str]]] = {}
        self._offered = 0

    @asynccontextmanager
    async def of(
        self, link: StageLink, head: Identity, begin: object
    ) -> AsyncIterator[StageSession]:
        """The session of a new link, by its first message, while it is served: for batches a new
        one, once the one before is over.

        Raises:
            StageRefusedError: there is none for it.
        """
        session = await self._begin(head, begin)
        is_beside = isinstance(begin, Begin) and begin.channel is StageChannel.REPLICAS
        with session.beside(link) if is_beside else session.using(link):
            yield session

    def answered(self, order: OwnerAnswer) -> bool:
        """Take the owner's answer; False: the other one does not wait any more.

        Raises:
            StageRefusedError: it does not fit the question.
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
        """Wait until the owner has none, and end one of a borrower."""
        while self._own is not None and not self._own.is_over:
            await self._own.over()
        await self.end_loan()

    async def end_loan(self) -> None:
        """Let the session of a borrower end, if there is one."""
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
            # It may have waited beside one of a higher epoch.
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
                f"instance {head.instance!r} asks for no loan; allowed: one of pages of "
                f"{self._owner!r}, whose stage it is"
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
                        f"a loan to {head.instance!r}; allowed: one at a time, "
                        f"{before.head.instance!r} has it"
                    )
                await self.end_loan()
            if (owner := self._own) is None or owner.is_over:
                raise StageRefusedError(
                    f"a loan without a session of {self._owner!r}; allowed: while it has one"
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
        """Raises StageRefusedError: the owner does not lend."""
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
        """The session in which parts may come, or why there is none: what is lent is no target of
        replicas.
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
        """Ask the owner what it takes of it; its answer, or why it takes nothing.

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
    """Raises StageRefusedError: it speaks otherwise."""
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
    """Limits of a batch for a stage's ranks, which check nothing themselves."""

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
        """Raises StageRefusedError: a chunk exceeds them."""
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
