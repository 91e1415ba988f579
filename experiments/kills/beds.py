"""A proxy before instances that can be ended: real processes under `kvrs up`, whose ends it hears
of, and scripted vLLM servers, of which it is not told how they end.
"""

import asyncio
import json
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvrs.cluster.launcher import Cluster
from kvrs.cluster.victims import closing_process, open_process
from kvrs.config.file import parse_config
from kvrs.demo import PACE
from kvrs.load.admin import AdminPort
from kvrs.proxy.server import Proxy
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.scripted_model import expected_ids, save_tokenizer
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.vllm_cluster import CONFIG

UP_S = 60.0
# Of scripted servers, which compute nothing.
PREFILL_S_PER_TOKEN = 0.0002
TOKEN_S = 0.01
BACK_S = 1.0

Prompt = list[int]


class Bed(ABC):
    """Instances p0, p1, ... and d0, d1, ..., a pair on each node."""

    engine: str
    url: str
    admin_url: str

    def __init__(self, pairs: int, session: aiohttp.ClientSession) -> None:
        self.prefills = [f"p{n}" for n in range(pairs)]
        self.decodes = [f"d{n}" for n in range(pairs)]
        self.session = session
        self.ended = 0
        self._opened_s = time.monotonic()

    async def state(self) -> Any:
        async with self.session.get(f"{self.admin_url}/kvrs/v1/state") as answer:
            return msgspec.json.decode(await answer.read())

    async def down(self) -> set[str]:
        return {row["id"] for row in (await self.state())["instances"] if row["health"] != "up"}

    async def all_up(self) -> None:
        async with asyncio.timeout(UP_S):
            while await self.down():
                await asyncio.sleep(0.05)

    async def end(self, name: str, number: signal.Signals) -> bool:
        """End an instance that is up, as by this signal; it comes back. False: it was not up."""
        done = await self._end(name, number)
        self.ended += done
        if done:
            after_s = time.monotonic() - self._opened_s
            print(
                f"  {after_s:5.1f} s: {name} ends by {number.name}, {self.ended} in all", flush=True
            )
        return done

    @abstractmethod
    async def _end(self, name: str, number: signal.Signals) -> bool: ...

    @abstractmethod
    async def expected(self, prompts: Sequence[Prompt], tokens: int) -> list[list[int]] | None:
        """Ids of undisturbed streams; None: an undisturbed run tells them."""

    @abstractmethod
    async def forget(self) -> None:
        """All caches are empty."""


class UpBed(Bed):
    """The embedded engine."""

    engine = "embedded"

    def __init__(self, pairs: int, session: aiohttp.ClientSession, cluster: Cluster) -> None:
        super().__init__(pairs, session)
        self._cluster = cluster
        self.url, self.admin_url = cluster.url, cluster.admin_url

    async def _end(self, name: str, number: signal.Signals) -> bool:
        rows = (await self.state())["instances"]
        row = next(row for row in rows if row["id"] == name)
        if row["health"] != "up":
            return False
        process = open_process(row)
        with closing_process(process):
            signal.pidfd_send_signal(process, number)
        return True

    async def expected(self, prompts: Sequence[Prompt], tokens: int) -> None:
        return None

    async def forget(self) -> None:
        async with AdminPort(self._cluster.proxies[0].admin, self._cluster.secret) as port:
            await port.reset_caches()


class TimedVllm(ScriptedVllm):
    """Computes prompts one after another, and takes its time for them."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._computing = asyncio.Lock()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        transfer = body.get("kv_transfer_params")
        if transfer is not None and transfer["do_remote_decode"]:
            async with self._computing:
                await asyncio.sleep(PREFILL_S_PER_TOKEN * len(body["prompt"]))
        return await super()._completions(request)


class VllmBed(Bed):
    engine = "scripted"

    def __init__(
        self,
        pairs: int,
        session: aiohttp.ClientSession,
        servers: dict[str, TimedVllm],
        proxy: Proxy,
    ) -> None:
        super().__init__(pairs, session)
        self._servers = servers
        self._returning: dict[str, asyncio.Task[None]] = {}
        self.url = f"http://127.0.0.1:{proxy.port}"
        self.admin_url = f"http://127.0.0.1:{proxy.admin_port}"

    async def _end(self, name: str, number: signal.Signals) -> bool:
        if name in self._returning and not self._returning[name].done():
            return False
        await self._servers[name].kill()
        self._returning[name] = asyncio.create_task(self._return(self._servers[name]))
        return True

    @staticmethod
    async def _return(server: TimedVllm) -> None:
        await asyncio.sleep(BACK_S)
        await server.restart()

    async def expected(self, prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
        return [expected_ids(prompt, tokens) for prompt in prompts]

    async def forget(self) -> None:
        """They have none."""

    async def close(self) -> None:
        for task in self._returning.values():
            task.cancel()
        await asyncio.gather(*self._returning.values(), return_exceptions=True)


@asynccontextmanager
async def open_bed(
    engine: str, pairs: int, seed: int, session: aiohttp.ClientSession
) -> AsyncIterator[Bed]:
    async with AsyncExitStack() as stack:
        proxy: dict[str, Any] = {"port": 0, "admin_port": 0}
        document: dict[str, Any] = {"proxy": proxy}
        if engine == "embedded":
            document["cluster"] = {
                "engine": {"seed": seed, "pace": PACE},
                "nodes": _nodes(pairs, {}),
            }
            cluster = Cluster(parse_config(document), lambda line: print("  ", line, flush=True))
            # Its start blocks for seconds, and nothing else is to be done meanwhile.
            stack.enter_context(cluster)
            yield UpBed(pairs, session, cluster)
            return
        servers = _servers(pairs)
        for server in servers.values():
            await server.start()
            stack.push_async_callback(server.close)
        directory = Path(stack.enter_context(TemporaryDirectory()))
        save_tokenizer(directory)
        (directory / "config.json").write_text(json.dumps(CONFIG))
        ports = {name: server.port for name, server in servers.items()}
        nodes = _nodes(pairs, ports)
        proxy |= {"load_interval_s": 0.05, "self_test": False}
        document["cluster"] = {"backend": "vllm", "model": str(directory), "nodes": nodes}
        document["profiles"] = {"prefill": PACE}
        running = Proxy(parse_config(document), SECRET)
        await running.start()
        stack.push_async_callback(running.close)
        bed = VllmBed(pairs, session, servers, running)
        stack.push_async_callback(bed.close)
        await bed.all_up()
        yield bed


def _servers(pairs: int) -> dict[str, TimedVllm]:
    script = VllmScript(pause_s=TOKEN_S)
    return {
        f"{letter}{n}": TimedVllm(f"{letter}{n}", f"n{n}", role=role, script=script)
        for n in range(pairs)
        for letter, role in (("p", "prefill"), ("d", "decode"))
    }


def _nodes(pairs: int, ports: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"n{n}",
            "instances": [
                {"id": f"{letter}{n}", "role": role, "port": ports.get(f"{letter}{n}", 0)}
                for letter, role in (("p", "prefill"), ("d", "decode"))
            ],
        }
        for n in range(pairs)
    ]
