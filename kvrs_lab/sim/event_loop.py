"""An asyncio event loop in the virtual time of one simulated process. The product's senders run on
it, and their tasks and timers are steps of the process.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class _Handle:
    """A callback of the loop, without context variables, which senders do not read."""

    __slots__ = ("_args", "_callback")

    def __init__(self, callback: Any, args: tuple[Any, ...]) -> None:
        self._callback, self._args = callback, args

    def cancel(self) -> None:
        self._callback = None

    def __call__(self) -> None:
        if self._callback is not None:
            self._callback(*self._args)


class SimLoop(asyncio.AbstractEventLoop):
    """An event loop that runs all woken callbacks at the end of the step that woke them."""

    def __init__(self, time: Callable[[], float], after: Callable[..., None]) -> None:
        """Create a loop; `after` runs a step later, unless the process has died by then."""
        self.time = time  # type: ignore[method-assign]
        self._after = after
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._soon: deque[_Handle] = deque()
        self._is_due = self._is_closed = False

    def do(self, step: Callable[..., object] = lambda: None, *args: Any) -> None:
        """Run the step now, as a step of the loop."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            step(*args)
            while self._soon:
                self._soon.popleft()()
        finally:
            asyncio._set_running_loop(before)

    def is_closed(self) -> bool:
        return self._is_closed

    def get_debug(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        self._soon.append(handle := _Handle(callback, args))
        if not self._is_due and asyncio._get_running_loop() is not self:
            self._is_due = True
            self._after(0.0, self._turn)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_later(when - self.time(), callback, *args)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        handle = _Handle(callback, args)
        if not self._is_closed:
            self._after(delay, self.do, handle)
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **_: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # Its process was killed.
        self._tasks[task] = None
        task.add_done_callback(self._task_ended)
        return task

    def close(self) -> None:
        """End all tasks now: the process has died, or the world has ended."""
        self._is_closed = self._is_due = True
        for task in self._tasks:
            task.cancel()
        self.do()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignore the context; `_task_ended` raises a task's error."""

    def _task_ended(self, task: "asyncio.Task[Any]") -> None:
        """Raise the error of a failed task, which ends the world."""
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def _turn(self) -> None:
        self._is_due = False
        self.do()
