"""Watch processes, each over one long-lived connection, whose end is the first sign of the
process's death.
"""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

import msgspec

from kvrs.config.proxy import ProxySettings
from kvrs.core.fleet.known import Health, KnownAgent, KnownInstance
from kvrs.core.fleet.names import listed_names
from kvrs.core.fleet.silence import FIRST_PAUSE_S, LONGEST_PAUSE_S, WatchLimits
from kvrs.core.model import events as ev
from kvrs.errors import UpstreamError
from kvrs.protocol.instance import NO_OTHER_NAMES, AgentInfo, InstanceInfo, LoadReport
from kvrs.proxy.backends.agent import AgentBackend
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import DeathCause
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.wire.peer import ConnectionLostError, UnusableError
from kvrs.proxy.wire.watchdog import SilentError, Watchdog

log = logging.getLogger(__name__)

# A longer stall of a process's event loop is logged.
STALL_SHOWN_S = 1.0


class Watcher(ABC):
    """Says when its process is up, what it reports, and when it is lost."""

    def __init__(
        self,
        subject: KnownInstance | KnownAgent,
        peer: Backend | AgentBackend,
        settings: ProxySettings,
        gossip_view: GossipView,
    ) -> None:
        self.id = subject.id
        self.node = subject.node
        self._subject = subject
        self._peer = peer
        self._gossip_view = gossip_view
        self._interval_s = settings.load_interval_s
        self._limits = WatchLimits.of(settings)
        self._watchdog: Watchdog | None = None
        self._reported_s = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        subject, pause_s = self._subject, FIRST_PAUSE_S
        while True:
            try:
                await self._watch()
                fault = UpstreamError("stopped reporting")
            except UpstreamError as error:
                fault = error
            cause = str(fault)
            if isinstance(fault, UnusableError):
                self._note_unusable(cause)
            if subject.health is Health.UP:
                assert subject.info is not None
                self._lose(cause, _death_cause(fault))
                self._gossip_view.lost(self.id, self.node, subject.info.epoch, cause)
                pause_s = FIRST_PAUSE_S
            elif subject.health is not Health.REFUSED:
                self._note_unreached(f"{cause} ({self._peer.url})")
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def look(self) -> None:
        """Gossip reports the process dead: declare it lost if its own report is overdue too."""
        if self._watchdog is not None:
            self._watchdog.look()

    def _silence_s(self) -> float:
        info = self._subject.info
        epoch = None if info is None else info.epoch
        return self._limits.silence_s(
            is_gossiped_dead=self._gossip_view.is_dead(self.node, self.id, epoch),
            beats_for_s=self._subject.beat_s - self._reported_s,
            alone_for_s=self._others_since_s() - self._reported_s,
        )

    def _others_since_s(self) -> float:
        """Since when others could take what this process does."""
        return -inf

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[Callable[[], None]]:
        """A block that ends when no report was `heard` for too long."""
        with Watchdog(self._silence_s) as watchdog:

            def heard() -> None:
                self._reported_s = time.monotonic()
                watchdog.heard()

            heard()
            self._watchdog = watchdog
            listening = asyncio.create_task(self._listen())
            try:
                yield heard
            finally:
                self._watchdog = None
                listening.cancel()  # Not awaited: a loss is to be known at once.

    async def _listen(self) -> None:
        """Note the heartbeats of the process, if it has any: its death is the end of the watch."""
        is_stalled = False
        while True:
            try:
                async with self._peer.watch_heartbeats(self._interval_s) as beats:
                    async for beat in beats:
                        self._subject.beat_s = time.monotonic()
                        was_stalled, is_stalled = is_stalled, beat.loop_age_s > STALL_SHOWN_S
                        if is_stalled and not was_stalled:
                            log.warning("its event loop stalls", extra={"instance": self.id})
            except ConnectionLostError:
                await asyncio.sleep(LONGEST_PAUSE_S)
            except UpstreamError:
                return  # It has none.

    @abstractmethod
    async def _watch(self) -> None:
        """Watch the process from its first report until the connection ends, or UpstreamError."""

    @abstractmethod
    def _lose(self, cause: str, death: DeathCause) -> None: ...

    def _refuse(self, fault: str | None) -> None:
        """Raises UpstreamError: the identity that the process reports is wrong."""
        if fault is not None:
            raise UnusableError(fault)

    def _note_unreached(self, reason: str) -> None:
        subject = self._subject
        if subject.reason != reason:
            subject.reason = reason
            log.warning("not reached", extra={"instance": subject.id, "cause": reason})

    def _note_unusable(self, fault: str) -> None:
        subject = self._subject
        if subject.reason != fault:
            log.error("refused", extra={"instance": subject.id, "cause": fault})
        if subject.health is not Health.UP:
            subject.health = Health.REFUSED
            subject.reason = fault


class InstanceWatcher(Watcher):
    def __init__(
        self, known: KnownInstance, driver: Driver, settings: ProxySettings, gossip_view: GossipView
    ) -> None:
        self._backend = driver.backends[known.id]
        super().__init__(known, self._backend, settings, gossip_view)
        self._known = known
        self._driver = driver
        self._shape: tuple[int, int, int] | None = None  # Of its ranks, when they were learned.

    async def _watch(self) -> None:
        known, info = self._known, await self._meet()
        self._shape = None
        async with (
            self._limit() as heard,
            self._backend.watch_load(self._interval_s) as reports,
        ):
            assert self._watchdog is not None
            self._driver.end_watch[known.id] = self._watchdog.expire_if_silent
            try:
                async for report in reports:
                    heard()
                    info = await self._heard(info, report)
            finally:
                del self._driver.end_watch[known.id]

    async def _heard(self, info: InstanceInfo, report: LoadReport) -> InstanceInfo:
        """Pass a report on; returns the identity of the instance now."""
        known = self._known
        if report.epoch != info.epoch:
            # Restarted in between, or fenced by another proxy.
            info = await self._meet()
            if report.epoch != info.epoch:
                raise UpstreamError(f"reports epoch {report.epoch}, but is in {info.epoch}")
        if known.must_drain_before_use(info) and report.running > 0:
            return info
        if known.health is not Health.UP or known.info is not info:
            # Again: another instance may have become the measure since this one was met.
            self._check(info)
            self._driver.control.instance_up(known, info, self._driver.clock())
            if info.names != NO_OTHER_NAMES:
                log.info("names", extra={"instance": known.id, "names": listed_names(info)})
            self._gossip_view.up(known.id)
        if report.names is not None and report.names != info.names:
            info = msgspec.structs.replace(info, names=report.names)
            self._relisted(info)
            log.info("names", extra={"instance": known.id, "names": listed_names(info)})
        self._driver.control.load_reported(known, report, self._driver.clock())
        return await self._with_ranks(info, report) if report.full_degree else info

    def _relisted(self, info: InstanceInfo) -> None:
        """The same process serves other names than before."""
        control, self._known.info = self._driver.control, info
        control.instances.names.changed()
        listed = ev.NamesListed(info.id, info.epoch, info.names)
        control.tell(listed, self._driver.clock())

    async def _with_ranks(self, info: InstanceInfo, report: LoadReport) -> InstanceInfo:
        """Ranks and layout change without a new epoch."""
        number = 0 if report.reforming is None else report.reforming.number
        shape = report.layout_number, report.degree, number
        if shape != self._shape:
            with contextlib.suppress(UpstreamError):  # Then with the next report.
                now = await self._backend.info()
                info = msgspec.structs.replace(info, ranks=now.ranks, layout=now.layout)
                self._known.info, self._shape = info, shape
        return info

    def _others_since_s(self) -> float:
        return self._driver.control.progress.others_since_s(self._known.id, self._driver.clock())

    def _lose(self, cause: str, death: DeathCause) -> None:
        self._driver.instance_lost(self._known, cause, death)

    async def _meet(self) -> InstanceInfo:
        """Ask the instance for its identity; fence it if it ran on while it was taken for lost."""
        info = await self._backend.info()
        self._check(info)
        if self._known.must_be_fenced(info):
            info = await self._backend.fence(self._driver.control.fences.numbers(self._known.id))
        return info

    def _check(self, info: InstanceInfo) -> None:
        """Refuse an instance that does not fit the configuration or the others."""
        control = self._driver.control
        self._refuse(control.instances.fault(self._known, info, streams_open=bool(control.streams)))


class AgentWatcher(Watcher):
    def __init__(
        self,
        known: KnownAgent,
        driver: Driver,
        settings: ProxySettings,
        gossip_view: GossipView,
    ) -> None:
        self._backend = driver.agent_backends[known.id]
        super().__init__(known, self._backend, settings, gossip_view)
        self._known = known
        self._driver = driver
        self._checkpoints = driver.control.checkpoints
        self._clock = driver.clock

    async def _watch(self) -> None:
        known, info = self._known, await self._meet()
        async with (
            self._limit() as heard,
            self._backend.watch_holdings(self._interval_s) as reports,
        ):
            async for report in reports:
                heard()
                if report.epoch != info.epoch:
                    raise UpstreamError(f"reports epoch {report.epoch}, but was in {info.epoch}")
                if known.health is not Health.UP:
                    self._checkpoints.up(known, info, self._clock())
                    self._gossip_view.up(known.id)
                self._checkpoints.reported(known, report, self._clock())

    def _lose(self, cause: str, death: DeathCause) -> None:
        self._driver.agent_lost(self._known, cause, death)

    async def _meet(self) -> AgentInfo:
        info = await self._backend.info()
        self._refuse(self._checkpoints.agents.fault(self._known, info))
        return info


def _death_cause(fault: UpstreamError) -> DeathCause:
    """The label under which a loss by this fault is counted."""
    match fault:
        case ConnectionLostError():
            return DeathCause.CONNECTION_LOST
        case SilentError():
            return DeathCause.SILENT
        case UnusableError():
            return DeathCause.UNUSABLE
        case _:
            return DeathCause.FAILED
