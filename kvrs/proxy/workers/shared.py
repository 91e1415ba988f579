"""The supervisor's answers to workers that ask for what they share."""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from kvrs.proxy.workers.channel import Handler
from kvrs.proxy.workers.limits import Give, SharedLimits, Take, Turns
from kvrs.proxy.workers.loads import Booked, Loads
from kvrs.proxy.workers.messages import BOOKED, GIVE, GUESS, TAKE, TURN, TURN_OVER, packed, unpacked


class SharedByWorkers:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limits = SharedLimits()
        self._turns = Turns()
        self.loads = Loads()

    def handlers(self, worker: int) -> dict[str, Handler]:
        """Of the channel to this worker."""
        return {
            TAKE: partial(self._take, worker),
            GIVE: partial(self._give, worker),
            GUESS: self._guess,
            TURN: partial(self._begin_turn, worker),
            TURN_OVER: self._end_turn,
            BOOKED: partial(self._note_booked, worker),
        }

    def end(self, worker: int) -> None:
        """Its process has ended."""
        self._limits.end(worker)
        self._turns.end_all(worker)
        self.loads.end(worker)

    def _take(self, worker: int, body: bytes) -> bytes:
        return packed(self._limits.take(worker, unpacked(body, Take)))

    def _give(self, worker: int, body: bytes) -> bytes:
        self._limits.give(worker, unpacked(body, Give))
        return b""

    def _guess(self, body: bytes) -> bytes:
        return msgspec.msgpack.encode(self._limits.guess(body.decode(), self._clock()))

    async def _begin_turn(self, worker: int, body: bytes) -> bytes:
        begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def begin() -> None:
            if not begun.done():
                begun.set_result(b"")

        self._turns.begin(body.decode(), worker, begin)
        return await begun

    def _end_turn(self, body: bytes) -> bytes:
        self._turns.end(body.decode())
        return b""

    def _note_booked(self, worker: int, body: bytes) -> bytes:
        self.loads.note(worker, unpacked(body, dict[str, Booked]))
        return b""
