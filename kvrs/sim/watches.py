"""How a simulated proxy hears of processes: late, each at its own moments, and of deaths mostly by silence or a reset."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.sim.agent import Holdings, SimAgent
from kvrs.sim.engine import SimEngine
from kvrs.sim.process import Clock

FIRST_PAUSE_S = 0.05  # As the proxy's: between two tries to reach somebody, doubling.
LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """One line of an instance's report."""

    epoch: int
    queue_delay_s: float
    queued: int
    links: dict[NodeId, float]


class Listener(Protocol):
    """The proxy behind a watch."""

    def is_up(self, watch: "Watch", epoch: int) -> None: ...

    def is_lost(self, watch: "Watch", cause: str) -> None: ...

    def heard(self, watch: "Watch", report: Load | Holdings) -> None: ...

    def former_attempts(self, name: InstanceId) -> dict[StreamId, int]: ...


class Watch:
    """One proxy's connection to one process. `delay_s` says how late a message is; later ones never pass earlier ones."""

    def __init__(
        self, process: SimEngine | SimAgent, listener: Listener, clock: Clock, interval_s: float, delay_s: Callable[[], float]
    ) -> None:
        self.process = process
        self.epoch: int | None = None  # None: it is down, as far as is known.
        self.reported_s = 0.0
        self.queue_delay_s = 0.0
        self.queued = 0
        self.drop = 0  # So many of the next reports are lost.
        self._listener = listener
        self._clock = clock
        self._interval_s = interval_s
        self._silence_s = max(2.0, 8 * interval_s)
        self._delay_s = delay_s
        self._arrival_s = 0.0
        self._session = 0  # Reports of those before this one are ignored.
        self._lost_life = 0
        self._pause_s = FIRST_PAUSE_S

    def begin(self) -> None:
        self._session += 1
        session = self._session
        self.process.call(self._delay_s(), lambda: self._meet(session), lambda: self._refused(session))

    def reset(self) -> None:
        """The process has died, and its kernel closes the connection."""
        session = self._session
        self._later(lambda: self._lose(session, "reset"))

    def suspect(self) -> None:
        """A stream there was silent for too long; of a process that reports nothing either the silence is taken for its end."""
        if self._clock.now_s - self.reported_s >= max(1.0, 4 * self._interval_s):
            self._lose(self._session, "silent")

    def _later(self, step: Callable[[], None]) -> None:
        """What the process has sent arrives in the order in which it was sent."""
        self._arrival_s = max(self._arrival_s, self._clock.now_s + self._delay_s())
        self._clock.after(self._arrival_s - self._clock.now_s, step)

    def _meet(self, session: int) -> None:
        process = self.process
        if isinstance(process, SimEngine) and process.life == self._lost_life:
            process.fence_all(self._listener.former_attempts(process.id))
        life, epoch = process.life, process.epoch
        self._later(lambda: self._met(session, life, epoch))
        changes = process.watch() if isinstance(process, SimAgent) else None

        def report() -> None:
            if self._session != session:
                return
            line: Load | Holdings
            if isinstance(process, SimAgent):
                assert changes is not None
                line = process.report(changes)
            else:
                rates = process.meter.estimates()
                line = Load(process.epoch, process.queue_delay_s(), process.scheduler.waiting, rates)
            if self.drop:
                self.drop -= 1
            else:
                self._later(lambda: self._heard(session, line))
            process.later(self._interval_s, report)

        report()

    def _met(self, session: int, life: int, epoch: int) -> None:
        if session != self._session:
            return
        self._pause_s = FIRST_PAUSE_S
        self._lost_life = life  # If it is lost from now on, it is this one.
        self.epoch, self.reported_s = epoch, self._clock.now_s
        self._listener.is_up(self, epoch)
        self._clock.after(self._silence_s, lambda: self._look(session))

    def _heard(self, session: int, report: Load | Holdings) -> None:
        if session != self._session:
            return
        if report.epoch != self.epoch:
            # Fenced by another proxy, or restarted: met again, as who it is now. It need not be fenced by us.
            self._lost_life = 0
            self.begin()
            return
        self.reported_s = self._clock.now_s
        if isinstance(report, Load):
            self.queue_delay_s, self.queued = report.queue_delay_s, report.queued
        self._listener.heard(self, report)

    def _look(self, session: int) -> None:
        if session != self._session:
            return
        left_s = self.reported_s + self._silence_s - self._clock.now_s
        if left_s <= 1e-9:
            self._lose(session, "silent")
        else:
            self._clock.after(left_s, lambda: self._look(session))

    def _lose(self, session: int, cause: str) -> None:
        if session != self._session:
            return
        was_up, self.epoch = self.epoch is not None, None
        self._session += 1
        if was_up:
            self._listener.is_lost(self, cause)
        self._retry()

    def _retry(self) -> None:
        session = self._session
        self._clock.after(self._pause_s, lambda: self.begin() if session == self._session else None)

    def _refused(self, session: int) -> None:
        if session != self._session:
            return
        if self.epoch is not None:
            self._lose(session, "refused")
            return
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._retry()


class Leases:
    """Which processes keep something for which streams of one proxy; renewed and released in batches."""

    def __init__(self) -> None:
        self.held: dict[InstanceId, dict[StreamId, None]] = {}
        self.ended: dict[InstanceId, dict[StreamId, None]] = {}

    def hold(self, name: InstanceId, stream: StreamId) -> None:
        self.held.setdefault(name, {})[stream] = None

    def release(self, name: InstanceId, stream: StreamId) -> None:
        self.held.get(name, {}).pop(stream, None)
        self.ended.setdefault(name, {})[stream] = None

    def drop(self, name: InstanceId, stream: StreamId) -> None:
        self.held.get(name, {}).pop(stream, None)

    def forget(self, name: InstanceId) -> None:
        self.held.pop(name, None)
        self.ended.pop(name, None)
