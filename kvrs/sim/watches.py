"""A simulated proxy's watches of processes: reports come late, each at its own moments, and a death
is noticed mostly by silence or a reset.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvrs.core.books.checkpoint_holds import CheckpointHolds
from kvrs.core.control import Control
from kvrs.core.fleet.known import KnownAgent, KnownInstance
from kvrs.core.fleet.silence import FIRST_PAUSE_S, LONGEST_PAUSE_S, SilenceTimer, WatchLimits
from kvrs.protocol.instance import AgentReport, LoadReport
from kvrs.sim.agent import Changes, SimAgent
from kvrs.sim.engine import SimEngine
from kvrs.sim.process import OwnTime, Step, require
from kvrs.sim.streams import SimStream

IN_ORDER_S = 1e-9  # Between messages of one connection that arrive together.
SILENT = "silent"  # The cause of a loss without an end.


@dataclass(frozen=True, slots=True)
class ReportLine:
    """How reports reach a proxy. Later messages never pass earlier ones."""

    time: OwnTime  # The proxy's.
    limits: WatchLimits
    interval_s: float
    delay_s: Callable[[], float]  # How late a message is.
    lost: Callable[["Watch", int], None]  # Gets the epoch of a process that was lost.


class Watch(ABC):
    """One proxy's connection to one process."""

    def __init__(self, process: SimEngine | SimAgent, line: ReportLine) -> None:
        self.process = process
        self.epoch: int | None = None  # None: it is down, as far as is known.
        self.drop = 0  # So many of the next reports are lost.
        self._line = line
        self._time = line.time
        self._silence = SilenceTimer(line.time.now_s)
        self._gossiped_epoch = -1  # The latest of the process whose death gossip has reported.
        self._arrival_s = 0.0
        self._is_over = False
        self._session = 0  # Reports of those before this one are ignored.
        self._pause_s = FIRST_PAUSE_S

    @abstractmethod
    def _meet(self, session: int) -> None:
        """At the process: let it report."""

    @abstractmethod
    def _lose(self, cause: str) -> None: ...

    def _others_since_s(self) -> float:
        """Since when others could take what this process does."""
        return -inf

    def begin(self) -> None:
        if self._is_over:
            return
        self._session += 1
        session = self._session
        self.process.call(
            self._line.delay_s(), lambda: self._meet(session), lambda: self._refused(session)
        )

    def end(self) -> None:
        """The proxy has died, or the process is no part of its cluster any more."""
        self._session += 1
        self.epoch, self._is_over = None, True

    def reset(self) -> None:
        """The process has died, and its kernel closes the connection."""
        session = self._session
        self._later(lambda: self._end(session, "reset"))

    def expire_if_silent(self) -> None:
        """Take the silence of the process for its end, unless it has just begun."""
        if self._silence.may_be_suspected(self._time.now_s):
            self._end(self._session, SILENT)

    def gossiped_dead(self, epoch: int) -> None:
        """Gossip reports the death of the process, in this epoch: check at once for an overdue
        report.
        """
        self._gossiped_epoch = max(self._gossiped_epoch, epoch)
        if self.epoch is not None:
            self._look(self._session)

    def gossip_withdrawn(self) -> None:
        self._gossiped_epoch = -1

    def _later(self, step: Step) -> None:
        """Take a step when the process's message arrives; messages arrive in the order in which
        they were sent.
        """
        now_s = self._time.now_s
        self._arrival_s = max(self._arrival_s + IN_ORDER_S, now_s + self._line.delay_s())
        self._time.after(self._arrival_s - now_s, step)

    def _report(self, session: int, make: Callable[[], Step]) -> None:
        """At the process: send a report, and the next one an interval later."""
        if self._session != session:
            return
        heard = make()
        if self.drop:
            self.drop -= 1
        else:
            self._later(lambda: heard() if session == self._session else None)
        self.process.later(self._line.interval_s, lambda: self._report(session, make))

    def _met(self, session: int, epoch: int) -> bool:
        """Watch the process from now on, if the answer is of this session; False: it is not."""
        if session != self._session:
            return False
        self._pause_s = FIRST_PAUSE_S
        self.epoch = epoch
        self._silence = SilenceTimer(self._time.now_s)
        self._look(session)
        return True

    def _look(self, session: int) -> None:
        if session != self._session:
            return
        now_s = self._time.now_s
        is_dead = self.epoch is not None and self._gossiped_epoch >= self.epoch
        limit_s = self._line.limits.silence_s(
            is_gossiped_dead=is_dead,
            alone_for_s=self._others_since_s() - self._silence.heard_s,
        )
        next_s = self._silence.look(now_s, limit_s, lambda: False)
        if next_s is None:
            overdue_s = self._line.limits.overdue_s
            require(
                now_s - self._silence.heard_s >= overdue_s - 1e-9,
                f"{self.process.id} reports, and was lost by its silence",
            )
            self._end(session, SILENT)
        else:
            self._time.after(next_s - now_s, lambda: self._look(session))

    def _heard(self) -> None:
        self._silence.heard_s = self._time.now_s

    def _end(self, session: int, cause: str) -> None:
        if session != self._session:
            return
        epoch, self.epoch = self.epoch, None
        self._session += 1
        if epoch is not None:
            self._lose(cause)
            self._line.lost(self, epoch)
        self._retry()

    def _retry(self) -> None:
        session = self._session
        self._time.after(self._pause_s, lambda: self.begin() if session == self._session else None)

    def _refused(self, session: int) -> None:
        if session != self._session:
            return
        if self.epoch is not None:
            self._end(session, "refused")
            return
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._retry()


class InstanceWatch(Watch):
    def __init__(
        self,
        engine: SimEngine,
        known: KnownInstance,
        control: Control[SimStream],
        line: ReportLine,
    ) -> None:
        super().__init__(engine, line)
        self._engine = engine
        self._known = known
        self._control = control

    def anew(self, known: KnownInstance) -> "InstanceWatch":
        """For the same process, after it was removed."""
        return InstanceWatch(self._engine, known, self._control, self._line)

    def _meet(self, session: int) -> None:
        if self._known.must_be_fenced(self._engine.info()):
            self._engine.fence_all(self._control.fences.numbers(self._known.id))
        info = self._engine.info()

        def met() -> None:
            if self._met(session, info.epoch):
                self._control.instance_up(self._known, info, self._time.now_s)

        def make() -> Step:
            report = self._engine.load()
            return lambda: self._load(report)

        def report_now() -> None:
            if session == self._session:
                heard = make()
                self._later(lambda: heard() if session == self._session else None)

        self._later(met)
        self._engine.reporting.append(report_now)
        self._report(session, make)

    def _load(self, report: LoadReport) -> None:
        if report.epoch != self.epoch:
            # Restarted, or fenced by another proxy: met again, as what it is now.
            self.begin()
            return
        self._heard()
        self._control.load_reported(self._known, report, self._time.now_s)

    def _others_since_s(self) -> float:
        return self._control.progress.others_since_s(self._known.id, self._time.now_s)

    def _lose(self, cause: str) -> None:
        now_s = self._time.now_s
        self._control.instance_lost(self._known, cause, now_s, may_live=cause == SILENT)


class AgentWatch(Watch):
    def __init__(
        self,
        agent: SimAgent,
        known: KnownAgent,
        checkpoints: CheckpointHolds,
        line: ReportLine,
    ) -> None:
        super().__init__(agent, line)
        self._agent = agent
        self._known = known
        self._checkpoints = checkpoints

    def _meet(self, session: int) -> None:
        info, changes = self._agent.info(), self._agent.watch()

        def met() -> None:
            if self._met(session, info.epoch):
                self._checkpoints.up(self._known, info, self._time.now_s)

        self._later(met)
        self._report(session, lambda: self._holdings(changes))

    def _holdings(self, changes: Changes) -> Step:
        report = self._agent.report(changes)
        return lambda: self._reported(report)

    def _reported(self, report: AgentReport) -> None:
        if report.epoch != self.epoch:
            self._end(self._session, f"reports epoch {report.epoch}")
            return
        self._heard()
        self._checkpoints.reported(self._known, report, self._time.now_s)

    def _lose(self, cause: str) -> None:
        self._checkpoints.lost(self._known, cause, self._time.now_s)
