"""What a worker asks its supervisor for."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvloop

from kvrs.errors import RequestError
from kvrs.proxy.workers import asking
from kvrs.proxy.workers.asking import Asking
from kvrs.proxy.workers.channel import Channel
from kvrs.proxy.workers.messages import GUESS


@asynccontextmanager
async def supervised(wait_s: float) -> AsyncIterator[Asking]:
    """The worker's side; the other one answers every guess after this time, in its own thread."""
    own, other = socket.socketpair()
    answering = threading.Thread(target=_answer_one, args=(other, wait_s))
    answering.start()
    channel = Channel({}, lambda: None)
    await channel.open(own)
    try:
        yield Asking(channel)
    finally:
        channel.close()
        await asyncio.to_thread(answering.join)


def _answer_one(end: socket.socket, wait_s: float) -> None:
    async def answer(_: bytes) -> bytes:
        await asyncio.sleep(wait_s)
        return msgspec.msgpack.encode(1.5)

    async def serve() -> None:
        gone = asyncio.Event()
        await Channel({GUESS: answer}, gone.set).open(end)
        await gone.wait()

    asyncio.run(serve())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_answer_that_came_during_a_stall_counts(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Coroutine[Any, Any, float]], float]
) -> None:
    """The worker stood still, not its supervisor: no client is refused for that."""
    monkeypatch.setattr(asking, "_ANSWER_S", 0.2)

    async def ask() -> float:
        async with supervised(wait_s=0.0) as shared:
            loop = asyncio.get_running_loop()
            asked = asyncio.create_task(shared.guess("10.0.0.1"))
            # Before anything is read: the question is sent, and its time is over at the end.
            loop.call_soon(lambda: loop.call_soon(time.sleep, 1.0))
            return await asked

    assert run(ask()) == 1.5


async def test_a_supervisor_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a limit is unknown then: the request gets 503."""
    monkeypatch.setattr(asking, "_ANSWER_S", 0.05)

    async with supervised(wait_s=60.0) as shared:
        with pytest.raises(RequestError, match="does not know its limits") as refused:
            await shared.guess("10.0.0.1")

    assert refused.value.status == 503
