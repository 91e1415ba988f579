"""Watches of processes over one long-lived connection each, whose end is the first sign of a death.
`kvrs/core/watch.py` decides what follows.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from math import inf
from typing import Any, Protocol

from kvrs.config.proxy import ProxySettings
from kvrs.core.control import Control
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Member
from kvrs.core.watch import (
    LONGEST_PAUSE_S,
    AgentWatch,
    DeathCause,
    End,
    InstanceWatch,
    Watch,
    WatchLimits,
    WatchNote,
    WatchStep,
)
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import AgentInfo, InstanceInfo, LoadReport, WatchQuestion
from kvrs.proxy.backends.backend import WatchedInstance
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.wire.errors import ConnectionLostError, UnusableError
from kvrs.proxy.wire.peer import AgentBackend
from kvrs.proxy.wire.watchdog import SilentError, Watchdog

log = logging.getLogger(__name__)

# Shortest stall of a process's event loop that is logged.
STALL_SHOWN_S = 1.0
# Time without a failure after which a question's next failure is logged again.
_SPELL_OVER_S = 60.0


class WatchHost(Protocol):
    """Part of a proxy that a watcher uses: a driver, or a simulated proxy."""

    @property
    def control(self) -> Control[Any]: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def backends(self) -> Mapping[InstanceId, WatchedInstance]: ...
    @property
    def agent_backends(self) -> Mapping[InstanceId, AgentBackend]: ...
    @property
    def end_watch(self) -> MutableMapping[InstanceId, Callable[[], bool]]:
        """Functions by watched process that treat its silence as its end, and return False if it is
        too short for that.
        """

    async def prepare(self, info: InstanceInfo) -> None:
        """Load what the use of an instance needs, which is not refused so far."""

    def load_reported(self, report: LoadReport) -> None: ...
    def process_lost(self, known: Member | Agent, death: DeathCause, silent_s: float) -> None: ...


class Watcher:
    """Watches one process, an instance or an agent."""

    def __init__(
        self,
        known: Member | Agent,
        host: WatchHost,
        settings: ProxySettings,
        gossip_view: GossipView,
    ) -> None:
        self.id = known.id
        self._known = known
        self._host = host
        self._gossip_view = gossip_view
        self._interval_s = settings.load_interval_s
        self._watchdog: Watchdog | None = None
        self._tokens = 0  # Number of tokens that the instance had delivered at the last look.
        # Time of the last report in which each question failed.
        self._failing_s: dict[WatchQuestion, float] = {}
        self._peer: WatchedInstance | AgentBackend
        self._watch_reports: Callable[[float], AbstractAsyncContextManager[AsyncIterator[Any]]]
        self._watch: Watch[Any, Any, Any]
        limits = WatchLimits.of(settings)
        if isinstance(known, Member):
            self._peer = instance = host.backends[known.id]
            self._delivered = host.control.progress.delivered[known.id]
            self._watch_reports = partial(instance.watch_load, is_awaited=self._is_awaited)
            self._watch = InstanceWatch(known, host.control, limits, self)
        else:
            self._peer = agent = host.agent_backends[known.id]
            self._watch_reports = agent.watch_holdings
            self._watch = AgentWatch(known, host.control, limits, self)

    async def run(self) -> None:
        """Watch the process until cancelled, again after each loss."""
        watch = self._watch
        while True:
            session = watch.connects()
            try:
                await self._follow(session)
                fault = UpstreamError("stopped reporting")
            except UpstreamError as error:
                fault = error
            pause_s = watch.ended(session, str(fault), _death_cause(fault), self._host.clock())
            assert pause_s is not None
            await asyncio.sleep(pause_s)

    def _is_awaited(self) -> bool:
        """Return whether streams run at the instance and none has had a token since the last look,
        so that only a report shows that it lives.
        """
        before, self._tokens = self._tokens, self._delivered.tokens
        assert isinstance(self._watch.known, Member)
        return before == self._tokens and bool(self._watch.known.running)

    def look(self) -> None:
        """End the watch if gossip reports the process dead and its own report is overdue too."""
        if self._watchdog is not None:
            self._watchdog.look()

    def _suspect(self) -> bool:
        """Treat the process's silence as its end, unless it is too short; return whether it is."""
        assert self._watchdog is not None
        self._watch.note_tokens()
        return self._watchdog.expire_if_silent()

    def _warn_of(self, report: LoadReport) -> None:
        """Log the questions that the instance fails, once a spell."""
        now_s = self._host.clock()
        for question, failed in report.failing.items():
            last_s = self._failing_s.get(question, -inf)
            self._failing_s[question] = now_s
            if now_s - last_s > _SPELL_OVER_S:
                extra = {"instance": self.id, "question": question, "cause": failed.cause}
                log.warning("question of its watch fails", extra=extra)

    def lose(self, cause: str) -> None:
        """Treat a process that is up as lost, by a cause outside the watch."""
        session = self._watch.session
        assert session is not None
        self._watch.ended(session, cause, DeathCause.FAILED, self._host.clock())

    async def _follow(self, session: int) -> None:
        """Watch the process until the connection ends. Raises UpstreamError: the process is lost or
        unusable.
        """
        await self._perform(session, WatchStep.IDENTIFY)
        watch, clock, end_watch = self._watch, self._host.clock, self._host.end_watch
        silence = watch.silence
        with Watchdog(
            lambda *_: watch.limit_s(clock()), silence=silence, is_patient=True
        ) as watchdog:
            self._watchdog, end_watch[self.id] = watchdog, self._suspect
            beats = asyncio.create_task(self._follow_heartbeats())
            try:
                async with self._watch_reports(self._interval_s) as reports:
                    async for report in reports:
                        if isinstance(report, LoadReport):
                            self._host.load_reported(report)
                            if report.failing:
                                self._warn_of(report)
                        await self._perform(session, watch.reported(session, report, clock()))
            finally:
                self._watchdog = None
                del end_watch[self.id]
                # Do not wait for the end of this task: a loss must be known at once.
                beats.cancel()

    async def _perform(self, session: int, step: WatchStep | End | None) -> None:
        """Carry out this step and the steps that follow from it, until only reports remain to be
        read.
        """
        while step is not None and step is not WatchStep.LISTEN:
            if isinstance(step, End):
                is_unusable = step.death is DeathCause.UNUSABLE
                raise (UnusableError if is_unusable else UpstreamError)(step.cause)
            try:
                info = await self._ask(step)
            except UpstreamError:
                if step is WatchStep.SHAPE:
                    return
                raise
            step = self._watch.answered(session, step, info, self._host.clock())
            if isinstance(info, InstanceInfo) and not isinstance(step, End):
                await self._host.prepare(info)

    async def _ask(self, step: WatchStep) -> InstanceInfo | AgentInfo:
        if step is not WatchStep.FENCE:
            return await self._peer.info()
        assert not isinstance(self._peer, AgentBackend)
        return await self._peer.fence(self._host.control.fences.numbers(self.id))

    async def _follow_heartbeats(self) -> None:
        """Note the heartbeats of the process, if it sends any, until the watch ends."""
        is_stalled = False
        while True:
            try:
                async with self._peer.watch_heartbeats(self._interval_s) as beats:
                    async for beat in beats:
                        self._watch.beat(self._host.clock())
                        was_stalled, is_stalled = is_stalled, beat.loop_age_s > STALL_SHOWN_S
                        if is_stalled and not was_stalled:
                            log.warning("its event loop stalls", extra={"instance": self.id})
            except ConnectionLostError:
                await asyncio.sleep(LONGEST_PAUSE_S)
            except UpstreamError:
                return  # The process sends no heartbeats.

    @property
    def url(self) -> str:
        return self._peer.url

    def is_gossiped_dead(self, epoch: int) -> bool:
        return self._gossip_view.is_dead(self._known.node, self.id, epoch)

    def came_up(self) -> None:
        self._gossip_view.up(self.id)

    def lost(self, epoch: int, cause: str, death: DeathCause, silent_s: float) -> None:
        self._host.process_lost(self._known, death, silent_s)
        self._gossip_view.lost(self.id, self._known.node, epoch, cause)

    def note(self, note: WatchNote, detail: str | list[str]) -> None:
        match note:
            case WatchNote.REFUSED:
                remedy = f"it is looked at again every {LONGEST_PAUSE_S:g} s"
                extra = {"instance": self.id, "cause": detail, "remedy": remedy}
                log.error("refused", extra=extra)
            case WatchNote.UNREACHED:
                log.warning("not reached", extra={"instance": self.id, "cause": detail})
            case WatchNote.NAMES:
                log.info("names", extra={"instance": self.id, "names": detail})
            case WatchNote.OTHER_FORMAT:
                extra = {"instance": self.id, "others": detail}
                log.warning("no hand-offs with these: NIXL's formats differ", extra=extra)


def _death_cause(fault: UpstreamError) -> DeathCause:
    """Return the label by which a loss with this fault is counted."""
    match fault:
        case ConnectionLostError():
            return DeathCause.CONNECTION_LOST
        case SilentError():
            return DeathCause.SILENT
        case UnusableError():
            return DeathCause.UNUSABLE
        case _:
            return DeathCause.FAILED
