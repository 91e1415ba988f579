"""The two calls of one attempt at SGLang, prefill and decode: when one call ends early, the other
is of no use and is closed, but not while KV may be moving between them.

| the attempt ends                                    | the legs that are left             |
| --------------------------------------------------- | ---------------------------------- |
| after decode's first event: all KV is there         | are closed at once                 |
| before both calls were sent, or one was not accepted | are closed at once: nothing moves |
| in between, for whatever reason                     | are detached                       |

A detached pair is read on and dropped until decode's first event, the end of both calls, or
TRANSFER_S: SGLang gives the pages of an aborted request to others, and prefill may still write.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from kvrs.core.model.member import TRANSFER_S
from kvrs.errors import KvrsError, UpstreamError
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.backends.bodies import Detached, Keeper
from kvrs.proxy.wire.errors import BusyError, ConnectionLostError, DeniedError
from kvrs.proxy.wire.sse import EventSplitter
from kvrs.proxy.wire.upstream import Need, Reader, Shortcut, Upstream

_ENDS = ("length", "stop")
# Errors of calls that the server has not accepted, so that no KV moves.
_NOT_ACCEPTED = (RefusedError, BusyError, DeniedError)


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

    def detach(self) -> None:
        """Drop the function that would learn how many tokens the cache had."""
        self._found = None


class DecodeLeg:
    """Reader of decode's answer, which passes it on to the attempt's reader. Once it is detached,
    it needs nothing but the first event.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader: Reader | None = reader  # None: detached.
        self._first: EventSplitter | None = EventSplitter()  # None: an event has come.
        self.is_sent = False

    @property
    def has_begun(self) -> bool:
        """True if an event has come, and so all KV is there."""
        return self._first is None

    @property
    def flow(self) -> Upstream | None:
        return None if self._reader is None else self._reader.flow

    @flow.setter
    def flow(self, flow: Upstream | None) -> None:
        self.is_sent = True
        if self._reader is not None:
            self._reader.flow = flow

    @property
    def shortcut(self) -> Shortcut | None:
        return None if self._reader is None else self._reader.shortcut

    def feed(self, data: bytes) -> Need:
        if self._first is not None and self._first.feed(data):
            self._first = None
        if self._reader is not None:
            return self._reader.feed(data)
        return Need.NOTHING if self.has_begun else Need.MORE

    def detach(self) -> None:
        self._reader = None


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

    async def enter(self) -> None:
        """Wait for a place, which `leave` frees."""
        if self._running < self.most and not self._waiting:
            self._running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self._running -= 1
        while self._waiting and self._running < self.most:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)


class Pair:
    """The two calls of an attempt. `left` is called when both are over."""

    def __init__(self, decode: DecodeLeg, prefill: PrefillLeg, left: Callable[[], None]) -> None:
        self._decode, self._prefill, self._left = decode, prefill, left
        self._keeper: Keeper | None = None

    async def run(
        self,
        decode: Coroutine[Any, Any, None],
        prefill: Coroutine[Any, Any, None],
        keeper: Keeper | None,
    ) -> None:
        """Run both calls until decode ends. When either call fails or decode ends, the other call
        is closed, or left to the keeper while KV may be moving.

        Raises:
            KvrsError: the error of decode, or of prefill with `is_of_prefill` set.
        """
        self._keeper = keeper
        if keeper is not None:
            keeper.begin()
        self._decoding, self._prefilling = legs = tuple(map(asyncio.create_task, (decode, prefill)))
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if not self._decoding.done():
                try:
                    self._prefilling.result()
                    self._prefill.check_end()
                except KvrsError as error:
                    error.is_of_prefill = True
                    raise
                await asyncio.wait((self._decoding,))
            self._decoding.result()
        finally:
            if keeper is None or not self._is_in_flight():
                self._close()
            else:
                self._detach(keeper)

    def _is_in_flight(self) -> bool:
        """Return whether KV may be moving from prefill to decode."""
        is_sent = self._decode.is_sent and self._prefill.flow is not None
        if not is_sent or self._decode.has_begun:
            return False
        return not any(isinstance(error, _NOT_ACCEPTED) for error in self._errors())

    def _detach(self, keeper: Keeper) -> None:
        self._decode.detach()
        self._prefill.detach()
        if self._is_lost():
            keeper.doubt()
        if self._decoding.done() and self._prefilling.done():
            self._close()
            return
        end = self._end(keeper)
        if not keeper.keep(end):
            end.close()
            self._close()

    def _errors(self) -> list[BaseException]:
        """Return the errors of the legs that are over."""
        done = [leg for leg in (self._decoding, self._prefilling) if leg.done()]
        return [error for leg in done if not leg.cancelled() and (error := leg.exception())]

    def _is_lost(self) -> bool:
        return any(isinstance(error, ConnectionLostError) for error in self._errors())

    def _close(self) -> None:
        for leg in (self._decoding, self._prefilling):
            if not leg.cancel() and not leg.cancelled():
                # Read the error, so that asyncio does not log it as never retrieved.
                leg.exception()
        self._left()
        if self._keeper is not None:
            self._keeper.end()

    async def _end(self, keeper: Keeper) -> Detached:
        """Wait until no KV moves any more, and close both calls."""
        was_lost, outcome = self._is_lost(), Detached.CLOSED
        try:
            async with asyncio.timeout(TRANSFER_S):
                await asyncio.wait((self._decoding,))
                if not self._decode.has_begun:
                    await asyncio.wait((self._prefilling,))
            outcome = Detached.FAILED
            if self._decode.has_begun:
                outcome = Detached.BEGAN
            elif self._is_lost():
                outcome = Detached.LOST
        except TimeoutError:
            outcome = Detached.HUNG
        finally:
            self._close()
        if outcome is Detached.HUNG or (outcome is Detached.LOST and not was_lost):
            keeper.doubt()
        return outcome
