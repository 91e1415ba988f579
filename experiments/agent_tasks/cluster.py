"""A process of `kvrs proxy` before scripted servers of this process, which play the model of
`model.py` and die in a part of a turn.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from experiments.agent_tasks.model import Phase, Played, played
from experiments.record import MARK_ENV, ROOT
from kvrs.net.routes import Request, Response
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs_testkit.engine_streams.playing import Player
from kvrs_testkit.engine_streams.vocabulary import save_tokenizer
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.vllm_cluster import CONFIG

MODEL = "tiny"
_UP_WITHIN_S = 60.0
_LOOK_S = 0.1
_PLAYED: ContextVar[Played | None] = ContextVar("played", default=None)


@dataclass(frozen=True, slots=True)
class Kill:
    """The turn and its part at which the server dies that generates it."""

    turn: int
    phase: Phase


@dataclass
class Deaths:
    """The next death of a cluster, and those before."""

    back_after_s: float
    next: Kill | None = None
    died: list[str] = field(default_factory=list)
    returns: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(eq=False)
class AgentVllm(ScriptedVllm):
    """A server whose chats are turns of `model.py`; the process dies at `deaths.next`."""

    deaths: Deaths = field(default_factory=lambda: Deaths(1.0))
    chats: int = 0

    async def _completions(self, request: Request) -> Response:
        fields = msgspec.json.decode(await request.read())
        found = None
        if "messages" in fields:
            self.chats += 1
            # vLLM draws ids of calls, so that those of two runs differ.
            found = played(fields["messages"], f"chatcmpl-tool-{self.id}-{self.chats}")
        _PLAYED.set(found)
        return await super()._completions(request)

    @property
    def _player(self) -> Player | None:
        found = _PLAYED.get()
        return None if found is None else Player(found.recording)

    def _history(self, parsed: CompletionRequest | ChatRequest) -> list[int]:
        found = _PLAYED.get()
        if found is not None and isinstance(parsed, ChatRequest):
            return list(found.recording.prompt_ids)
        return super()._history(parsed)

    async def _events(
        self,
        parsed: CompletionRequest | ChatRequest,
        history: list[int],
        position: int,
        known: list[int],
    ) -> AsyncIterator[bytes | Fault]:
        found, sent, kill = _PLAYED.get(), 0, self.deaths.next
        is_victim = found is not None and kill is not None and kill.turn == found.turn
        async for event in super()._events(parsed, history, position, known):
            if is_victim and found is not None and kill is not None and self.deaths.next is kill:
                # The first event has no token.
                at = found.dies_at[kill.phase]
                if sent == (at + 1 if at else 0):
                    self._die()
                    yield Fault.RESET
                    return
            yield event
            sent += 1

    def _die(self) -> None:
        self.deaths.next = None
        self.deaths.died.append(self.id)
        self.kill_engine()
        task = asyncio.create_task(self._return())
        self.deaths.returns.add(task)
        task.add_done_callback(self.deaths.returns.discard)

    async def _return(self) -> None:
        await self.kill()
        await asyncio.sleep(self.deaths.back_after_s)
        await self.restart()


@dataclass
class Cluster:
    """The servers, and the proxy before them."""

    servers: dict[str, AgentVllm]
    deaths: Deaths
    http: aiohttp.ClientSession
    url: str
    admin: str
    process: subprocess.Popen[bytes]
    log: Path

    async def state(self) -> Any:
        async with self.http.get(f"{self.admin}/kvrs/v1/state") as response:
            return msgspec.json.decode(await response.read())

    async def options(self) -> list[str]:
        """The options of all recoveries."""
        return [row["option"] for row in (await self.state())["recoveries"]]

    def violations(self) -> list[str]:
        """Return the requests of the proxy that broke a rule of the servers."""
        return sorted(set(self.servers["p0"].script.violations))

    async def until_tested(self, decodes: int) -> None:
        """Wait until so many decode servers are up and their self-tests done."""
        give_up_s = time.monotonic() + _UP_WITHIN_S
        while time.monotonic() < give_up_s and self.process.poll() is None:
            with suppress(aiohttp.ClientError):  # It has no ports yet.
                rows = (await self.state())["instances"]
                up = [row for row in rows if row["health"] == "up" and row["id"] != "p0"]
                tested = [row for row in up if (row["self_test"] or {}).get("done")]
                if len(tested) >= decodes:
                    return
            await asyncio.sleep(_LOOK_S)
        raise TimeoutError(f"the proxy has not tested all servers: {self.log.read_text()[-500:]}")


@asynccontextmanager
async def cluster(
    decodes: int = 3,
    *,
    back_after_s: float = 1.0,
    wait_s: float | None = None,
    pause_s: float = 0.0005,
) -> AsyncIterator[Cluster]:
    """A prefill server and so many decode servers, all tested; a dead one is back after
    `back_after_s`. `wait_s`: how long the proxy waits for one; None: its default.
    """
    script, deaths = VllmScript(pause_s=pause_s), Deaths(back_after_s)
    async with AsyncExitStack() as stack:
        servers = {}
        for name in ("p0", *(f"d{n}" for n in range(decodes))):
            role = "prefill" if name == "p0" else "decode"
            servers[name] = server = AgentVllm(name, name, role=role, script=script, deaths=deaths)
            await server.start()
            stack.push_async_callback(server.close)
        timeout = aiohttp.ClientTimeout(total=None)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrs-agents-")))
        port, admin_port = free_ports(2)
        document = _document(servers, folder, port, admin_port)
        if wait_s is not None:
            document["policy"] = {"recovery": {"wait_s": wait_s}}
        process = _started(document, folder)
        stack.push_async_callback(_ended, process)
        url, admin = (f"http://127.0.0.1:{each}" for each in (port, admin_port))
        system = Cluster(servers, deaths, http, url, admin, process, folder / "log")
        await system.until_tested(decodes)
        yield system
        await asyncio.gather(*deaths.returns)


def _document(
    servers: Mapping[str, AgentVllm], folder: Path, port: int, admin_port: int
) -> dict[str, Any]:
    """The configuration of the proxy, with a directory of the model."""
    model = folder / "model"
    model.mkdir()
    save_tokenizer(model)
    (model / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    nodes = [
        {"id": name, "instances": [{"id": name, "role": server.role, "port": server.port}]}
        for name, server in servers.items()
    ]
    return {
        "proxy": {"port": port, "admin_port": admin_port},
        "cluster": {"backend": "vllm", "model": str(model), "nodes": nodes},
    }


def _started(document: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    config = folder / "kvrs.yaml"
    config.write_bytes(msgspec.json.encode(document))
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVRS_") or name == MARK_ENV
    }
    environ["PYTHONPATH"] = str(ROOT)
    words = [sys.executable, "-m", "kvrs", "proxy", "--config", str(config)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(words, cwd=folder, env=environ, stdout=log, stderr=log)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    await asyncio.to_thread(process.wait)
