"""Tasks that run at once when they begin, and when that has come for which they wait."""

import asyncio
import gc
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from kvrs.eager_tasks import EagerFuture, EagerTask

NAME: ContextVar[str] = ContextVar("NAME", default="")


class Ended:
    """How a task ended."""

    def __init__(self) -> None:
        self.times = 0
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, task: EagerTask, result: Any, error: BaseException | None) -> None:
        self.times += 1
        self.result, self.error = result, error


def begun(work: Coroutine[Any, Any, Any]) -> tuple[EagerTask, Ended]:
    ended = Ended()
    task = EagerTask(work, ended)
    task.go_on()
    return task, ended


def new_future() -> EagerFuture[str]:
    return EagerFuture(asyncio.get_running_loop())


async def test_a_task_runs_within_the_calls_that_begin_it_and_give_what_it_waits_for() -> None:
    """No turn of the event loop lies in between."""
    future, steps = new_future(), []

    async def work() -> str:
        steps.append("begun")
        steps.append(await future)
        return "end"

    _, ended = begun(work())
    assert steps == ["begun"]
    future.set_result("come")

    assert steps == ["begun", "come"]
    assert (ended.times, ended.result, ended.error) == (1, "end", None)


@pytest.mark.parametrize("result", [None, "come", (1, 2), StopIteration(3)], ids=repr)
async def test_what_waits_holds_the_future_alone(result: Any) -> None:
    """No generator beside it, for as long as it waits; the result is passed on as it is."""
    future: EagerFuture[Any] = EagerFuture(asyncio.get_running_loop())
    work: Any = _wait_for(future)
    _, ended = begun(work)

    held = work.cr_await
    future.set_result(result)

    assert held is future
    assert (ended.times, ended.result, ended.error) == (1, result, None)


async def test_an_error_is_raised_where_it_is_waited_for() -> None:
    future = new_future()

    async def work() -> str:
        try:
            return await future
        except ValueError as error:
            return f"caught {error}"

    _, ended = begun(work())
    future.set_exception(ValueError("it"))
    await asyncio.sleep(0)

    assert ended.result == "caught it"


async def test_a_future_that_is_done_is_not_waited_for() -> None:
    future = new_future()
    future.set_result("before")

    _, ended = begun(_wait_for(future))

    assert ended.result == "before"


async def test_a_bug_ends_the_task_with_its_error() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    _, ended = begun(work())

    assert isinstance(ended.error, ZeroDivisionError)


async def test_a_task_is_cancelled_in_a_turn_of_its_own() -> None:
    """It may itself, or what it called, be what cancels it."""
    future = new_future()
    task, ended = begun(_wait_for(future))

    task.cancel()
    assert not ended.times
    assert future.done()
    await asyncio.sleep(0)

    assert isinstance(ended.error, asyncio.CancelledError)
    assert not task.cancel()


async def test_a_task_that_cancels_itself_is_cancelled_at_its_next_wait() -> None:
    tasks: list[EagerTask] = []

    async def work() -> None:
        tasks[0].cancel()
        steps.append("goes on")
        await new_future()

    steps: list[str] = []
    ended = Ended()
    tasks.append(EagerTask(work(), ended))
    tasks[0].go_on()
    await asyncio.sleep(0)

    assert steps == ["goes on"]
    assert isinstance(ended.error, asyncio.CancelledError)


async def test_a_task_that_has_not_begun_is_cancelled_before_its_first_step() -> None:
    future, ended = new_future(), Ended()
    task = EagerTask(_wait_for(future), ended)

    task.cancel()
    task.go_on()

    assert isinstance(ended.error, asyncio.CancelledError)


async def test_a_cancellation_counts_when_what_is_waited_for_came_in_the_same_turn() -> None:
    """Tasks of asyncio do the same: a future is done before its task hears of it."""
    future = asyncio.get_running_loop().create_future()
    task, ended = begun(_wait_for(future))

    future.set_result("come")
    task.cancel()
    await asyncio.sleep(0)

    assert isinstance(ended.error, asyncio.CancelledError)


async def test_timeouts_sleeps_and_task_groups_work_in_it() -> None:
    """It is the current task to all that it calls."""

    async def work() -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        try:
            async with asyncio.timeout(0.001):
                await new_future()
        except TimeoutError:
            pass
        async with asyncio.TaskGroup() as group:
            made = group.create_task(asyncio.sleep(0.001, "grouped"))
        return f"{await asyncio.to_thread(str, 1)} {made.result()}"

    task, ended = begun(work())
    async with asyncio.timeout(60):
        while not ended.times:
            await asyncio.sleep(0.001)

    assert ended.result == "1 grouped"
    assert task.cancelling() == 0


async def test_the_task_that_is_interrupted_is_current_again_afterwards() -> None:
    future, seen = new_future(), list[Any]()

    async def work() -> None:
        seen.append(asyncio.current_task())
        await future
        seen.append(asyncio.current_task())

    outer = asyncio.current_task()
    task, _ = begun(work())
    assert asyncio.current_task() is outer
    future.set_result("")

    assert asyncio.current_task() is outer
    assert seen == [task, task]


async def test_each_task_keeps_its_own_context() -> None:
    """It goes on within calls that know nothing of its request."""
    future, seen = new_future(), []

    async def work() -> None:
        NAME.set("its own")
        await future
        seen.append(NAME.get())

    begun(work())
    assert NAME.get() == ""
    future.set_result("")

    assert seen == ["its own"]


async def test_a_task_of_asyncio_may_wait_for_such_a_future() -> None:
    future, failing = new_future(), new_future()
    waiting = asyncio.create_task(_wait_for(future))
    failed = asyncio.create_task(_wait_for(failing))
    cancelled = asyncio.create_task(_wait_for(new_future()))
    await asyncio.sleep(0)

    future.set_result("come")
    failing.set_exception(ValueError("it"))
    cancelled.cancel()

    assert await waiting == "come"
    with pytest.raises(ValueError, match="it"):
        await failed
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_what_has_ended_by_an_error_is_no_garbage_in_a_circle() -> None:
    """An open stream's memory is free when it ends, not at the next collection."""
    gc.collect()
    gc.disable()
    try:
        future, kinds = new_future(), list[type]()
        task = EagerTask(_wait_for(future), lambda _, result, error: kinds.append(type(error)))
        task.go_on()
        future.set_exception(ValueError())
        await asyncio.sleep(0)
        assert kinds == [ValueError]
        del future, task

        assert gc.collect() == 0
    finally:
        gc.enable()


async def _wait_for(future: Any) -> Any:
    return await future
