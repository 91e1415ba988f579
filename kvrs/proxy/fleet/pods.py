"""Addresses of the pods of `cluster.services`, listed by the API of Kubernetes through
kubernetes-asyncio. The client is imported only if a service has pods, because the import takes a
second.
"""

import asyncio
import ipaddress
import os
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from kvrs.config.cluster import ServiceSettings
from kvrs.errors import ConfigError, MissingExtraError, check_extras

_CLUSTER_ENV = "KUBERNETES_SERVICE_HOST"  # Environment variable that Kubernetes sets in each pod.
_OVER = ("Succeeded", "Failed")

Pod = Mapping[str, Any]  # A pod as the API describes it, decoded from JSON.


class PodsUnknownError(Exception):
    """The API of Kubernetes gives no list of pods; the message has the cause."""


async def pod_addresses(service: ServiceSettings) -> frozenset[str]:
    """Return the addresses of a service's pods that may serve.

    Raises:
        PodsUnknownError: the API refuses, fails or cannot be reached.
    """
    client = await asyncio.to_thread(_imported)
    asked = {"label_selector": service.pods, "_preload_content": False}
    try:
        async with await _api_client(client) as api:
            pods = client.CoreV1Api(api)
            answer = await pods.list_namespaced_pod(service.namespace, **asked)
            answer.raise_for_status()
            listed = await answer.json(content_type=None)
            found = map(address_of, listed["items"])
            return frozenset(address for address in found if address is not None)
    except client.ApiException as error:
        raise PodsUnknownError(f"HTTP {error.status}: {error.reason}") from None
    except aiohttp.ClientResponseError as error:
        raise PodsUnknownError(f"HTTP {error.status}: {error.message}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PodsUnknownError(f"an answer that is none of the API: {error!r:.200}") from None
    except (aiohttp.ClientError, client.ConfigException) as error:
        raise PodsUnknownError(str(error)) from None


def address_of(pod: Pod) -> str | None:
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
