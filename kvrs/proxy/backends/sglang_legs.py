"""The two calls of one attempt at SGLang, prefill and decode: when one call ends early, the other
is of no use and is closed.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from kvrs.errors import KvrsError, UpstreamError
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.wire.sse import EventSplitter
from kvrs.proxy.wire.upstream import Need, Upstream

_ENDS = ("length", "stop")


class PrefillLeg:
    """Reader of prefill's answer. The answer's one token is ignored, since decode sends it too. At
    the end `found` is called with the prompt tokens that prefill had in its cache.
    """

    shortcut = None

    def __init__(self, found: Callable[[int], None] | None = None) -> None:
        self.flow: Upstream | None = None
        self._found = found
        self.is_over = False
        self._splitter = EventSplitter()
        self._finish: str | None = None
        self._cached_tokens: int | None = None

    def feed(self, data: bytes) -> Need:
        """Read a part of the answer. Raises UpstreamError: prefill gave up, or sent no answer."""
        for payload in self._splitter.feed(data):
            if payload == b"[DONE]":
                if self._finish not in _ENDS:
                    raise UpstreamError(f"prefill ended with {self._finish!r}")
                self.is_over = True
                if self._found is not None and self._cached_tokens is not None:
                    self._found(self._cached_tokens)
                return Need.END
            try:
                event = CHUNK.decode(payload)
            except UNREADABLE:
                raise UpstreamError("prefill sent an event that is not a completion") from None
            if event.error is not None:
                raise UpstreamError("prefill sent an error event")
            if event.usage is not None:
                self._cached_tokens = event.usage.cached_tokens
            for choice in event.choices or ():
                self._finish = choice.finish_reason or self._finish
        return Need.MORE

    def check_end(self) -> None:
        """Check that prefill's answer was complete. Raises UpstreamError: the answer was cut."""
        if not self.is_over:
            raise UpstreamError("prefill ended without a finish reason and [DONE]")


class Window:
    """A first-in, first-out limit on the pairs that run at one decode server. Without it, a prefill
    would wait for its decode in SGLang until its timeout.
    """

    def __init__(self) -> None:
        self.most: float = math.inf
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for turn in self._waiting)

    async def __aenter__(self) -> None:
        if self._running < self.most and not self._waiting:
            self._running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._running -= 1
        while self._waiting and self._running < self.most:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)


async def with_both(
    decode: Coroutine[Any, Any, None], prefill: Coroutine[Any, Any, None], leg: PrefillLeg
) -> None:
    """Run both calls until decode ends. When either call fails or decode ends, the other call is
    closed.

    Raises:
        KvrsError: the error of decode, or of prefill with `is_of_prefill` set.
    """
    legs = asyncio.create_task(decode), asyncio.create_task(prefill)
    try:
        await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
        decoding, prefilling = legs
        if not decoding.done():
            try:
                prefilling.result()
                leg.check_end()
            except KvrsError as error:
                error.is_of_prefill = True
                raise
            await asyncio.wait((decoding,))
        decoding.result()
    finally:
        for task in legs:
            if not task.cancel() and not task.cancelled():
                # Read the error, so that asyncio does not log it as never retrieved.
                task.exception()
