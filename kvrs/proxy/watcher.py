"""Watch processes, each over one long-lived connection, whose end is the first sign of the process's death."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import AgentInfo, Capability, InstanceInfo, LoadReport
from kvrs.proxy.agents import KnownAgent
from kvrs.proxy.backends.peer import UnusableError
from kvrs.proxy.checkpoints import Checkpoints
from kvrs.proxy.config import ProxySettings
from kvrs.proxy.driver import Driver
from kvrs.proxy.hearsay import Hearsay
from kvrs.proxy.instances import Health, Known, overdue_after_s
from kvrs.proxy.watchdog import Watchdog, silence_limit, silent_after_s

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Watcher(ABC):
    """Says when its process is up, what it reports, and when it is lost."""

    def __init__(self, subject: Known | KnownAgent, settings: ProxySettings, hearsay: Hearsay) -> None:
        self.id = subject.id
        self.node = subject.node
        self._subject = subject
        self._hearsay = hearsay
        self._interval_s = settings.load_interval_s
        self._overdue_s = overdue_after_s(self._interval_s)
        longest_s = max(settings.token_gap_s, self._overdue_s)
        self._usual_silence_s = silent_after_s(self._interval_s, longest_s)
        self._watchdog: Watchdog | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        subject, pause_s = self._subject, _FIRST_PAUSE_S
        while True:
            try:
                await self._watch()
                cause = "stopped reporting"
            except UnusableError as error:
                cause = str(error)
                self._note_unusable(cause)
            except UpstreamError as error:
                cause = str(error)
            if subject.health is Health.UP:
                assert subject.info is not None
                self._lose(cause)
                self._hearsay.lost(self.id, self.node, subject.info.epoch, cause)
                pause_s = _FIRST_PAUSE_S
            elif subject.health is not Health.REFUSED and subject.reason != cause:
                subject.reason = cause
                log.warning("not reached", extra={"instance": subject.id, "cause": cause})
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    def look(self) -> None:
        """Others say that the process may be gone: if its word is overdue here as well, it is."""
        if self._watchdog is not None:
            self._watchdog.look()

    def _silence_s(self) -> float:
        info = self._subject.info
        epoch = None if info is None else info.epoch
        return self._overdue_s if self._hearsay.is_dead(self.node, self.id, epoch) else self._usual_silence_s

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[Watchdog]:
        async with silence_limit(self._silence_s) as watchdog:
            self._watchdog = watchdog
            try:
                yield watchdog
            finally:
                self._watchdog = None

    @abstractmethod
    async def _watch(self) -> None:
        """From the first word of the process to its last, or until UpstreamError."""

    @abstractmethod
    def _lose(self, cause: str) -> None: ...

    def _refuse(self, fault: str | None) -> None:
        """Raises UpstreamError when there is a fault in who the process says it is."""
        if fault is not None:
            raise UnusableError(fault)

    def _note_unusable(self, fault: str) -> None:
        subject = self._subject
        if subject.reason != fault:
            log.error("refused", extra={"instance": subject.id, "cause": fault})
        if subject.health is not Health.UP:
            subject.health = Health.REFUSED
            subject.reason = fault


class InstanceWatcher(Watcher):
    def __init__(self, known: Known, driver: Driver, settings: ProxySettings, hearsay: Hearsay) -> None:
        super().__init__(known, settings, hearsay)
        self._known = known
        self._driver = driver
        self._lost: InstanceInfo | None = None  # The life of it that we last saw go.

    async def _watch(self) -> None:
        known, info = self._known, await self._meet()
        async with (
            self._limit() as watchdog,
            known.backend.watch_load(self._interval_s) as reports,
        ):
            known.end_watch = watchdog.expire
            try:
                async for report in reports:
                    watchdog.heard()
                    info = await self._heard(info, report)
            finally:
                known.end_watch = None

    async def _heard(self, info: InstanceInfo, report: LoadReport) -> InstanceInfo:
        """Pass a report on; who the instance is now."""
        known = self._known
        if report.epoch != info.epoch:
            # Restarted in between, or fenced by another proxy.
            info = await self._meet()
            if report.epoch != info.epoch:
                raise UpstreamError(f"reports epoch {report.epoch}, but is in {info.epoch}")
        if self._must_run_dry(info) and report.running > 0:
            return info
        if known.health is not Health.UP or known.info is not info:
            # Again: another instance may have become the measure since this one was met.
            self._check(info)
            lives_on = self._lives_on(info)
            self._lost = None
            if not lives_on:
                self._driver.fenced(known.id)
            self._driver.instance_up(known, info, lives_on=lives_on)
            self._hearsay.up(known.id)
        self._driver.load_reported(known, report)
        return info

    def _lives_on(self, info: InstanceInfo) -> bool:
        """Whether this is the process, with the workers, that we have had in view all the time: somebody else has fenced it."""
        before = self._known.info
        if self._known.health is not Health.UP or before is None or Capability.FENCE not in info.capabilities:
            return False
        return (info.pid, info.worker_pids) == (before.pid, before.worker_pids)

    def _lose(self, cause: str) -> None:
        self._lost = self._known.info
        self._driver.instance_lost(self._known, cause)

    async def _meet(self) -> InstanceInfo:
        """Ask who it is; fence it when it lived on while we thought it was gone."""
        known = self._known
        info = await known.backend.info()
        self._check(info)
        if self._lost is not None and info.pid == self._lost.pid and Capability.FENCE in info.capabilities:
            info = await known.backend.fence(self._driver.former_attempts(known.id))
        return info

    def _check(self, info: InstanceInfo) -> None:
        """Refuse an instance that does not fit the configuration or the others."""
        self._refuse(self._driver.instances.fault(self._known, info, streams_open=bool(self._driver.streams)))

    def _must_run_dry(self, info: InstanceInfo) -> bool:
        """An engine that cannot be fenced is used again when nothing of its former life runs on it."""
        # Whose pid nobody is told (0) is known by its epoch, which rises with every process.
        lost = self._lost
        is_same = lost is not None and (info.pid, info.epoch) == (lost.pid, lost.epoch)
        return is_same and Capability.FENCE not in info.capabilities


class AgentWatcher(Watcher):
    def __init__(self, known: KnownAgent, checkpoints: Checkpoints, settings: ProxySettings, hearsay: Hearsay) -> None:
        super().__init__(known, settings, hearsay)
        self._known = known
        self._checkpoints = checkpoints

    async def _watch(self) -> None:
        known, info = self._known, await self._meet()
        async with (
            self._limit() as watchdog,
            known.backend.watch_holdings(self._interval_s) as reports,
        ):
            async for report in reports:
                watchdog.heard()
                if report.epoch != info.epoch:
                    raise UpstreamError(f"reports epoch {report.epoch}, but was in {info.epoch}")
                if known.health is not Health.UP:
                    self._checkpoints.up(known, info)
                    self._hearsay.up(known.id)
                self._checkpoints.reported(known, report)

    def _lose(self, cause: str) -> None:
        self._checkpoints.lost(self._known, cause)

    async def _meet(self) -> AgentInfo:
        info = await self._known.backend.info()
        self._refuse(self._checkpoints.agents.fault(self._known, info))
        return info
