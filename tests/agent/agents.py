"""Agents to test: in the test's own event loop, or as a process; and an engine's side of the page port."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import yaml

from kvrs.agent.server import serve
from kvrs.config import Config, parse_config
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.frames import Claim, Held, Identity, PullRequest
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate
from kvrs.protocol.secrets import http_token
from kvrs.protocol.tags import Tag, page_tags, root_tag
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Peer, PullResult, StoredPages
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.pusher import PagePusher

Answer = TypeVar("Answer")

SECRET = b"a secret of the tests, long enough"
PAGE_BYTES = 65536
N0, N1 = NodeId("n0"), NodeId("n1")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def document(base: Path, capacity_pages: int = 64, **cluster: Any) -> dict[str, Any]:
    """A configuration whose node n0 has an agent that keeps its segments below `base`."""
    port, page_port = free_ports(2)
    agent = {"port": port, "page_port": page_port}
    nodes = [{"id": "n0", "instances": [{"id": "e0", "role": "both"}], "agent": agent}]
    backup = {"mode": "local", "directory": str(base), "capacity_bytes": capacity_pages * PAGE_BYTES}
    return {"cluster": {"nodes": nodes, **cluster}, "backup": backup, "transfer": {"lease_s": 3600.0}}


@asynccontextmanager
async def running(config: Config, secret: bytes = SECRET, node: NodeId = N0, older: Sequence[bytes] = ()) -> AsyncIterator[None]:
    """The agent of a node in this event loop; its clean end is part of it."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve(config, node, secret, stop, ready.set, older))
    async with asyncio.timeout(30):
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
    try:
        yield
    finally:
        stop.set()
        await task


class AgentProcess:
    """`python -m kvrs.agent`, which may be killed and started again."""

    def __init__(self, directory: Path, written: dict[str, Any], secret: bytes = SECRET) -> None:
        self.config = parse_config(written)
        self._path = directory / f"{http_token(secret)[:8]}.yaml"
        self._path.write_text(yaml.safe_dump(written))
        self._secret = secret
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "kvrs.agent", "--config", str(self._path), "--node", "n0"]
        environment = os.environ | {"KVRS_SECRET": self._secret.decode()}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise AssertionError(self.end(signal.SIGKILL)[1])

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Exit status, and what it said."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        return process.returncode, said


@contextmanager
def processes(*agents: AgentProcess) -> Iterator[None]:
    """They run; whatever becomes of them in between, they do not run afterwards."""
    try:
        for agent in agents:
            agent.start()
        yield
    finally:
        for agent in agents:
            if agent.process is not None:
                agent.end(signal.SIGKILL)


class Engine:
    """Sends pages to the agent of n0, and fetches them."""

    def __init__(self, config: Config, secret: bytes = SECRET, fingerprint: str = "model") -> None:
        self._config, self._secret = config, secret
        (node,) = config.cluster.nodes
        self._peer = Peer(node.agent_id, node.id, node.agent.host, node.agent.page_port)
        self._identity = Identity(InstanceId("e1"), N1, 1, fingerprint, PAGE_BYTES)
        links = SendingLinks(config.transfer, SendingFaults(), N1)
        self._pusher = PagePusher(lambda: self._identity, secret, config.transfer, links)
        self._puller = PagePuller(lambda: self._identity, secret, config.transfer, time.monotonic)

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pusher.close()
        await self._puller.close()

    async def offer(self, stream: str, pages: int, tags: tuple[Tag, ...] = (), attempt: int = 1) -> Held:
        return await self._pusher.offer(self._peer, Claim(StreamId(stream), 0, attempt), pages * PAGE_BYTES, tags)

    async def store(self, stream: str, first: int, tags: tuple[Tag, ...], attempt: int = 1) -> Held:
        views = [memoryview(page(tag)) for tag in tags]
        stored = StoredPages(Claim(StreamId(stream), 0, attempt), first, tags, views)
        (held,) = await self._pusher.store(self._peer, [stored])
        return held

    async def release(self, stream: str) -> None:
        """As a proxy does when the stream has ended."""
        async with session(self._config, self._secret) as client:
            await ask(client, "/kvrs/v1/leases", LeaseAnswer, LeaseUpdate(lease_s=30, release=[StreamId(stream)]))

    async def fetch(self, tags: tuple[Tag, ...], epoch: int | None = None) -> PullResult:
        """Pull them, and look that what came is right."""
        views = [memoryview(bytearray(PAGE_BYTES)) for _ in tags]
        result = await self._puller.pull(self._peer, PullRequest(tags), views, None, epoch)
        for tag, view in zip(tags[: result.full_pages], views, strict=False):
            assert view == page(tag)
        return result


def tags(family: int, pages: int) -> tuple[Tag, ...]:
    return tuple(page_tags(root_tag("model"), [family] * pages, 1))


def page(tag: Tag) -> bytes:
    """What lies under a tag."""
    return tag * (PAGE_BYTES // len(tag))


@asynccontextmanager
async def session(config: Config, secret: bytes = SECRET) -> AsyncIterator[aiohttp.ClientSession]:
    (node,) = config.cluster.nodes
    headers = {"Authorization": f"Bearer {http_token(secret)}"}
    async with aiohttp.ClientSession(node.agent.url, headers=headers) as client:
        yield client


async def ask(client: aiohttp.ClientSession, path: str, kind: type[Answer], body: msgspec.Struct | None = None) -> Answer:
    data = None if body is None else msgspec.json.encode(body)
    async with client.request("GET" if body is None else "POST", path, data=data) as answer:
        assert answer.status == 200, await answer.text()
        return msgspec.json.decode(await answer.read(), type=kind)
