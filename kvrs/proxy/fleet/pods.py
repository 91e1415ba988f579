"""Watches the pods of `cluster.services` by the API of Kubernetes, through kubernetes-asyncio.

A watch begins with a list, and again after its end or failure; meanwhile the addresses stay. The
client is imported only if a service has pods, because the import takes a second.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Iterable
from typing import Any

import aiohttp

from kvrs.config.cluster import ServiceSettings
from kvrs.core.fleet.pods import PodAddresses
from kvrs.errors import ConfigError, MissingExtraError, check_extras

log = logging.getLogger(__name__)

_WATCH_S = 300  # Time after which the API ends a watch, and the next one begins with a list.
_LATE_S = 30.0  # Silence after which the API counts as lost.
_WAIT_S = (1.0, 30.0)  # First and longest pause after failures.
_CLUSTER_ENV = "KUBERNETES_SERVICE_HOST"  # Environment variable that pods have.


class PodsUnknownError(Exception):
    """The API has not answered yet; the message has the cause."""


class PodWatch:
    """Watch of one service's pods by a task, until `close`. `changed` is set at each change."""

    def __init__(self, service: ServiceSettings, changed: asyncio.Event) -> None:
        self._namespace, self._selector = service.namespace, service.pods
        self._addresses = PodAddresses()
        self._changed = changed
        self._is_listed = asyncio.Event()
        self._cause = "no answer yet"
        self._task = asyncio.create_task(self._run())

    async def addresses(self, within_s: float) -> frozenset[str]:
        """Known addresses, after the first list.

        Raises:
            PodsUnknownError: no list within this time.
        """
        if self._task.done():
            self._task.result()  # Raises a bug of the task.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_listed.wait()
        if not self._is_listed.is_set():
            raise PodsUnknownError(self._cause)
        return self._addresses.all

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        client = await asyncio.to_thread(_imported)
        wait_s = _WAIT_S[0]
        while True:
            try:
                async with await _api_client(client) as api:
                    while True:
                        await self._watch_once(client, api)
                        wait_s = _WAIT_S[0]
            except client.ApiException as error:
                self._failed(f"HTTP {error.status}: {error.reason}")
            except aiohttp.ClientResponseError as error:
                self._failed(f"HTTP {error.status}: {error.message}")
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._failed(f"an answer that is none of the API: {error!r:.200}")
            except (aiohttp.ClientError, OSError, client.ConfigException) as error:
                self._failed(str(error))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _WAIT_S[1])

    async def _watch_once(self, client: Any, api: Any) -> None:
        """List, then follow events until the API ends them."""
        pods = client.CoreV1Api(api)
        asked: dict[str, Any] = {"label_selector": self._selector, "_preload_content": False}
        asked |= {"_request_timeout": _WATCH_S + _LATE_S}
        answer = await pods.list_namespaced_pod(self._namespace, **asked)
        answer.raise_for_status()
        listed = await answer.json()
        before = self._addresses.all
        self._addresses.replace(listed["items"])
        self._is_listed.set()
        self._tell(before)
        self._cause = ""
        asked |= {"resource_version": listed["metadata"]["resourceVersion"]}
        asked |= {"watch": True, "timeout_seconds": _WATCH_S}
        async with await pods.list_namespaced_pod(self._namespace, **asked) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                kind, pod = event["type"], event["object"]
                if kind == "ERROR":
                    raise client.ApiException(status=pod.get("code"), reason=pod.get("message"))
                before = self._addresses.all
                self._addresses.take(kind, pod)
                self._tell(before)

    def _tell(self, before: frozenset[str]) -> None:
        if self._addresses.all != before:
            self._changed.set()

    def _failed(self, cause: str) -> None:
        if cause != self._cause:
            log.warning("pods not watched", extra={"selector": self._selector, "cause": cause})
        self._cause = cause


class PodWatches:
    """Watches of all services with pods, which may change at a reload."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._watches: dict[ServiceSettings, PodWatch] = {}

    async def follow(self, services: Iterable[ServiceSettings]) -> None:
        wanted = [service for service in services if service.pods is not None]
        for service in wanted:
            if service not in self._watches:
                self._watches[service] = PodWatch(service, self._changed)
        for service in self._watches.keys() - wanted:
            await self._watches.pop(service).close()

    async def addresses(self, service: ServiceSettings, within_s: float) -> frozenset[str]:
        """Addresses of a service's pods. Raises PodsUnknownError: no answer within this time."""
        return await self._watches[service].addresses(within_s)

    async def wait(self, within_s: float) -> None:
        """Wait until pods come or go, at most this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        for watch in self._watches.values():
            await watch.close()
        self._watches.clear()


def check_pods(services: Iterable[ServiceSettings]) -> None:
    """Raises ConfigError: a service has pods, and the client is not installed."""
    if any(service.pods is not None for service in services):
        try:
            check_extras("kubernetes")
        except MissingExtraError as error:
            raise ConfigError(f"cluster.services: pods need a client: {error}") from None


def _imported() -> Any:
    """The used parts of the client's package, under one name."""
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
