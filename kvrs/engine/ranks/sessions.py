"""Sessions of a stage's host: which process of the instance it serves, and which orders it obeys.

    none --Begin--> open --its link of batches closes--> none, once its last order has ended
    open --Begin in an epoch that is not lower--> the same, then --> open

A host outlives the processes that use it. Each has a session, under the epoch of its start; every
order names both. A process in a lower epoch is refused, and so is an order of another session: one
that was stopped, or cut off, and goes on later reaches nothing. Pages that an order of a session
writes are not used in the next one before that order has ended.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Self

from kvrs.config.cluster import MOST_RANKS
from kvrs.config.engine import EngineSettings
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.ranks.link import VERSION, Begin, Ordered, StageChannel, StageLink
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.scheduling.sequences import Chunk
from kvrs.transfer.peers import Identity

log = logging.getLogger(__name__)


class StageRefusedError(TransferError):
    """An order, or a process, that the host does not serve; the message is for that process."""


class StageSession:
    """The use of a host by one process. Its links end together."""

    def __init__(self, number: int, head: Identity) -> None:
        self.number, self.head = number, head
        self._links: list[StageLink] = []
        self._over = asyncio.Event()

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
            if not self._links:
                self._over.set()

    def shut(self) -> None:
        for link in self._links:
            link.stream.shut()

    async def over(self) -> None:
        await self._over.wait()


class StageSessions:
    """One session at a time, of the instance that has the stage."""

    def __init__(self, owner: InstanceId) -> None:
        self._owner = owner
        self._epoch = 0  # The highest one so far.
        self._number = 0
        self._now: StageSession | None = None
        self._opening = asyncio.Lock()

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
        with session.using(link):
            yield session

    async def _begin(self, head: Identity, begin: object) -> StageSession:
        if not isinstance(begin, Begin):
            raise StageRefusedError(f"a message out of turn: {type(begin).__name__}")
        self._check(head, begin)
        if begin.channel is StageChannel.PAGES:
            now = self._now
            if now is None or now.is_over or begin.session != now.number:
                raise StageRefusedError(
                    f"session {begin.session}; allowed: the one that is open, "
                    f"{'none' if now is None or now.is_over else now.number}"
                )
            return now
        async with self._opening:
            # It may have waited beside one of a higher epoch.
            self._check(head, begin)
            self._epoch = head.epoch
            if self._now is not None:
                self._now.shut()
                await self._now.over()
            self._number += 1
            self._now = StageSession(self._number, head)
            log.info("session begins", extra={"session": self._number, "epoch": self._epoch})
            return self._now

    def _check(self, head: Identity, begin: Begin) -> None:
        if begin.version != VERSION:
            raise StageRefusedError(f"version {begin.version}; allowed: {VERSION}")
        if head.instance != self._owner:
            raise StageRefusedError(f"instance {head.instance!r}; allowed: {self._owner!r}")
        if head.epoch < self._epoch:
            raise StageRefusedError(f"epoch {head.epoch}; allowed: {self._epoch} or above")

    async def over(self) -> None:
        """Wait until none is open."""
        while self._now is not None and not self._now.is_over:
            await self._now.over()


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
                "base": ((chunk.base,), range(MOST_RANKS)),
            }
            for name, (found, allowed) in spans.items():
                if not found or min(found) not in allowed or max(found) not in allowed:
                    raise StageRefusedError(
                        f"chunk {number}: {name} {list(found)[:8]}; allowed: {allowed.start} to "
                        f"{allowed.stop - 1}"
                    )
