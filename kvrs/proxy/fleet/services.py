"""Look-up of names and pods of `cluster.services`, whose addresses the fleet follows."""

import asyncio
import logging

from kvrs.config.cluster import ServiceSettings
from kvrs.core.fleet.services import Found, changed, newer, single_changes
from kvrs.errors import ConfigError
from kvrs.net.names import all_addresses
from kvrs.proxy.fleet.pods import PodsUnknownError, pod_addresses
from kvrs.proxy.reload import Reloads

log = logging.getLogger(__name__)

LOOK_UP_S = 5.0  # Interval of look-ups in seconds, and the time limit of each.


class ServiceNames:
    """Follows the addresses of services. A name that is not resolved keeps its addresses. A change
    that cannot be applied (it would remove the last live instance of a role, or an instance of that
    id is still being removed) is tried again at the next look-up.
    """

    def __init__(self, reloads: Reloads) -> None:
        self._reloads = reloads
        # Faults that were logged, by service; under "": faults of changes.
        self._faults: dict[str, str] = {}

    async def run(self) -> None:
        """Look up all services every LOOK_UP_S until cancelled."""
        while True:
            await asyncio.sleep(LOOK_UP_S)
            await self.look_up()

    async def look_up(self) -> None:
        """Look up all services once, and apply the addresses found."""
        services = self._reloads.config.cluster.services
        if not (services or self._reloads.found):
            return
        found = await asyncio.gather(*map(self._addresses, services))
        answers = {service.id: each for service, each in zip(services, found, strict=True)}
        wanted = newer(self._reloads.found, services, answers)
        if wanted != self._reloads.found:
            self._log("", await self._follow(wanted), "addresses not followed yet")

    async def _addresses(self, service: ServiceSettings) -> frozenset[str]:
        """Return the addresses of a service; empty: none now."""
        fault: str | None = None
        found: frozenset[str] = frozenset()
        try:
            async with asyncio.timeout(LOOK_UP_S):
                if service.host is None:
                    found = await pod_addresses(service)
                else:
                    found = await all_addresses(service.host)
        except OSError as error:
            fault = f"{service.host or service.pods}: {error.strerror or 'no answer'}"
        except PodsUnknownError as error:
            fault = f"pods {service.pods}: {error}"
        self._log(service.id, fault, "addresses not found")
        return found

    async def _follow(self, wanted: Found) -> str | None:
        """Apply all changes of addresses at once, or else each possible change; return why a change
        is impossible.
        """
        if await self._take(wanted) is None:
            return None
        cause = None
        for service, address in single_changes(self._reloads.found, wanted):
            cause = await self._take(changed(self._reloads.found, service, address)) or cause
        return cause

    async def _take(self, found: Found) -> str | None:
        """Apply the addresses of services; return why that is impossible, or None."""
        try:
            await self._reloads.follow_services(found)
        except ConfigError as error:
            return str(error)
        return None

    def _log(self, name: str, cause: str | None, message: str) -> None:
        """Log a cause once, as long as it stays the same; None: the fault is over."""
        if cause is None:
            self._faults.pop(name, None)
        elif self._faults.get(name) != cause:
            self._faults[name] = cause
            log.warning(message, extra={"cause": cause})
