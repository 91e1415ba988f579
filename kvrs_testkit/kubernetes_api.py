"""A server of the part of the Kubernetes API that lists pods and reads nodes, on loopback."""

from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from kvrs_testkit.free_ports import free_ports

TOKEN = "t" * 32


class PodsApi:
    """Pods and nodes by name, changed by the test."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.other: tuple[int, str] | None = None  # Status and body in place of a list.
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._serve)
        app.router.add_get("/api/v1/nodes/{name}", self._serve_node)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
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

    def put(self, name: str, address: str | None, *, node: str = "", **labels: str) -> None:
        """A pod that runs, or has no address yet; its node is well."""
        if node:
            self.nodes[node] = {"metadata": {"name": node}}
        named = {f"kvrs.io/{key}": value for key, value in labels.items()}
        self.pods[name] = {
            "metadata": {"name": name, "labels": named},
            "spec": {"nodeName": node},
            "status": {"phase": "Running", "podIP": address} if address else {"phase": "Pending"},
        }

    def end(self, name: str) -> None:
        """The pod is asked to end, and still runs."""
        self.pods[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def cordon(self, node: str) -> None:
        self.nodes[node]["spec"] = {"unschedulable": True}

    def report(self, node: str, **conditions: str) -> None:
        """The node has these conditions only, and is not cordoned."""
        listed = [{"type": kind, "status": status} for kind, status in conditions.items()]
        self.nodes[node] |= {"spec": {}, "status": {"conditions": listed}}

    async def _serve_node(self, request: web.Request) -> web.Response:
        found = self.nodes.get(request.match_info["name"])
        return web.json_response(found or {"kind": "Status"}, status=200 if found else 403)

    async def _serve(self, request: web.Request) -> web.Response:
        if self.other is not None:
            status, body = self.other
            return web.Response(status=status, text=body)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status"}, status=401)
        selector = request.query.get("labelSelector", "")
        wanted = dict(each.split("=") for each in selector.split(",") if each)
        items = [
            pod for pod in self.pods.values() if wanted.items() <= pod["metadata"]["labels"].items()
        ]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": items})
