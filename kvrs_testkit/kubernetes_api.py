"""A server of the part of the Kubernetes API that lists and watches pods, on loopback."""

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from kvrs_testkit.free_ports import free_ports

TOKEN = "t" * 32


class PodsApi:
    """Pods by name, changed by the test; each change is an event for those that watch."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.lists = 0  # How many were asked for.
        self.refusal: int | None = None  # Status of all answers.
        self.refused_watches: tuple[int, str] | None = None  # Status and body of their answers.
        self.url = ""
        self._version = 100
        self._events: dict[int, dict[str, Any]] = {}  # Each change, by the version after it.
        self._watching: dict[asyncio.Queue[dict[str, Any] | None], dict[str, str]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    def kubeconfig(self, directory: Path) -> Path:
        """A file for clients of this server."""
        path = directory / "kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "proxy", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "proxy"}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def put(self, name: str, address: str | None, *, uid: str = "", **labels: str) -> None:
        """A pod that runs, or has no address yet."""
        pod = {
            "metadata": {"name": name, "uid": uid or name, "labels": _with_slashes(labels)},
            "status": {"phase": "Running", "podIP": address} if address else {"phase": "Pending"},
        }
        self._change("MODIFIED" if name in self.pods else "ADDED", name, pod)

    def end(self, name: str) -> None:
        """It is asked to end, and still runs."""
        pod = self.pods[name]
        metadata = pod["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        self._change("MODIFIED", name, pod | {"metadata": metadata})

    def remove(self, name: str) -> None:
        self._change("DELETED", name, self.pods[name])
        del self.pods[name]

    def cut(self) -> None:
        """End all watches."""
        for queue in self._watching:
            queue.put_nowait(None)

    def expire(self) -> None:
        """Tell those that watch that their version is too old."""
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        for queue in self._watching:
            queue.put_nowait({"type": "ERROR", "object": status})

    def _change(self, kind: str, name: str, pod: dict[str, Any]) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self.pods[name] = pod
        self._events[self._version] = event = {"type": kind, "object": pod}
        for queue, wanted in self._watching.items():
            if _is_about(event, wanted):
                queue.put_nowait(event)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.refusal is not None or request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status"}, status=self.refusal or 401)
        selector = request.query.get("labelSelector", "")
        wanted = dict(each.split("=") for each in selector.split(",") if each)
        if request.query.get("watch") in ("true", "True"):
            if self.refused_watches is not None:
                status, body = self.refused_watches
                return web.Response(status=status, text=body)
            return await self._watch(request, wanted)
        self.lists += 1
        items = [
            pod for pod in self.pods.values() if wanted.items() <= pod["metadata"]["labels"].items()
        ]
        listed = {"metadata": {"resourceVersion": str(self._version)}, "items": items}
        return web.json_response({"kind": "PodList", "apiVersion": "v1"} | listed)

    async def _watch(self, request: web.Request, wanted: dict[str, str]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        listed = int(request.query["resourceVersion"])
        for version, change in self._events.items():
            if version > listed and _is_about(change, wanted):
                queue.put_nowait(change)
        self._watching[queue] = wanted
        try:
            await answer.prepare(request)
            while (event := await queue.get()) is not None:
                await answer.write(json.dumps(event).encode() + b"\n")
        finally:
            del self._watching[queue]
        return answer


def _is_about(event: dict[str, Any], wanted: dict[str, str]) -> bool:
    """The event is about a pod with these labels."""
    labels: dict[str, str] = event["object"]["metadata"]["labels"]
    return wanted.items() <= labels.items()


def _with_slashes(labels: dict[str, str]) -> dict[str, str]:
    return {f"kvrs.io/{name}": value for name, value in labels.items()}
