"""Addresses of the pods of `cluster.services`, and faults of their nodes, by the API of Kubernetes
through kubernetes-asyncio. The client is imported only if a service has pods, because the import
takes a second.
"""

import asyncio
import ipaddress
import os
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from kvrs.config.cluster import ServiceSettings
from kvrs.core.fleet.drains import NodeFault
from kvrs.errors import ConfigError, MissingExtraError, check_extras

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
