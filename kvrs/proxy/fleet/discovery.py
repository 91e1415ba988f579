"""Discovery of a fleet's instances.

Addresses of the pods of `cluster.services`, and faults of their nodes, by the API of Kubernetes
through kubernetes-asyncio. The client is imported only if a service has pods, because the import
takes a second.

Look-up of names and pods of `cluster.services`, whose addresses the fleet follows, and of the
nodes of pods, whose faults drain instances.
"""

import asyncio
import ipaddress
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from kvrs.config.cluster import Found, ServiceSettings, changed, newer, single_changes
from kvrs.core.fleet.drains import Drains, NodeFault
from kvrs.errors import ConfigError, MissingExtraError, check_extras
from kvrs.ids import InstanceId
from kvrs.net.names import all_addresses
from kvrs.proxy.reload import Reloads

log = logging.getLogger(__name__)

_CLUSTER_ENV = "KUBERNETES_SERVICE_HOST"  # Environment variable that Kubernetes sets in each pod.
_OVER = ("Succeeded", "Failed")
# Status that conditions of a healthy node have, by their type: those of Kubernetes, of its
# node-problem-detector, and of EKS.
_HEALTHY = {
    "Ready": "True",
    "AcceleratedHardwareReady": "True",
    "MemoryPressure": "False",
    "DiskPressure": "False",
    "PIDPressure": "False",
    "NetworkUnavailable": "False",
    "KernelDeadlock": "False",
    "ReadonlyFilesystem": "False",
}

Thing = Mapping[str, Any]  # A pod or node as the API describes it, decoded from JSON.


class PodsUnknownError(Exception):
    """The API of Kubernetes gives no list of pods; the message has the cause."""


async def pod_addresses(service: ServiceSettings) -> dict[str, str]:
    """Return the addresses of a service's pods that may serve, with the name of the node of each.

    Raises:
        PodsUnknownError: the API refuses, fails or cannot be reached.
    """
    async with _api() as api:
        listed = await _json(
            api.list_namespaced_pod(
                service.namespace, label_selector=service.pods, _preload_content=False
            )
        )
        found = [(address_of(pod), pod.get("spec", {})) for pod in listed["items"]]
        return {address: spec.get("nodeName", "") for address, spec in found if address is not None}


async def node_faults(names: Iterable[str], drain_s: float) -> dict[str, NodeFault]:
    """Return the faults of these nodes. `drain_s`: longest time that streams stay on a node that
    serves on for now. Raises as `pod_addresses`.
    """
    async with _api() as api:
        asked = (_json(api.read_node(name, _preload_content=False)) for name in names)
        nodes = await asyncio.gather(*asked)
        faults = ((node["metadata"]["name"], fault_of(node, drain_s)) for node in nodes)
        return {name: fault for name, fault in faults if fault is not None}


@asynccontextmanager
async def _api() -> AsyncIterator[Any]:
    """Open the core API. Raises PodsUnknownError for all errors of the API."""
    client = await asyncio.to_thread(_imported)
    try:
        async with await _api_client(client) as api:
            yield client.CoreV1Api(api)
    except client.ApiException as error:
        raise PodsUnknownError(f"HTTP {error.status}: {error.reason}") from None
    except aiohttp.ClientResponseError as error:
        raise PodsUnknownError(f"HTTP {error.status}: {error.message}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PodsUnknownError(f"an answer that is none of the API: {error!r:.200}") from None
    except (aiohttp.ClientError, client.ConfigException) as error:
        raise PodsUnknownError(str(error)) from None


async def _json(asked: Awaitable[Any]) -> Any:
    answer = await asked
    answer.raise_for_status()
    return await answer.json(content_type=None)


def fault_of(node: Thing, drain_s: float) -> NodeFault | None:
    """Return why instances should leave a node; None: they may stay. Conditions that Kubernetes
    does not know are no fault, except `Ready`: then the node does not answer.
    """
    name, spec = node["metadata"]["name"], node.get("spec", {})
    for condition in node.get("status", {}).get("conditions", ()):
        kind, status = condition["type"], condition["status"]
        is_known = status != "Unknown" or kind == "Ready"
        if is_known and status != _HEALTHY.get(kind, status):
            return NodeFault(f"its node {name} reports {kind}={status}", 0.0)
    if spec.get("unschedulable") or "deletionTimestamp" in node["metadata"]:
        return NodeFault(f"its node {name} is cordoned", drain_s)
    return None


def address_of(pod: Thing) -> str | None:
    """Return the numeric address of a pod that may serve; None: the pod has no address yet, or is
    about to end.
    """
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"] or status.get("phase") in _OVER:
        return None
    try:
        return str(ipaddress.ip_address(status.get("podIP", "")))
    except ValueError:
        return None


def check_pods(services: Iterable[ServiceSettings]) -> None:
    """Check that the client is installed if a service has pods. Raises ConfigError: it is not."""
    if any(service.pods is not None for service in services):
        try:
            check_extras("kubernetes")
        except MissingExtraError as error:
            raise ConfigError(f"cluster.services: pods need a client: {error}") from None


def _imported() -> Any:
    """Import the client's package; return the parts in use under one name."""
    from types import SimpleNamespace

    from kubernetes_asyncio import client, config

    return SimpleNamespace(
        ApiClient=client.ApiClient,
        ApiException=client.ApiException,
        ConfigException=config.ConfigException,
        Configuration=client.Configuration,
        CoreV1Api=client.CoreV1Api,
        load_incluster_config=config.load_incluster_config,
        load_kube_config=config.load_kube_config,
    )


async def _api_client(client: Any) -> Any:
    """Make a client with the pod's own account, or outside pods by the file of KUBECONFIG."""
    configuration = client.Configuration()
    if os.environ.get(_CLUSTER_ENV):
        client.load_incluster_config(client_configuration=configuration)
    else:
        path = os.environ.get("KUBECONFIG") or None
        await client.load_kube_config(path, client_configuration=configuration)
    return client.ApiClient(configuration)


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
