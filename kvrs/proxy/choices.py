"""Several choices in one response: each is a stream of its own, and their events share one connection and one head."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvrs.protocol.openai import Choice
from kvrs.proxy.clients import Client
from kvrs.proxy.journal import Journal
from kvrs.proxy.sse import number_choice
from kvrs.proxy.streams import Complete, Outcome


class Merger:
    """What the choices of one response have in common: the head of whichever event came first."""

    def __init__(self) -> None:
        self.head: bytes | None = None


class ChoiceClient:
    """One choice's way into the common response: under its own index, after the echo of the prompt if there is one."""

    def __init__(self, inner: Client, merger: Merger, index: int, journal: Journal, echo: str | None) -> None:
        self._inner = inner
        self._merger = merger
        self._index = index
        self._journal = journal
        self._echo = echo

    @property
    def blocked(self) -> bool:
        return self._inner.blocked

    async def send(self, events: Sequence[bytes]) -> None:
        head = self._journal.head
        assert head is not None
        if self._merger.head is None:
            self._merger.head = head
        merged = [self._merger.head + number_choice(event[len(head) :], self._index) for event in events]
        if self._echo is not None:
            merged.insert(0, self._echoed(self._merger.head, self._echo))
            self._echo = None
        await self._inner.send(merged)

    def _echoed(self, head: bytes, text: str) -> bytes:
        choice = Choice(text=text, index=self._index)
        if self._journal.wants_ids:
            choice.token_ids = []
        return self._journal.asked.form.event(head, [choice])


async def run_together(
    run: Callable[[Journal, Client], Awaitable[Outcome]], streams: Sequence[tuple[Journal, Client]]
) -> Outcome:
    """See all choices through. The response fails as soon as one of them does, and takes the others with it."""
    if len(streams) == 1:
        return await run(*streams[0])
    tasks = [asyncio.ensure_future(run(journal, client)) for journal, client in streams]
    try:
        for ended in asyncio.as_completed(tasks):
            if (outcome := await ended) != Complete():
                return outcome
        return Complete()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
