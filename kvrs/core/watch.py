"""Watch of one process: when the process is identified, fenced, up and lost, and when it is tried
again.

Pure: no clock, no socket, no randomness. A shell connects, carries out the steps, and passes on
with `now_s` what comes of them. `kvrs/proxy/watch/fleet.py` is that shell.

| input                                  | leads to                                               |
| -------------------------------------- | ------------------------------------------------------ |
| `connects`                             | IDENTIFY                                               |
| `answered` its identity                | `End` if it must not be used; FENCE if it ran on while |
|                                        | it was taken for lost; LISTEN                          |
| `answered` the fence                   | LISTEN                                                 |
| `reported` in the epoch that was met   | it is up, if nothing is left that must drain first     |
| `reported` in another epoch            | IDENTIFY: it was restarted, or another proxy fenced it |
| `reported` with other ranks            | SHAPE                                                  |
| `reported` with failed questions       | what `core/model/reports.py` says: `End`, nothing,     |
|                                        | or as any report                                       |
| no report and no token for `limit_s`   | `ended` as silent                                      |
| `ended`                                | what was up is lost; a pause; `connects`               |

The removal of instances and agents while streams run.

An instance is drained before its removal. It is removed once no stream runs there, moved streams
have their next token elsewhere, and no KV is retained there for a stream; this wait is limited by
the time that its streams might have stayed.
"""

from abc import ABC, abstractmethod
from enum import Enum, StrEnum, auto
from math import inf
from typing import Any, Generic, Protocol, TypeVar, assert_never

import msgspec

from kvrs.config.proxy import ProxySettings
from kvrs.core import kv_locations
from kvrs.core.control import Control
from kvrs.core.fleet.known import listed_names, others_of_other_format, overdue_after_s
from kvrs.core.fleet.silence import SilenceTimer, silent_after_s
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.core.model.reports import TOKENS_S, Consequence, worst
from kvrs.ids import InstanceId
from kvrs.protocol.instance import NO_OTHER_NAMES, AgentInfo, AgentReport, InstanceInfo, LoadReport
from kvrs.protocol.rows import NO_ROWS


def remove(control: Control[Any], instance: InstanceId, drain_s: float, now_s: float) -> bool:
    """Begin an instance's removal, which ends when `gone` returns it. True: removed at once,
    because it was never up and nothing could leave it.
    """
    known = control.instances.known[instance]
    if known.health is not Health.UP and not known.was_up:
        _take_out(control, known, now_s)
        return True
    control.drains.leave(instance, drain_s, now_s)
    return False


def gone(control: Control[Any], now_s: float) -> list[InstanceId]:
    """Remove the instances in `Drains.leaving` that all streams have left, and return them; call
    repeatedly until `Drains.leaving` is empty.
    """
    gone = [
        name
        for name, until_s in control.drains.leaving.items()
        if not control.produced_on(name)
        and not kv_locations.is_left_at(control.policy.state, name)
        and (now_s >= until_s or not control.leases.holds_any(name))
    ]
    for name in gone:
        _take_out(control, control.instances.known[name], now_s)
    return gone


def _take_out(control: Control[Any], known: Member, now_s: float) -> None:
    if known.health is Health.UP:
        known.lose("removed")
    control.instances.remove(known)
    for book in (control.self_tests, control.leases, control.drains, control.gpus):
        book.forget(known.id)
    control.tell(ev.InstanceRemoved(known.id, {}), now_s)
    control.weights_known((), now_s)  # One vote less.


def remove_agent(control: Control[Any], known: Agent, now_s: float) -> None:
    """Remove an agent: its checkpoints are useless from now on, and streams get others
    elsewhere.
    """
    if known.health is Health.UP:
        control.checkpoints.lost(known, "removed", now_s)
    control.agents.remove(known)


# First pause between attempts to reach a process; it doubles.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

Known = TypeVar("Known", Member, Agent)
Info = TypeVar("Info", InstanceInfo, AgentInfo)
Report = TypeVar("Report", LoadReport, AgentReport)


class DeathCause(StrEnum):
    """Sign by which a process's loss was noticed."""

    CONNECTION_LOST = "connection_lost"  # The connection of its reports was closed or reset.
    SILENT = "silent"  # No report came for too long.
    UNUSABLE = "unusable"  # The process answered as another server, version or epoch.
    FAILED = "failed"  # The process answered with an error, or with unreadable reports.


class WatchStep(Enum):
    """Next step of a shell, which passes the answer to `answered`."""

    IDENTIFY = auto()  # Ask the process for its identity.
    # Make the process drop attempts by `Control.fences`; its answer is its identity.
    FENCE = auto()
    # Read the process's reports, and end the connection after a silence of `limit_s`.
    LISTEN = auto()
    # Ask for the identity because of changed ranks; the watch goes on without an answer.
    SHAPE = auto()


class End(msgspec.Struct, frozen=True):
    """Request to close the connection, and to pass this to `ended`."""

    cause: str
    death: DeathCause


class Sign(Enum):
    """Signs of a process's life that its reports give."""

    ALIVE = auto()
    SILENT = auto()  # The process has left its questions unanswered.


class WatchNote(Enum):
    """Kind of a message to operators."""

    REFUSED = auto()
    UNREACHED = auto()
    NAMES = auto()
    OTHER_FORMAT = auto()


class WatchShell(Protocol):
    """Shell of one watch. It decides nothing."""

    @property
    def url(self) -> str: ...

    def is_gossiped_dead(self, epoch: int) -> bool:
        """Others report the death of the process in this epoch, or of its node."""

    def came_up(self) -> None: ...

    def lost(self, epoch: int, cause: str, death: DeathCause, silent_s: float) -> None:
        """Count and gossip a loss that the core has handled. `silent_s`: time since the last sign
        of life.
        """

    def note(self, note: WatchNote, detail: str | list[str]) -> None: ...


class WatchLimits(msgspec.Struct, frozen=True):
    """Limits on a watched process's time without a report."""

    usual_s: float
    overdue_s: float  # Limit if gossip reports the process dead: its reports are overdue.
    # Limit while heartbeats arrive although the event loop stalls, and if nothing else could take
    # the process's streams.
    longest_s: float

    @classmethod
    def of(cls, settings: ProxySettings) -> "WatchLimits":
        overdue_s = overdue_after_s(settings.load_interval_s)
        longest_s = max(settings.token_gap_s, overdue_s)
        usual_s = silent_after_s(settings.load_interval_s, longest_s)
        return cls(usual_s, overdue_s, longest_s)

    def silence_s(
        self, *, is_gossiped_dead: bool, beats_for_s: float = 0.0, alone_for_s: float = 0.0
    ) -> float:
        """Return the longest silence allowed. A gossiped death only shortens it: gossip ends no
        watch by itself. A process whose heartbeats continued for `beats_for_s` after its last
        report has until heartbeats are overdue, too. If no other process could take its streams
        until `alone_for_s` after its last report, the time counts from then on, whatever is
        gossiped: agents report silence as a death.
        """
        silence_s = self.overdue_s if is_gossiped_dead else self.usual_s
        if beats_for_s <= 0.0 and alone_for_s <= 0.0:
            return silence_s
        silence_s += max(0.0, alone_for_s)
        return min(self.longest_s, max(silence_s, beats_for_s + self.overdue_s))


class Watch(ABC, Generic[Known, Info, Report]):
    """One process as its proxy sees it. Results of an ended session change nothing."""

    def __init__(self, known: Known, limits: WatchLimits, shell: WatchShell) -> None:
        self.known: Known = known
        self.session: int | None = None  # Number of the session; None: between two connections.
        self.silence = SilenceTimer(0.0)  # The timer of this session, new at its LISTEN.
        self._limits = limits
        self._shell = shell
        self._sessions = 0
        self._info: Info | None = None  # Identity of the process in this session.
        # Last report of an epoch that the process is being asked about.
        self._unmet: Report | None = None
        self._reported_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    def connects(self) -> int:
        """Note that the shell connects to IDENTIFY the process; return the number of the session,
        which later reports name.
        """
        self._sessions += 1
        self.session, self._info, self._unmet = self._sessions, None, None
        return self._sessions

    def answered(
        self, session: int, step: WatchStep, info: Info, now_s: float
    ) -> WatchStep | End | None:
        """Take the process's answer to a step; return what to do next (None: only listen)."""
        if session != self.session:
            return None
        if step is WatchStep.SHAPE:
            self._reshape(info)
            return None
        if step is WatchStep.IDENTIFY:
            if (fault := self._fault(info)) is not None:
                return End(fault, DeathCause.UNUSABLE)
            if self._must_be_fenced(info):
                return WatchStep.FENCE
        before, self._info = self._info, info
        report, self._unmet = self._unmet, None
        if before is None or report is None:
            self._reported_s = now_s
            self.silence = SilenceTimer(now_s)
            return WatchStep.LISTEN
        if report.epoch == info.epoch:
            return self._take(info, report, now_s)
        if before.epoch < info.epoch > report.epoch:
            return None  # The process was fenced again after its report.
        fault = f"reports epoch {report.epoch}, but is in {info.epoch}"
        return End(fault, DeathCause.FAILED)

    def reported(self, session: int, report: Report, now_s: float) -> WatchStep | End | None:
        info = self._info
        if session != self.session or info is None:
            return None
        if (verdict := self._judge(report, now_s)) is not Sign.ALIVE:
            return verdict if isinstance(verdict, End) else None
        self.silence.heard_s = self._reported_s = now_s
        if self._unmet is not None:
            self._unmet = report
            return None
        if report.epoch != info.epoch:
            self._unmet = report
            return WatchStep.IDENTIFY
        return self._take(info, report, now_s)

    def beat(self, now_s: float) -> None:
        """Note a heartbeat, the only sign of life while the event loop stalls."""
        self.known.beat_s = now_s

    def note_tokens(self) -> None:
        """Note that tokens of the process have arrived, which are signs of life as reports are."""
        tokens_s = self._tokens_s()
        self.silence.heard_s = max(self.silence.heard_s, tokens_s)
        self._reported_s = max(self._reported_s, tokens_s)

    def limit_s(self, now_s: float) -> float:
        """Return how long the process may be silent at present."""
        assert self._info is not None
        self.note_tokens()
        return self._limits.silence_s(
            is_gossiped_dead=self._shell.is_gossiped_dead(self._info.epoch),
            beats_for_s=self.known.beat_s - self._reported_s,
            alone_for_s=self._others_since_s(now_s) - self._reported_s,
        )

    def ended(self, session: int, cause: str, death: DeathCause, now_s: float) -> float | None:
        """Note the end of the connection. Return the pause before the next; None: the session had
        ended before.
        """
        if session != self.session:
            return None
        known, self.session = self.known, None
        if death is DeathCause.UNUSABLE:
            self._refuse(cause)
        if known.health is Health.UP:
            assert known.info is not None
            epoch, self._pause_s = known.info.epoch, FIRST_PAUSE_S
            self._lose(cause, now_s)
            silent_s = now_s - max(self._reported_s, known.beat_s)
            self._shell.lost(epoch, cause, death, silent_s)
        elif known.health is not Health.REFUSED:
            self._tell(WatchNote.UNREACHED, f"{cause} ({self._shell.url})")
        pause_s, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return pause_s

    def _take(self, info: Info, report: Report, now_s: float) -> WatchStep | End | None:
        """Take a report of the identified process; return what to do next (None: only listen)."""
        known = self.known
        if self._must_drain(info, report):
            return None
        if known.health is not Health.UP or known.info is None or known.info.epoch != info.epoch:
            # Checked again: another instance may have become the reference since.
            if (fault := self._fault(info)) is not None:
                return End(fault, DeathCause.UNUSABLE)
            self._up(info, now_s)
            self._shell.came_up()
        return self._count(info, report, now_s)

    def _refuse(self, fault: str) -> None:
        if self.known.health is Health.UP:
            self._shell.note(WatchNote.REFUSED, fault)
            return
        self.known.health = Health.REFUSED
        self._tell(WatchNote.REFUSED, fault)

    def _tell(self, note: WatchNote, reason: str) -> None:
        if self.known.reason != reason:
            self.known.reason = reason
            self._shell.note(note, reason)

    @abstractmethod
    def _fault(self, info: Info) -> str | None:
        """Return why the process must not be used; None: it may be used."""

    @abstractmethod
    def _up(self, info: Info, now_s: float) -> None: ...

    @abstractmethod
    def _count(self, info: Info, report: Report, now_s: float) -> WatchStep | None: ...

    @abstractmethod
    def _lose(self, cause: str, now_s: float) -> None: ...

    def _judge(self, report: Report, now_s: float) -> Sign | End:
        """Return what the report says of the process's life."""
        return Sign.ALIVE

    def _tokens_s(self) -> float:
        """Return the time of the process's last token; -inf: it sends none."""
        return -inf

    def _must_be_fenced(self, info: Info) -> bool:
        return False

    def _must_drain(self, info: Info, report: Report) -> bool:
        return False

    def _others_since_s(self, now_s: float) -> float:
        """Return the time since which other processes could take this one's streams;
        -inf: always.
        """
        return -inf

    def _reshape(self, info: Info) -> None:
        raise AssertionError("it has no ranks")


class InstanceWatch(Watch[Member, InstanceInfo, LoadReport]):
    def __init__(
        self, known: Member, control: Control[Any], limits: WatchLimits, shell: WatchShell
    ) -> None:
        super().__init__(known, limits, shell)
        self._control = control
        # Shape of the ranks (number of the layout, degree, number of the re-forming) as last
        # learned, and as last requested.
        self._shape: tuple[int, int, int] | None = None
        self._asked_shape: tuple[int, int, int] | None = None

    def connects(self) -> int:
        self._shape = None
        return super().connects()

    def _fault(self, info: InstanceInfo) -> str | None:
        control = self._control
        fault = control.instances.fault(self.known, info, streams_open=bool(control.streams))
        if fault is not None:
            control.instances.refused(self.known, info)
        return fault

    def _judge(self, report: LoadReport, now_s: float) -> Sign | End:
        if not report.failing:
            return Sign.ALIVE
        has_tokens = now_s - self._tokens_s() < TOKENS_S
        found, cause = worst(report, has_tokens=has_tokens)
        match found:
            case Consequence.DEAD:
                return End(cause, DeathCause.FAILED)
            case Consequence.UNUSABLE:
                return End(cause, DeathCause.UNUSABLE)
            case Consequence.SILENT:
                return Sign.SILENT
            case Consequence.NONE | Consequence.NO_FIGURES | Consequence.NO_REQUESTS:
                return Sign.ALIVE
            case _:
                assert_never(found)

    def _tokens_s(self) -> float:
        return self._control.progress.delivered[self.known.id].last_s

    def _must_be_fenced(self, info: InstanceInfo) -> bool:
        return self.known.must_be_fenced(info)

    def _must_drain(self, info: InstanceInfo, report: LoadReport) -> bool:
        return report.running > 0 and self.known.must_drain_before_use(info)

    def _up(self, info: InstanceInfo, now_s: float) -> None:
        self.known = self._control.instance_up(self.known, info, now_s)
        if info.names != NO_OTHER_NAMES:
            self._shell.note(WatchNote.NAMES, listed_names(info))
        if others := others_of_other_format(self._control.instances, self.known):
            self._shell.note(WatchNote.OTHER_FORMAT, [*others])

    def _count(self, info: InstanceInfo, report: LoadReport, now_s: float) -> WatchStep | None:
        if report.names is not None and report.names != info.names:
            info = self._relist(msgspec.structs.replace(info, names=report.names), now_s)
        self._control.load_reported(self.known, report, now_s)
        if not report.full_degree:
            return None
        # Ranks and layout change without a new epoch, so their shape is compared.
        number = 0 if report.reforming is None else report.reforming.number
        self._asked_shape = report.layout_number, report.degree, number
        return None if self._asked_shape == self._shape else WatchStep.SHAPE

    def _relist(self, info: InstanceInfo, now_s: float) -> InstanceInfo:
        """Note that the same process serves other names than before."""
        self._info = info
        self._control.tell(ev.NamesListed(info.id, info.epoch, info.names), now_s)
        self._control.instances.names_changed()
        self._shell.note(WatchNote.NAMES, listed_names(info))
        return info

    def _reshape(self, info: InstanceInfo) -> None:
        assert self._info is not None
        self._info = msgspec.structs.replace(self._info, ranks=info.ranks, layout=info.layout)
        self.known.learn(ranks=info.ranks, layout=info.layout)
        self._shape = self._asked_shape

    def _others_since_s(self, now_s: float) -> float:
        return self._control.progress.others_since_s(self.known.id, now_s)

    def _lose(self, cause: str, now_s: float) -> None:
        self._control.instance_lost(self.known, cause, now_s)


class AgentWatch(Watch[Agent, AgentInfo, AgentReport]):
    def __init__(
        self, known: Agent, control: Control[Any], limits: WatchLimits, shell: WatchShell
    ) -> None:
        super().__init__(known, limits, shell)
        self._checkpoints = control.checkpoints
        self._control = control

    def _fault(self, info: AgentInfo) -> str | None:
        return self._checkpoints.agents.fault(self.known, info)

    def _up(self, info: AgentInfo, now_s: float) -> None:
        self._checkpoints.up(self.known, info, now_s)

    def _count(self, info: AgentInfo, report: AgentReport, now_s: float) -> None:
        before = self.known.report
        self._checkpoints.reported(self.known, report, now_s)
        if report.rows != (NO_ROWS if before is None else before.rows):
            self._control.self_tests.rows_changed()
        self._control.rows_reported(report.rows, now_s)

    def _lose(self, cause: str, now_s: float) -> None:
        self._checkpoints.lost(self.known, cause, now_s)
