"""An event loop in virtual time, for tests of timers: nothing sleeps, and no load of the machine
makes anything late.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Selector(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The time until the next timer passes at once; without a timer, wait as usual."""
        if timeout is None:
            return super().select(None)
        self.now_s += timeout
        return super().select(0.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def stall(self, seconds: float) -> None:
        """Nothing runs meanwhile, as in a process that is stopped."""
        self._virtual.now_s += seconds


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` in a `VirtualLoop`; return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def virtual_loop() -> VirtualLoop:
    """The one that runs the caller."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
