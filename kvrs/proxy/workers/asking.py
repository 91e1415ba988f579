"""A worker asks its supervisor for what all workers share."""

import asyncio
from collections.abc import Callable

import msgspec

from kvrs.errors import RequestError
from kvrs.proving import is_done_within
from kvrs.proxy.workers.channel import Channel, ChannelError
from kvrs.proxy.workers.limits import Give, Take, Taken
from kvrs.proxy.workers.messages import GIVE, GUESS, TAKE, TURN, TURN_OVER, packed, unpacked

_ANSWER_S = 2.0


class Asking:
    """What was granted to a request that has gone meanwhile is given back."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def take(self, asked: Take) -> Taken:
        """Raises RequestError: the supervisor does not answer."""

        def undo(answer: bytes) -> None:
            if unpacked(answer, Taken).excess is None:
                self.give(Give(asked.tenant, asked.size_bytes, asked.streams, asked.key))

        taken: Taken = unpacked(await self._ask(TAKE, packed(asked), undo), Taken)
        return taken

    def give(self, given: Give) -> None:
        self._channel.tell(GIVE, packed(given))

    async def guess(self, address: str) -> float:
        """A key from the address was wrong: seconds until its next try, 0: this one counts."""
        answer = await self._ask(GUESS, address.encode(), lambda _: None)
        return float(msgspec.msgpack.decode(answer, type=float))

    async def turn(self, key: str) -> Callable[[], None]:
        """Wait until no other request looks for the stream of this key; call what is returned when
        it is found, or begun.
        """

        def over() -> None:
            self._channel.tell(TURN_OVER, key.encode())

        await self._ask(TURN, key.encode(), lambda _: over())
        return over

    async def _ask(self, name: str, body: bytes, undo: Callable[[bytes], None]) -> bytes:
        def too_late(late: asyncio.Future[bytes]) -> None:
            if not late.cancelled() and late.exception() is None:
                undo(late.result())

        await asyncio.sleep(0)  # In a task from here on, which a timeout needs (kvrs/direct.py).
        answer: asyncio.Future[bytes] | None = None
        try:
            answer = self._channel.question(name, body)
            if await is_done_within(answer, _ANSWER_S):
                return answer.result()
        except asyncio.CancelledError:
            if answer is not None:
                answer.add_done_callback(too_late)
            raise
        except ChannelError:
            pass
        if answer is not None:
            answer.add_done_callback(too_late)
        raise RequestError("the proxy does not know its limits now", status=503)
