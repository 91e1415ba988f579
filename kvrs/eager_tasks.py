"""Tasks that lose no turn of the event loop: they run at once when they begin, and when that has
come for which they wait.
"""

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

# What the documentation of asyncio has for tasks of other kinds than its own.
_enter: Callable[[asyncio.AbstractEventLoop, Any], None] = _enter_task
_leave: Callable[[asyncio.AbstractEventLoop, Any], None] = _leave_task


class EagerFuture(Generic[T]):
    """A future for one task at a time. An `EagerTask` goes on within the call that gives the
    result. Any other task hears of it in a turn of its own, and each does of errors and of
    cancellations, as with a future of asyncio: the task itself may be what causes them, and an
    error that is raised keeps the frames of its callers.
    """

    __slots__ = (
        *("_asyncio_future_blocking", "_context", "_error", "_is_cancelled", "_is_done", "_loop"),
        *("_result", "_waiter"),
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False  # By which tasks of asyncio know a future.
        self._loop = loop
        self._is_done = False
        self._is_cancelled = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._waiter: EagerTask | Callable[[Any], object] | None = None
        self._context: Context | None = None  # Of a waiter that is no EagerTask.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: T) -> None:
        assert not self._is_done
        self._result, self._is_done = result, True
        waiter = self._waiter
        if isinstance(waiter, EagerTask):
            self._waiter = None
            waiter.go_on()
        else:
            self._tell_later()

    def set_exception(self, error: BaseException) -> None:
        assert not self._is_done
        self._error, self._is_done = error, True
        self._tell_later()

    def cancel(self, msg: Any | None = None) -> bool:
        if self._is_done:
            return False
        self._is_cancelled = self._is_done = True
        self._tell_later()
        return True

    def result(self) -> T:
        """For the one that waits for it: an error is raised once."""
        if self._is_cancelled:
            raise asyncio.CancelledError
        error, self._error = self._error, None  # Else its traceback would lead back to it.
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self._result  # type: ignore[return-value]  # It is done.

    def wake(self, task: "EagerTask") -> None:
        assert self._waiter is None
        self._asyncio_future_blocking = False
        self._waiter = task

    def add_done_callback(
        self, waiter: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        assert self._waiter is None
        self._waiter, self._context = waiter, context
        if self._is_done:
            self._tell_later()

    def remove_done_callback(self, waiter: Callable[[Any], object]) -> int:
        found = self._waiter == waiter
        if found:
            self._waiter = None
        return int(found)

    def _tell_later(self) -> None:
        waiter, self._waiter = self._waiter, None
        if isinstance(waiter, EagerTask):
            self._loop.call_soon(waiter.go_on)
        elif waiter is not None:
            self._loop.call_soon(waiter, self, context=self._context)

    # What an `await` holds is the future itself: a generator would take 200 bytes for as long.

    def __await__(self) -> Generator[Any, None, T]:
        return self  # type: ignore[return-value]  # It is what an `await` needs of one.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._is_done:
            raise StopIteration(self.result())
        self._asyncio_future_blocking = True
        return self


class EagerTask:
    """A task of the running loop: to what it calls it is asyncio's current task. `ended` is called
    with its result, or with the error that ended it, CancelledError among them.
    """

    __slots__ = (
        *("_cancels", "_context", "_coroutine", "_ended", "_is_over", "_loop", "_must_cancel"),
        "_waits_for",
    )

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        ended: Callable[["EagerTask", T | None, BaseException | None], None],
    ) -> None:
        self._coroutine: Coroutine[Any, Any, Any] = coroutine
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._waits_for: Any = None  # None: it runs, or a turn of it is due.
        self._must_cancel = False
        self._cancels = 0
        self._is_over = False

    def go_on(self) -> None:
        """Run up to the next wait, or to the end: to begin with, and once what it waits for is
        there.
        """
        self._context.run(self._step, None)

    def done(self) -> bool:
        return self._is_over

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    # Cancelling, as that of asyncio's tasks.

    def cancel(self, msg: Any | None = None) -> bool:
        if self._is_over:
            return False
        self._cancels += 1
        if self._waits_for is None or not self._waits_for.cancel(msg):
            self._must_cancel = True
        return True

    def cancelling(self) -> int:
        return self._cancels

    def uncancel(self) -> int:
        self._cancels = max(0, self._cancels - 1)
        return self._cancels

    # What it waits for.

    def _go_on_after(self, future: Any) -> None:
        """A future of asyncio is done."""
        try:
            future.result()
        except BaseException as error:
            self._context.run(self._step, error)
        else:
            self._context.run(self._step, None)

    def _step(self, error: BaseException | None) -> None:
        loop, outer, result = self._loop, asyncio.current_task(self._loop), None
        if self._must_cancel:
            self._must_cancel = False
            if not isinstance(error, asyncio.CancelledError):
                error = asyncio.CancelledError()
        self._waits_for = waits_for = None
        if outer is not None:
            _leave(loop, outer)
        _enter(loop, self)
        try:
            if error is None:
                waits_for = self._coroutine.send(None)
            else:
                waits_for = self._coroutine.throw(error)
            error = None
        except StopIteration as stop:
            self._is_over, result, error = True, stop.value, None
        except (KeyboardInterrupt, SystemExit):
            self._is_over = True
            raise
        except BaseException as ended_by:
            self._is_over, error = True, ended_by
        finally:
            _leave(loop, self)
            if outer is not None:
                _enter(loop, outer)
        try:
            if self._is_over:
                self._ended(self, result, error)
            else:
                self._wait(waits_for)
        finally:
            del error  # Its traceback has this frame: a circle.

    def _wait(self, future: Any) -> None:
        if future is None:  # A turn given away.
            self._loop.call_soon(self.go_on)
            return
        self._waits_for = future
        if isinstance(future, EagerFuture):
            future.wake(self)
        else:
            future._asyncio_future_blocking = False
            future.add_done_callback(self._go_on_after)
        if self._must_cancel and future.cancel():
            self._must_cancel = False
