"""Real clusters of each engine, as far as the contract suite handles them: started, hit, back
again.

Each has p0 and d0 on node n0, and d1 on n1; more may be there.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import msgspec
import pytest

from kvrs.config.file import Config, parse_config
from kvrs.errors import RequestError
from kvrs.net.http import answer
from kvrs.net.routes import Request, Response
from kvrs_testkit.processes import ForkedProcesses, Processes
from kvrs_testkit.scripted_server import SECRET, ScriptedServer
from kvrs_testkit.scripted_sglang import ScriptedSglang, SglangScript
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.sglang_cluster import document as sglang_document
from kvrs_testkit.sglang_cluster import role_of
from kvrs_testkit.vllm_cluster import ADDRESSES, CONFIG, document

_NODES = [
    {"id": "n0", "instances": [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode"}]},
    {"id": "n1", "instances": [{"id": "d1", "role": "decode"}]},
]
_PAIRS = [
    {
        "id": f"n{n}",
        "instances": [{"id": f"p{n}", "role": "prefill"}, {"id": f"d{n}", "role": "decode"}],
    }
    for n in range(2)
]
_ENGINE = {"pages": 256, "max_model_len": 1024}
_HOME = "DISTSERVE_HOME"
_MAX_TOKEN = 1 << 20
_SCRIPTED_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 300.0  # Of a DistServe server: Ray, its workers, their torch.


class Cluster(Protocol):
    """The operations of a cluster that its instances' own interface lacks."""

    config: Config
    secret: bytes

    def kill(self, name: str, worker_pids: list[int]) -> None:
        """Kill the instance; `worker_pids` are those that it has reported."""

    def bring_back(self, name: str) -> None:
        """Start what was killed again, unless it comes back by itself; return when it does, or a
        moment before.
        """


class EmbeddedCluster(ForkedProcesses):
    def start(self, *names: str) -> None:
        for name in names:
            # Above every fence of the epochs before.
            self._starts[name] += 100
        super().start(*names)

    def kill(self, name: str, worker_pids: list[int]) -> None:  # type: ignore[override]
        super().kill(name)

    def bring_back(self, name: str) -> None:
        self.start(name)
        self.wait_ready(name)


class DistServeCluster(Processes):
    """Two servers, each of which is two instances: what dies of one is a stage, and it comes back
    by itself.
    """

    def start(self, *nodes: str) -> None:
        for node in nodes:
            self._starts[node] += 100
            epoch = str(self._starts[node] + 1)
            arguments = [
                "--kvrs-config",
                str(self._config_path),
                "--kvrs-node",
                node,
                "--epoch",
                epoch,
            ]
            self._spawn(node, "distserve_patches.api_server", *arguments)

    def wait_ready(self, *nodes: str) -> None:
        for node in nodes:
            self._wait(node, partial(self._is_ready, node), _START_TIMEOUT_S)

    def _is_ready(self, node: str) -> bool:
        return b"ready" in self._log(node).read_bytes().splitlines()

    def kill(self, name: str, worker_pids: list[int]) -> None:  # type: ignore[override]
        assert worker_pids, f"{name} names no worker"
        for pid in worker_pids:
            os.kill(pid, signal.SIGKILL)

    def bring_back(self, name: str) -> None:
        """The server does."""


class StockCluster:
    """Real servers of `tests/conftest.py`."""

    secret = b"none of their business"

    def __init__(self, servers: Any) -> None:
        self.config: Config = servers.config
        self._servers = servers

    def kill(self, name: str, worker_pids: list[int]) -> None:
        self._servers.kill(name)

    def bring_back(self, name: str) -> None:
        self._servers.start(name)
        self._servers.wait_ready(name)


class _ScriptedVllm(ScriptedVllm):
    """A scripted server that refuses what vLLM refuses."""

    async def _completions(self, request: Request) -> Response:
        prompt = msgspec.json.decode(await request.read()).get("prompt", "")
        if isinstance(prompt, list) and max(prompt) > _MAX_TOKEN:
            message = f"Token id {max(prompt)} is out of vocabulary"
            return _refusal(message, "prompt")
        try:
            return await super()._completions(request)
        except RequestError as error:
            return _refusal(str(error), error.param)


def _refusal(message: str, param: str | None) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    return answer({"error": error}, 400)


class _ScriptedSglang(ScriptedSglang):
    """A scripted server that refuses what SGLang refuses."""

    async def _completions(self, request: Request) -> Response:
        prompt = msgspec.json.decode(await request.read()).get("prompt", "")
        if isinstance(prompt, list) and max(prompt) > _MAX_TOKEN:
            return _refusal("The input_ids contain values out of the vocabulary", None)
        try:
            return await super()._completions(request)
        except RequestError as error:
            return _refusal(str(error), error.param)


class ScriptedCluster:
    """Scripted servers, in a thread of their own."""

    secret = SECRET

    def __init__(
        self,
        directory: Path,
        servers: Mapping[str, ScriptedServer],
        document: Callable[[str, dict[str, int]], dict[str, Any]],
    ) -> None:
        (directory / "config.json").write_text(json.dumps(CONFIG))
        self._servers = servers
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        for server in self._servers.values():
            self._do(server.start())
        ports = {name: server.port for name, server in self._servers.items()}
        self.config = parse_config(document(str(directory), ports))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_SCRIPTED_TIMEOUT_S)

    def kill(self, name: str, worker_pids: list[int]) -> None:
        self._do(self._servers[name].kill())

    def bring_back(self, name: str) -> None:
        self._do(self._servers[name].restart())

    def close(self) -> None:
        for server in self._servers.values():
            self._do(server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def scripted_vllm(directory: Path) -> ScriptedCluster:
    script = VllmScript(pause_s=0.01)
    servers = {
        name: _ScriptedVllm(name, node, role=role_of(name), script=script)
        for name, node in ADDRESSES.items()
    }
    return ScriptedCluster(directory, servers, document)


def scripted_sglang(directory: Path) -> ScriptedCluster:
    script = SglangScript(pause_s=0.01)
    servers = {
        name: _ScriptedSglang(name, node, role=role_of(name), script=script)
        for name, node in ADDRESSES.items()
    }
    return ScriptedCluster(directory, servers, sglang_document)


@contextmanager
def embedded(model: str) -> Iterator[EmbeddedCluster]:
    cluster = {"model": model, "nodes": _NODES, "engine": _ENGINE}
    config = parse_config({"proxy": _proxy(), "cluster": cluster})
    with EmbeddedCluster(config) as running:
        running.start("p0", "d0", "d1")
        running.wait_ready("p0", "d0", "d1")
        yield running


@contextmanager
def distserve() -> Iterator[DistServeCluster]:
    if _HOME not in os.environ:
        pytest.skip(f"{_HOME} is not set; it names a checkout of DistServe")
    config = parse_config(
        {"proxy": _proxy(), "cluster": {"backend": "distserve", "nodes": _PAIRS, "engine": _ENGINE}}
    )
    with DistServeCluster(config) as cluster:
        for node in (
            "n0",
            "n1",
        ):  # One after the other: both would measure themselves beside each other.
            cluster.start(node)
            cluster.wait_ready(node)
        yield cluster


def _proxy() -> dict[str, Any]:
    return {"port": 0, "admin_port": 0}
