"""A proxy in memory and virtual time in front of scripted servers that play a recording; the first
decode server that answers dies behind a byte of its answer, as a killed process does.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.net.routes import WRITTEN, Request, Response, head_of
from kvrs.proxy.server import Proxy
from kvrs.proxy.streams.recoveries import Recovery
from kvrs_testkit.engine_streams import Recording
from kvrs_testkit.engine_streams.playing import Player
from kvrs_testkit.engine_streams.vocabulary import save_tokenizer
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import SECRET, Script
from kvrs_testkit.scripted_sglang import ScriptedSglang, SglangScript
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.vllm_cluster import CONFIG

Engine = Literal["vllm", "sglang"]
NAMES = ("p0", "d0", "d1", "d2")
DECODES = NAMES[1:]
# Recoveries that need an instance give up after this time, so that an error comes soon.
WAIT_S = 5.0
_TESTED_S, _LOOK_S = 60.0, 0.5  # Of the virtual clock.
# Time between a restart and the next request: the proxy pauses a server that often dies soon after
# it has come up.
_APART_S = 12.0


@dataclass
class Death:
    """The fate of one request: which byte ends the first server, and where the others differ."""

    at_byte: int | None = None  # Of the body of the answer; None: nobody dies.
    # Position at which each server generates another token, by its id; the first one to serve
    # differs nowhere unless `differs_first` says so.
    differs: dict[str, int] = field(default_factory=dict)
    differs_first: int | None = None
    first: str | None = None  # The server that answered first.
    served: list[str] = field(default_factory=list)  # All that answered, in order.
    victim: str | None = None
    is_over: bool = False  # The client has its answer.
    killing: asyncio.Future[None] | None = None  # Of the victim.


class _Mortal:
    """Part that the servers of both engines share: they act as the `Death` of the request says."""

    id: str
    role: str
    death: Death
    body_bytes: int

    async def kill(self) -> None:
        raise NotImplementedError

    @property
    def dies_at_byte(self) -> int | None:
        death: Death | None = getattr(self, "death", None)
        return None if death is None or death.first != self.id else death.at_byte

    @dies_at_byte.setter
    def dies_at_byte(self, value: int | None) -> None:
        """The writer says that the byte has come."""
        if value is None and getattr(self, "death", None) is not None:
            self._die()

    @property
    def differs_at(self) -> int | None:
        death: Death | None = getattr(self, "death", None)
        if death is None or death.first is None:
            return None
        if death.first == self.id:
            return death.differs_first
        return death.differs.get(self.id)

    @differs_at.setter
    def differs_at(self, value: int | None) -> None:
        assert value is None

    def _serve(self) -> None:
        if self.role == "decode":
            if not self.death.is_over:
                self.death.served.append(self.id)
            if self.death.first is None:
                self.death.first = self.id

    def _die(self) -> None:
        self.death.at_byte, self.death.victim = None, self.id
        self.death.killing = asyncio.ensure_future(self.kill())

    def _cut(self, request: Request, response: Response) -> Response:
        """Send a whole answer as far as the server lives."""
        if self.role != "decode" or not response.body:
            return response
        self.body_bytes = len(response.body)
        at = self.dies_at_byte
        if at is None or at > len(response.body):
            return response
        transport = request.connection.transport
        assert transport is not None
        request.is_begun = True
        if at:
            fields = response.headers | {"Content-Length": str(len(response.body))}
            head = head_of(200, fields, request, keeps_open=False)
            transport.write(head + response.body[:at])
        transport.close()
        self._die()
        return WRITTEN


@dataclass(eq=False)
class _MortalVllm(_Mortal, ScriptedVllm):
    death: Death = field(default_factory=Death)

    async def kill(self) -> None:
        await ScriptedVllm.kill(self)

    async def _completions(self, request: Request) -> Response:
        self._serve()
        return self._cut(request, await super()._completions(request))


@dataclass(eq=False)
class _MortalSglang(_Mortal, ScriptedSglang):
    death: Death = field(default_factory=Death)

    async def kill(self) -> None:
        await ScriptedSglang.kill(self)

    async def _completions(self, request: Request) -> Response:
        self._serve()
        return self._cut(request, await super()._completions(request))


@dataclass(frozen=True, slots=True)
class Got:
    """The bytes of an answer, as they came to the client."""

    status: int
    body: bytes
    ended: str  # The error of a connection that broke.


class Cluster(ProxyCluster):
    """One proxy, one prefill and three decode servers of an engine."""

    engine: Engine
    servers: dict[str, _MortalVllm] | dict[str, _MortalSglang]

    async def until_tested(self) -> None:
        """Wait until all servers are up, and the proxy knows that they are equal."""
        await self._until(
            lambda: all(self._is_up(name) and self._is_tested(name) for name in NAMES)
        )

    def _is_up(self, name: str) -> bool:
        return self.proxy.parts.driver.control.instances.is_up(InstanceId(name))

    def _is_tested(self, name: str) -> bool:
        found = self.proxy.parts.driver.control.self_tests.describe(InstanceId(name))
        return name not in DECODES or bool(found and found["done"])

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_TESTED_S):
            while not holds():
                await asyncio.sleep(_LOOK_S)

    async def ask_for(
        self, recording: Recording, path: str, body: dict[str, Any], death: Death
    ) -> Got:
        """Send a request, whose first server dies as `death` says, and start the victim again."""
        for server in self.servers.values():
            server.recording, server.death = recording, death
            server.bodies.clear()
        status, got, ended = 0, b"", ""
        try:
            async with self.http.post(self.url + path, json=body) as response:
                status = response.status
                async for piece in response.content.iter_any():
                    got += piece
        except aiohttp.ClientError as error:
            ended = repr(error)
        death.at_byte, death.is_over = None, True
        if (victim := death.victim) is not None:
            assert death.killing is not None
            await death.killing
            # The proxy knows that it was lost, or it could take the old process for tested.
            await self._until(lambda: not self._is_up(victim))
            await self.servers[victim].restart()
            await self.until_tested()
            await asyncio.sleep(_APART_S)
        return Got(status, got, ended)

    def body_bytes(self, death: Death) -> int:
        """Length of the body that the first server has sent."""
        assert death.first is not None
        return self.servers[death.first].body_bytes

    @property
    def recoveries(self) -> list[Recovery]:
        return list(self.proxy.parts.driver.recoveries.latest)

    @property
    def violations(self) -> list[str]:
        return [each for server in self.servers.values() for each in server.script.violations]


@asynccontextmanager
async def open_cluster(
    engine: Engine, recording: Recording | None = None
) -> AsyncIterator[Cluster]:
    """Open a cluster whose servers are up and tested; they play `recording` from their start on."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_tokenizer(directory)
        (directory / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 1 << 16}))
        servers = _servers_of(engine)
        for server in servers.values():
            server.recording = recording
            await server.start()
            stack.push_async_callback(server.close)
        ports = {name: server.port for name, server in servers.items()}
        proxy = Proxy(parse_config(_document(engine, str(directory), ports)), SECRET)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        http = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        cluster = Cluster(proxy, Script(), {}, {}, http)
        cluster.engine, cluster.servers = engine, servers
        await cluster.until_tested()
        yield cluster


def _servers_of(engine: Engine) -> Any:
    nodes = {name: f"n{number}" for number, name in enumerate(NAMES)}
    kinds: Any = (_MortalVllm, VllmScript) if engine == "vllm" else (_MortalSglang, SglangScript)
    make, script = kinds[0], kinds[1]()
    roles = {name: "prefill" if name[0] == "p" else "decode" for name in NAMES}
    servers = {
        name: make(name, node, role=roles[name], script=script) for name, node in nodes.items()
    }
    if engine == "sglang":  # Without, the proxy renders chats itself, and makes their events.
        for server in servers.values():
            server.reasoning_parser = "qwen3"
    return servers


def _document(engine: Engine, model: str, ports: dict[str, int]) -> dict[str, Any]:
    nodes = [
        {
            "id": f"n{number}",
            "instances": [
                {
                    "id": name,
                    "role": "prefill" if name[0] == "p" else "decode",
                    "port": ports[name],
                }
            ],
        }
        for number, name in enumerate(NAMES)
    ]
    return {
        "proxy": {"port": 0, "admin_port": 0, "load_interval_s": 2.0},
        "cluster": {"backend": engine, "model": model, "nodes": nodes},
        "profiles": {"prefill": "opt-13b-a100-distserve-tp1"},
        "policy": {"recovery": {"wait_s": WAIT_S}},
    }


def known_tokens(recording: Recording, at_byte: int, *, is_stream: bool) -> int:
    """Number of tokens in the events before a byte of a stream's body."""
    if not is_stream:
        return 0
    sent, known = 0, 0
    returns_ids = recording.engine == "vllm"
    for event in Player(recording).events(model="tiny", returns_ids=returns_ids, number=1):
        sent += len(event.data)
        if sent > at_byte:
            break
        known = event.behind
    return known
