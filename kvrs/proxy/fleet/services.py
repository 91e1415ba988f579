"""Look-up of names and pods of `cluster.services`, whose addresses the fleet follows, and of the
nodes of pods, whose faults drain instances.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from kvrs.config.cluster import Found, ServiceSettings, changed, newer, single_changes
from kvrs.core.fleet.drains import Drains
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.net.names import all_addresses
from kvrs.proxy.fleet.pods import PodsUnknownError, node_faults, pod_addresses
from kvrs.proxy.reload import Reloads

log = logging.getLogger(__name__)

LOOK_UP_S = 5.0  # Interval of look-ups in seconds, and the time limit of each.


class ServiceNames:
    """Follows the addresses of services. A name that is not resolved keeps its addresses. A change
    that cannot be applied (it would remove the last live instance of a role, or an instance of that
    id is still being removed) is tried again at the next look-up.
    """

    def __init__(self, reloads: Reloads, drains: Drains, clock: Callable[[], float]) -> None:
        self._reloads, self._drains, self._clock = reloads, drains, clock
        # Nodes of the instances that follow theirs, by service.
        self._nodes: dict[str, Mapping[InstanceId, str]] = {}
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
        await self._follow_nodes({each.id for each in services if each.follow_nodes})

    async def _follow_nodes(self, services: set[str]) -> None:
        """Drain the instances on nodes with a fault; an API that fails changes nothing."""
        self._nodes = {name: nodes for name, nodes in self._nodes.items() if name in services}
        nodes = {each: node for found in self._nodes.values() for each, node in found.items()}
        fault: str | None = None
        try:
            async with asyncio.timeout(LOOK_UP_S):
                names = sorted({*nodes.values()} - {""})
                drain_s = self._reloads.config.cluster.drain_s
                faults = await node_faults(names, drain_s) if names else {}
            for name in names:
                cause = faults[name].cause if name in faults else None
                self._log(f"node {name}", cause, "instances leave a node")
            faulty = {each: faults[node] for each, node in nodes.items() if node in faults}
            self._drains.follow_nodes(faulty, self._clock())
        except (TimeoutError, PodsUnknownError) as error:
            fault = f"nodes: {error or 'no answer'}"
        self._log("nodes", fault, "nodes not followed")

    async def _addresses(self, service: ServiceSettings) -> frozenset[str]:
        """Return the addresses of a service; empty: none now."""
        fault: str | None = None
        found: frozenset[str] = frozenset()
        try:
            async with asyncio.timeout(LOOK_UP_S):
                if service.host is None:
                    pods = await pod_addresses(service)
                    found = frozenset(pods)
                    self._nodes[service.id] = {
                        service.node(address).instances[0].id: node
                        for address, node in pods.items()
                    }
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
