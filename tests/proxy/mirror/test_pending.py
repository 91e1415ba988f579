"""The order and grouping of updates that go to a peer, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvrs.proxy.mirror.replication import Pending
from kvrs_testkit.virtual_time import run_virtually


def virtually(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test, in virtual time."""

    def run() -> None:
        run_virtually(work())

    run.__name__, run.__doc__ = work.__name__, work.__doc__
    return run


async def next_of(pending: Pending[str]) -> tuple[bool, list[str]]:
    async with asyncio.timeout(5):
        is_all = await pending.next()
    return is_all, list(pending.take(urgent_only=not is_all))


@virtually
async def test_an_urgent_stream_goes_alone_and_the_others_when_the_first_is_due() -> None:
    """A client that waits for the mirror does not hurry what others have gathered; and what has
    gone does not go again.
    """
    pending = Pending[str]()
    pending.add("late", 60.0)
    pending.add("soon", 0.2)
    pending.add("urgent", 0.05)
    pending.add("urgent", 0.0)

    first = await next_of(pending)
    pending.add("soon", 60.0)
    second = await next_of(pending)

    assert first == (False, ["urgent"])
    assert second == (True, ["late", "soon"])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pending.next()


@virtually
async def test_what_is_hurried_or_due_is_not_kept_waiting_by_what_is_urgent() -> None:
    """Where every stream is urgent, copies of records go too."""
    pending = Pending[str]()
    pending.add("gathered", 60.0)
    pending.add("urgent", 0.0)
    pending.hurry()

    assert await next_of(pending) == (True, ["gathered", "urgent"])


@virtually
async def test_a_waiting_sender_notices_what_comes() -> None:
    """Whatever it has waited for before."""
    pending = Pending[str]()
    pending.add("late", 60.0)
    waiting = asyncio.create_task(next_of(pending))
    await asyncio.sleep(0.02)
    pending.add("urgent", 0.0)
    first = await waiting
    waiting = asyncio.create_task(next_of(pending))
    await asyncio.sleep(0.02)
    pending.add("soon", 0.01)

    assert first == (False, ["urgent"])
    assert await waiting == (True, ["late", "soon"])


@virtually
async def test_a_lost_peer_gets_nothing() -> None:
    pending = Pending[str]()
    pending.add("a", 0.0)
    pending.add("b", 0.01)

    pending.clear()

    assert await next_of(pending) == (True, [])
