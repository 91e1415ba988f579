"""Virtual time, and simulated processes, which can be killed, frozen and restarted."""

import asyncio
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

from kvrs.ids import InstanceId, NodeId
from kvrs_lab.sim.event_loop import SimLoop

T = TypeVar("T")
Step = Callable[[], None]
IN_ORDER_S = 1e-9  # Gap between messages of one connection that arrive together.
STEPS_MAX = 5_000_000  # Limit per virtual second; more steps mean a world that is stuck.


class InvariantError(AssertionError):
    """An invariant of the simulated world is broken."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)


class Clock:
    """Runs steps in order of time, and steps of equal time in order of their requests."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps = 0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def after(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        at_s = self.now_s + delay_s if delay_s > 0.0 else self.now_s
        heappush(self._agenda, (at_s, next(self._order), step, args))

    def run(self, until_s: float, done: Callable[[], bool] | None = None) -> None:
        """Run steps until a time, until `done`, or until no step is left."""
        agenda = self._agenda
        second_s, most = self.now_s + 1.0, self.steps + STEPS_MAX
        while agenda and (at_s := agenda[0][0]) <= until_s and (done is None or not done()):
            self.now_s = at_s
            self.steps += 1
            if at_s >= second_s:
                second_s, most = at_s + 1.0, self.steps + STEPS_MAX
            assert self.steps < most, "the world does not come to rest"
            _, _, step, args = heappop(agenda)
            step(*args)


class OwnTime:
    """Virtual time of one proxy. The steps of a frozen proxy are deferred, and run in order when
    the proxy wakes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_over = False
        self._deferred: list[Step] | None = None  # Steps of a frozen proxy.
        self.loop = SimLoop(lambda: clock.now_s, self.after)  # type: ignore[abstract]

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    @property
    def is_frozen(self) -> bool:
        return self._deferred is not None

    def after(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        """Run the step after a delay, unless the proxy has died by then."""
        self._clock.after(delay_s, self.do, step, *args)

    def freeze(self) -> None:
        if self._deferred is None:
            self._deferred = []

    def wake(self) -> None:
        deferred, self._deferred = self._deferred or [], None
        for step in deferred:
            self.do(step)

    def end(self) -> None:
        """End the time of a dead proxy."""
        self._is_over, self._deferred = True, None
        self.loop.close()

    def do(self, step: Callable[..., None], *args: Any) -> None:
        """Run the step now, or when the proxy wakes."""
        if self._is_over:
            return
        if self._deferred is None:
            step(*args)
        else:
            self._deferred.append(partial(step, *args))


class SimProcess:
    """A simulated process. Requests to a frozen process wait, and steps of earlier lives are
    dropped.
    """

    def __init__(self, name: InstanceId, node: NodeId, clock: Clock) -> None:
        self.id = name
        self.node = node
        self.clock = clock
        self.epoch = 0
        self.life = 0  # Stands for the process id.
        self.alive = False
        self.frozen = False
        self.corrupt_pages = 0  # Number of the next sent pages to damage.
        self._deferred: list[tuple[int, Step, Step | None]] = []

    @property
    def is_running(self) -> bool:
        return self.alive and not self.frozen

    def start(self) -> None:
        assert not self.alive
        self.alive, self.life, self.epoch = True, self.life + 1, self.epoch + 1

    def kill(self) -> None:
        self.alive = self.frozen = False
        self.corrupt_pages = 0
        deferred, self._deferred = self._deferred, []
        for _, _, refused in deferred:
            if refused is not None:
                refused()

    def freeze(self) -> None:
        self.frozen = True

    def wake(self) -> None:
        self.frozen = False
        deferred, self._deferred = self._deferred, []
        for life, step, refused in deferred:
            self._do(life, refused, step)

    def later(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        """Run the step after a delay, in this life only."""
        self.clock.after(delay_s, self._do, self.life, None, step, *args)

    def call(self, delay_s: float, step: Step, refused: Step | None = None) -> None:
        """Run the step at the process that lives at the message's arrival. `refused` runs if no
        process lives then, or the process dies first.
        """
        self.clock.after(delay_s, self._asked, step, refused)

    def _asked(self, step: Step, refused: Step | None) -> None:
        self._do(self.life, refused, step)

    def _do(self, life: int, refused: Step | None, step: Callable[..., None], *args: Any) -> None:
        if not self.alive or life != self.life:
            if refused is not None:
                refused()
        elif self.frozen:
            self._deferred.append((life, partial(step, *args), refused))
        else:
            step(*args)


async def ask(
    loop: SimLoop,
    process: SimProcess,
    answer: Callable[[], T | None],
    message_s: Callable[[], float],
    limit_s: float,
) -> T:
    """Ask another process; an `answer` of None sends no answer.

    Raises:
        ConnectionError: the process is dead.
        TimeoutError: no answer in time.
    """
    answered: asyncio.Future[T | None] = loop.create_future()

    def settle(found: T | None) -> None:
        if not answered.done():
            answered.set_result(found)

    def asked() -> None:
        if (found := answer()) is not None:
            loop.call_later(message_s(), settle, found)

    def refused() -> None:
        loop.call_later(message_s(), settle, None)

    process.call(message_s(), asked, refused)
    async with asyncio.timeout(limit_s):
        if (found := await answered) is None:
            raise ConnectionRefusedError
        return found
