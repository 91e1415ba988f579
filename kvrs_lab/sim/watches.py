"""A simulated proxy's connections to processes: reports come late, each at its own moments, and a
death is noticed mostly by silence or a reset. What follows from it, `kvrs/core/watch.py` decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from kvrs.core.books.leases import Number
from kvrs.core.control import Control
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.core.watch import (
    AgentWatch,
    DeathCause,
    End,
    InstanceWatch,
    Watch,
    WatchLimits,
    WatchNote,
    WatchStep,
)
from kvrs.ids import StreamId
from kvrs.protocol.instance import AgentInfo, AgentReport, InstanceInfo, LoadReport
from kvrs_lab.sim.agent import SimAgent
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.process import IN_ORDER_S, OwnTime, require
from kvrs_lab.sim.streams import SimStream


@dataclass(frozen=True, slots=True)
class ReportLine:
    """How reports reach a proxy. Later messages never pass earlier ones."""

    time: OwnTime  # The proxy's.
    limits: WatchLimits
    interval_s: float
    delay_s: Callable[[], float]  # How late a message is.
    lost: Callable[["SimWatch", int], None]  # Gets the epoch of a process that was lost.


class SimWatch:
    """Carries out one proxy's watch of one process."""

    url = "simulated"

    def __init__(
        self,
        process: SimEngine | SimAgent,
        known: Member | Agent,
        control: Control[SimStream],
        line: ReportLine,
    ) -> None:
        self.process = process
        self.drop = 0  # So many of the next reports are lost.
        self._control = control
        self._line = line
        self._time = line.time
        self._gossiped_epoch = -1  # The latest of the process whose death gossip has reported.
        self._arrival_s = 0.0
        self._is_over = False
        self._watch: Watch[Any, Any, Any] = (
            InstanceWatch(known, control, line.limits, self)
            if isinstance(known, Member)
            else AgentWatch(known, control, line.limits, self)
        )

    def anew(self, known: Member) -> "SimWatch":
        """For the same process, after it was removed."""
        return SimWatch(self.process, known, self._control, self._line)

    @property
    def is_up(self) -> bool:
        return self._watch.known.health is Health.UP

    def begin(self) -> None:
        """Ask for the identity of the process, and for its reports with the same message."""
        if not self._is_over:
            session = self._watch.connects()
            self._ask(session, WatchStep.IDENTIFY, self.process.info, lambda: self._listen(session))

    def end(self) -> None:
        """The proxy has died, or the process is no part of its cluster any more."""
        self._watch.session, self._is_over = None, True

    def reset(self) -> None:
        """The process has died, and its kernel closes the connection."""
        if (session := self._watch.session) is not None:
            self._later(lambda: self._end(session, "reset", DeathCause.CONNECTION_LOST))

    def expire_if_silent(self) -> None:
        """Take the silence of the process for its end, unless it has just begun."""
        watch = self._watch
        if watch.session is not None and watch.silence.may_be_suspected(self._time.now_s):
            self._end(watch.session, "silent", DeathCause.SILENT)

    def gossiped_dead(self, epoch: int) -> None:
        """Gossip reports the death of the process, in this epoch: check at once for an overdue
        report.
        """
        self._gossiped_epoch = max(self._gossiped_epoch, epoch)
        if self.is_up and (session := self._watch.session) is not None:
            self._look(session)

    def gossip_withdrawn(self) -> None:
        self._gossiped_epoch = -1

    # Steps.

    def _perform(self, session: int, step: WatchStep | End | None) -> None:
        match step:
            case None | WatchStep.SHAPE:
                pass  # The identity of a simulated process does not name its ranks.
            case End():
                self._end(session, step.cause, step.death)
            case WatchStep.IDENTIFY:
                self._ask(session, step, self.process.info)
            case WatchStep.FENCE:
                numbers = self._control.fences.numbers(self.process.id)
                self._ask(session, step, partial(self._fence, numbers))
            case WatchStep.LISTEN:
                self._look(session)
            case _:
                assert_never(step)

    def _ask(
        self,
        session: int,
        step: WatchStep,
        answer: Callable[[], InstanceInfo | AgentInfo],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """`then` follows the answer at the process, which is dead if it refuses the question."""

        def asked() -> None:
            info = answer()
            self._later(
                lambda: self._perform(
                    session, self._watch.answered(session, step, info, self._time.now_s)
                )
            )
            then()

        self.process.call(
            self._line.delay_s(),
            asked,
            lambda: self._end(session, "refused", DeathCause.CONNECTION_LOST),
        )

    def _fence(self, numbers: dict[StreamId, Number]) -> InstanceInfo:
        assert isinstance(self.process, SimEngine)
        self.process.fence_all(numbers)
        return self.process.info()

    def _listen(self, session: int) -> None:
        """At the process: let it report."""
        process = self.process
        if isinstance(process, SimEngine):
            process.reporting.append(partial(self._send, session, process.load))
            self._report(session, process.load)
        else:
            self._report(session, partial(process.report, process.watch()))

    def _report(self, session: int, make: Callable[[], LoadReport | AgentReport]) -> None:
        """At the process: send a report, and the next one an interval later."""
        if self._watch.session != session:
            return
        if self.drop:
            self.drop -= 1
            make()
        else:
            self._send(session, make)
        self.process.later(self._line.interval_s, self._report, session, make)

    def _send(self, session: int, make: Callable[[], LoadReport | AgentReport]) -> None:
        if self._watch.session == session:
            self._later(self._came, session, make())

    def _came(self, session: int, report: LoadReport | AgentReport) -> None:
        if (step := self._watch.reported(session, report, self._time.now_s)) is not None:
            self._perform(session, step)

    def _later(self, step: Callable[..., None], *args: Any) -> None:
        """Take a step when the process's message arrives; messages arrive in the order in which
        they were sent.
        """
        now_s = self._time.now_s
        self._arrival_s = max(self._arrival_s + IN_ORDER_S, now_s + self._line.delay_s())
        self._time.after(self._arrival_s - now_s, step, *args)

    def _look(self, session: int) -> None:
        if session != self._watch.session:
            return
        now_s, silence = self._time.now_s, self._watch.silence
        next_s = silence.look(now_s, self._watch.limit_s(now_s), lambda: False)
        if next_s is not None:
            self._time.after(next_s - now_s, self._look, session)
            return
        require(
            now_s - silence.heard_s >= self._line.limits.overdue_s - 1e-9,
            f"{self.process.id} reports, and was lost by its silence",
        )
        self._end(session, "silent", DeathCause.SILENT)

    def _end(self, session: int, cause: str, death: DeathCause) -> None:
        pause_s = self._watch.ended(session, cause, death, self._time.now_s)
        if pause_s is not None:
            self._time.after(pause_s, self.begin)

    # The surroundings of its watch.

    def is_gossiped_dead(self, epoch: int) -> bool:
        return self._gossiped_epoch >= epoch

    def came_up(self) -> None:
        pass

    def lost(self, epoch: int, cause: str, death: DeathCause, silent_s: float) -> None:
        self._line.lost(self, epoch)

    def note(self, note: WatchNote, detail: str | list[str]) -> None:
        pass
