"""Watches one instance over one long-lived connection, whose end is the first sign of the instance's death."""

import asyncio
import logging

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import Capability, InstanceInfo
from kvrs.proxy.config import ProxySettings
from kvrs.proxy.driver import Driver
from kvrs.proxy.instances import Health, Known

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Watcher:
    """Says when its instance is up, how loaded it is, and when it is lost."""

    def __init__(self, known: Known, driver: Driver, settings: ProxySettings) -> None:
        self._known = known
        self._driver = driver
        self._interval_s = settings.load_interval_s
        self._silence_s = settings.token_gap_s
        self._lost: InstanceInfo | None = None  # The life of it that we last saw go.

    async def run(self) -> None:
        """Watch until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._watch()
            except UpstreamError as error:
                cause = str(error)
            if self._known.health is Health.UP:
                self._lost = self._known.info
                self._driver.instance_lost(self._known, cause)
                pause_s = _FIRST_PAUSE_S
            elif self._known.health is not Health.REFUSED and self._known.reason != cause:
                self._known.reason = cause
                log.warning("instance not reached", extra={"instance": self._known.id, "cause": cause})
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    async def _watch(self) -> None:
        """From the first word of the instance to its last. Always ends in UpstreamError."""
        info = await self._meet()
        async with self._known.backend.watch_load(self._interval_s, self._silence_s) as reports:
            async for report in reports:
                if report.epoch != info.epoch:
                    # Restarted in between, or fenced by another proxy.
                    info = await self._meet()
                    if report.epoch != info.epoch:
                        raise UpstreamError(f"reports epoch {report.epoch}, but is in {info.epoch}")
                if self._must_run_dry(info) and report.running > 0:
                    continue
                if self._known.health is not Health.UP or self._known.info is not info:
                    # Again: another instance may have become the measure since this one was met.
                    self._check(info)
                    self._lost = None
                    self._driver.fenced(self._known.id)
                    self._driver.instance_up(self._known, info)
                self._driver.load_reported(self._known, report)
        raise UpstreamError("stopped reporting its load")

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
        known = self._known
        fault = self._driver.instances.fault(known, info, streams_open=bool(self._driver.streams))
        if fault is None:
            return
        if known.reason != fault:
            log.error("instance refused", extra={"instance": known.id, "cause": fault})
        if known.health is not Health.UP:
            known.health = Health.REFUSED
            known.reason = fault
        raise UpstreamError(fault)

    def _must_run_dry(self, info: InstanceInfo) -> bool:
        """An engine that cannot be fenced is used again when nothing of its former life runs on it."""
        return self._lost is not None and info.pid == self._lost.pid and Capability.FENCE not in info.capabilities
