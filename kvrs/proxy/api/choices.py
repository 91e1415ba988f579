"""Several choices in one response: each is a stream of its own, and all share a connection and a
head.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvrs.core.model.streams import Complete
from kvrs.protocol.openai.chunks import Choice, usage_of
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.open_stream import Client, Outcome
from kvrs.proxy.wire.events import PROMPT_TOKEN_IDS, cut_list, number_choice
from kvrs.proxy.wire.journal import Journal


class Merger:
    """Holds the head that all choices of a response share, taken from the first event."""

    def __init__(self) -> None:
        self.head: bytes | None = None


class ChoiceClient:
    """Writes a choice to the common response under its own index, after the prompt if that is
    echoed.
    """

    direct = None
    take_token = None

    def __init__(
        self, inner: Client, merger: Merger, index: int, journal: Journal, echo: str | None
    ) -> None:
        self._inner = inner
        self._merger = merger
        self._index = index
        self._journal = journal
        self._echo = echo

    @property
    def blocked(self) -> bool:
        return self._inner.blocked

    def when_free(self, resume: Callable[[], None]) -> None:
        self._inner.when_free(resume)

    def send(self, events: Sequence[bytes]) -> None:
        head = self._journal.head
        assert head is not None
        if self._merger.head is None:
            self._merger.head = head
        merged = [
            self._merger.head + number_choice(event[len(head) :], self._index) for event in events
        ]
        if self._echo is not None:
            # The event of the echo, which comes first, has the prompt's ids.
            merged[0] = cut_list(merged[0], PROMPT_TOKEN_IDS)
            merged.insert(0, self._echoed(self._merger.head, self._echo))
            self._echo = None
        self._inner.send(merged)

    def _echoed(self, head: bytes, text: str) -> bytes:
        journal = self._journal
        choice = Choice(text=text, index=self._index)
        choice.prompt_token_ids = [*(journal.prompt_ids or ())]
        if journal.wants_ids:
            choice.token_ids = []
        parsed, usage = journal.parsed, None
        if parsed.request.wants_each_usage:
            usage = usage_of(journal.prompt_tokens, 0, None)
        return parsed.endpoint.event(head, [choice], usage)


def run_together(driver: Driver, streams: Sequence[tuple[Journal, Client]]) -> Awaitable[Outcome]:
    """Run all choices to their end; the first failure ends the others and the response."""
    return driver.run(*streams[0]) if len(streams) == 1 else _run_all(driver, streams)


async def _run_all(driver: Driver, streams: Sequence[tuple[Journal, Client]]) -> Outcome:
    tasks = [asyncio.ensure_future(driver.run(journal, client)) for journal, client in streams]
    try:
        for ended in asyncio.as_completed(tasks):
            if (outcome := await ended) != Complete():
                return outcome
        return Complete()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
