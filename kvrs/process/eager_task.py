"""Coroutine runner that resumes a coroutine within the callback that ends its wait.

An asyncio task begins in the next turn of its event loop, and resumes one turn after its wait has
ended. An `EagerTask` begins within `begin`, and resumes within `Signal.set_result`: the callback
with a response sends the next request. At any other future it resumes as a task does. It is a
custom task as in asyncio's manual ("Extending"): `asyncio.current_task` returns it, and
`asyncio.timeout` works with it.
"""

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Signal(asyncio.Future[T]):
    """A future that resumes a waiting `EagerTask` at once."""

    waiter: Callable[[], None] | None = None

    def set_result(self, result: T, /) -> None:
        super().set_result(result)
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter()

    def set_exception(self, exception: type[BaseException] | BaseException, /) -> None:
        super().set_exception(exception)
        self._notice()

    def cancel(self, msg: object = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.waiter is not None:
            self.get_loop().call_soon(self._notice)
        return is_cancelled

    def _notice(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter()


class EagerTask(Generic[T]):
    """Runs a coroutine to its end and then calls `ended` once, with its error (CancelledError too)
    or None. The error is not kept, because its frames would keep the task alive.
    """

    __slots__ = (
        *("_cancelling", "_context", "_coroutine", "_ended", "_has_begun", "_is_running"),
        *("_loop", "_must_cancel", "_waits_for", "is_over", "result"),
    )

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        ended: Callable[["EagerTask[T]", BaseException | None], None] = lambda *_: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._coroutine = coroutine
        self._ended = ended
        self._context = copy_context()
        self._waits_for: asyncio.Future[Any] | None = None
        # Result of the coroutine; None before its end, and after an error.
        self.result: T | None = None
        self._has_begun = self._is_running = self._must_cancel = self.is_over = False
        self._cancelling = 0

    def begin_soon(self) -> None:
        """Begin the coroutine in the next turn of the event loop."""
        self._has_begun = True
        self._loop.call_soon(self.begin)

    # Methods by which asyncio and coroutines use this object as a task.

    def cancel(self, msg: object = None) -> bool:
        """Raise CancelledError where the coroutine waits, in the next turn of the event loop."""
        if self.is_over:
            return False
        self._cancelling += 1
        if not self._has_begun:
            self.begin_soon()
        waits_for = self._waits_for
        if waits_for is not None and waits_for.cancel():
            return True
        self._must_cancel = True
        return True

    def cancelling(self) -> int:
        return self._cancelling

    def uncancel(self) -> int:
        self._cancelling = max(0, self._cancelling - 1)
        return self._cancelling

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    # Methods that run the coroutine.

    def begin(self, _: object = None) -> None:
        """Run the coroutine to its next wait, from its start or from a wait that is over."""
        if self.is_over or self._is_running:
            return
        loop, outer = self._loop, asyncio.current_task(self._loop)
        if outer is not None:
            _leave_task(loop, outer)
        _enter_task(loop, self)  # type: ignore[arg-type]  # It has what asyncio asks of a task.
        self._waits_for, self._has_begun, self._is_running = None, True, True
        found: asyncio.Future[Any] | None = None
        try:
            if self._must_cancel:
                self._must_cancel = False
                found = self._context.run(self._coroutine.throw, asyncio.CancelledError())
            else:
                found = self._context.run(self._coroutine.send, None)
        except StopIteration as end:
            self._end(None, end.value)
        except BaseException as error:
            self._end(error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._is_running = False
            _leave_task(loop, self)  # type: ignore[arg-type]
            if outer is not None:
                _enter_task(loop, outer)
        if self.is_over:
            return
        # The coroutine has yielded nothing to wait for, as `asyncio.sleep(0)` does: resume it in
        # the next turn.
        if found is None:
            loop.call_soon(self.begin)
            return
        found._asyncio_future_blocking = False
        if self._must_cancel:
            found.cancel()
            loop.call_soon(self.begin)
        elif type(found) is Signal:
            assert found.waiter is None, "one task waits for a signal"
            self._waits_for, found.waiter = found, self.begin
        else:
            self._waits_for = found
            found.add_done_callback(self.begin)

    def _end(self, error: BaseException | None, result: T | None = None) -> None:
        self.is_over, self.result, ended = True, result, self._ended
        del self._ended, self._coroutine, self._context
        try:
            ended(self, error)
        # Logged, not raised: the code that set the signal's result must go on.
        except Exception as bug:
            context = {"message": "the end of a task was not taken", "exception": bug}
            self._loop.call_exception_handler(context)
