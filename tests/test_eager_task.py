"""Coroutines that go on within the callback that ends what they wait for."""

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any

import pytest

from kvrs.process.eager_task import EagerTask, Signal

NAME = ContextVar("NAME", default="")


class Log:
    """The course of a coroutine; `ends` has its errors."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ends: list[BaseException | None] = []

    async def wait(self, for_what: Awaitable[Any]) -> None:
        self.said.append("began")
        try:
            self.said.append(f"has {await for_what}")
        except asyncio.CancelledError:
            self.said.append("cancelled")
            raise

    def task(self, for_what: Awaitable[Any]) -> EagerTask[None]:
        return EagerTask(self.wait(for_what), lambda _, error: self.ends.append(error))


async def turn() -> None:
    """All that is due in this turn of the event loop, and what follows from that in the next."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_coroutine_begins_in_the_call_and_goes_on_within_that_of_the_result() -> None:
    log, signal = Log(), Signal[int]()
    log.task(signal).begin()
    assert log.said == ["began"]
    signal.set_result(3)
    assert (log.said, log.ends) == (["began", "has 3"], [None])


async def test_an_exception_of_a_signal_is_raised_within_its_call() -> None:
    log, signal = Log(), Signal[int]()
    log.task(signal).begin()
    signal.set_exception(OSError("gone"))
    (error,) = log.ends
    assert isinstance(error, OSError)


async def test_a_signal_that_is_set_already_is_not_waited_for() -> None:
    log, signal = Log(), Signal[int]()
    signal.set_result(3)
    log.task(signal).begin()
    assert log.said == ["began", "has 3"]


async def test_at_another_future_it_goes_on_in_a_turn_of_the_event_loop() -> None:
    log, future = Log(), asyncio.get_running_loop().create_future()
    log.task(future).begin()
    future.set_result(3)
    assert log.said == ["began"]
    await turn()
    assert log.said == ["began", "has 3"]


async def test_a_task_can_wait_for_a_signal() -> None:
    log, signal = Log(), Signal[int]()
    task = asyncio.create_task(log.wait(signal))
    await turn()
    signal.set_result(3)
    await task
    assert log.said == ["began", "has 3"]


async def test_one_that_begins_soon_begins_in_a_turn_of_its_own() -> None:
    log, signal = Log(), Signal[int]()
    log.task(signal).begin_soon()
    assert log.said == []
    await turn()
    assert log.said == ["began"]


async def test_the_current_task_is_that_of_the_coroutine_and_then_the_outer_one_again() -> None:
    found: list[object] = []

    async def note(signal: Signal[None]) -> None:
        found.append(asyncio.current_task())
        await signal
        found.append(asyncio.current_task())

    signal, outer = Signal[None](), asyncio.current_task()
    task = EagerTask(note(signal))
    task.begin()
    assert asyncio.current_task() is outer
    signal.set_result(None)
    assert asyncio.current_task() is outer
    assert found == [task, task]


async def test_its_context_is_a_copy() -> None:
    found = []

    async def note(signal: Signal[None]) -> None:
        NAME.set(NAME.get() + " inside")
        await signal
        found.append(NAME.get())

    NAME.set("outer")
    signal = Signal[None]()
    EagerTask(note(signal)).begin()
    NAME.set("another")
    signal.set_result(None)
    assert (found, NAME.get()) == (["outer inside"], "another")


@pytest.mark.parametrize("kind", [Signal, asyncio.Future])
async def test_a_cancelled_coroutine_is_told_in_the_next_turn(kind: type[Any]) -> None:
    log, awaited = Log(), kind()
    task = log.task(awaited)
    task.begin()
    assert task.cancel()
    assert log.said == ["began"]
    await turn()
    assert log.said == ["began", "cancelled"]
    assert isinstance(log.ends[0], asyncio.CancelledError)
    assert awaited.cancelled()
    assert not task.cancel()


async def test_one_that_is_cancelled_before_it_begins_ends_without_a_step() -> None:
    log = Log()
    task = log.task(Signal[int]())
    task.cancel()
    task.begin()
    await turn()
    assert log.said == []
    assert isinstance(log.ends[0], asyncio.CancelledError)


@pytest.mark.parametrize("kind", [Signal, asyncio.Future])
async def test_one_that_cancels_itself_ends_where_it_waits_next(kind: type[Any]) -> None:
    log, awaited = Log(), kind()

    async def work() -> None:
        task.cancel()
        await log.wait(awaited)

    task: EagerTask[None] = EagerTask(work(), lambda _, error: log.ends.append(error))
    task.begin()
    await turn()
    assert log.said == ["began", "cancelled"]
    assert isinstance(log.ends[0], asyncio.CancelledError)


async def test_a_timeout_of_asyncio_ends_its_block_alone() -> None:
    said = []

    async def work() -> None:
        try:
            async with asyncio.timeout(0.001):
                await Signal[None]()
        except TimeoutError:
            said.append("too late")
        await asyncio.sleep(0)
        said.append("on")

    done = asyncio.Event()
    EagerTask(work(), lambda *_: done.set()).begin()
    await done.wait()
    assert said == ["too late", "on"]


async def test_an_end_that_is_not_taken_leaves_the_signal_whole() -> None:
    """Others are waited for in the same loop."""
    signal, told = Signal[int](), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def ended(*_: object) -> None:
        raise ValueError("a bug")

    EagerTask(Log().wait(signal), ended).begin()
    signal.set_result(3)
    assert [type(each["exception"]) for each in told] == [ValueError]


async def test_a_signal_that_another_one_cancels_ends_its_task() -> None:
    log, signal = Log(), Signal[int]()
    log.task(signal).begin()
    signal.cancel()
    await turn()
    assert log.said == ["began", "cancelled"]
