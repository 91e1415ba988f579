"""Agents under test, in the test's own event loop or as processes, and an engine's side of the page
port.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import yaml

from kvrs.agent.server import serve
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate
from kvrs.protocol.pages import (
    CheckpointClaim,
    HeldPages,
    Identity,
    PullRequest,
    Tag,
    page_tags,
    root_tag,
)
from kvrs.protocol.secrets import Scope, derive, scoped_key
from kvrs.transfer.checkpoint_sender import PagePusher
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Peer, PullResult, StoredPages
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.store.directory import store_directory
from kvrs_testkit.forked import starts_forked
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import client_of

Answer = TypeVar("Answer")

SECRET = b"a secret of the tests, long enough"
PAGE_BYTES = 65536
N0, N1 = NodeId("n0"), NodeId("n1")


def document(base: Path, capacity_pages: int = 64, **cluster: Any) -> dict[str, Any]:
    """A configuration whose node n0 has an agent with its pages below `base`."""
    port, page_port = free_ports(2)
    agent = {"port": port, "page_port": page_port}
    nodes = [{"id": "n0", "instances": [{"id": "e0", "role": "both"}], "agent": agent}]
    backup = {
        "mode": "local",
        "directory": str(base),
        "capacity_bytes": capacity_pages * PAGE_BYTES,
    }
    return {
        "cluster": {"nodes": nodes, **cluster},
        "backup": backup,
        "transfer": {"lease_s": 3600.0},
    }


@asynccontextmanager
async def running(
    config: Config,
    secret: bytes = SECRET,
    node: NodeId = N0,
    older: Sequence[bytes] = (),
    read: Callable[[], Config] | None = None,
) -> AsyncIterator[None]:
    """The agent of a node in this event loop, with its clean end."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve(config, node, secret, stop, ready.set, older, read))
    async with asyncio.timeout(60):
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
    """`python -m kvrs.agent`, which can be killed and started again."""

    def __init__(
        self,
        directory: Path,
        written: dict[str, Any],
        secret: bytes = SECRET,
        *,
        forked: bool = True,
        user: Sequence[str] = (),
    ) -> None:
        """`forked`: rather than run by its command line. `user`: another one and its groups, as
        `kvrs_testkit.as_user` takes them.
        """
        self.config = parse_config(written)
        self._path = directory / f"{derive(secret, b'name').hex()[:8]}.yaml"
        self._path.write_text(yaml.safe_dump(written))
        self._secret, self._forked = secret, forked and not user
        program = ["kvrs_testkit.as_user", *user, "kvrs.agent.__main__"] if user else ["kvrs.agent"]
        self._command = [sys.executable, "-m", *program]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [*self._command, "--config", str(self._path), "--node", "n0"]
        environment = os.environ | {"KVRS_SECRET": self._secret.decode()}
        with starts_forked() if self._forked else nullcontext():
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                stdin=subprocess.DEVNULL,
            )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise AssertionError(self.end(signal.SIGKILL)[1])

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Exit status, and standard output and error."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        _, output = process.communicate(timeout=60)
        return process.returncode, output


@contextmanager
def processes(*agents: AgentProcess) -> Iterator[None]:
    """Agent processes, which have ended when the context ends."""
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

    def __init__(
        self,
        config: Config,
        secret: bytes = SECRET,
        fingerprint: str = "model",
        at: NodeId = N1,
    ) -> None:
        """On the agent's own node it copies pages out of the agent's memory."""
        self._config, self._secret = config, secret
        (node,) = config.cluster.nodes
        directory = store_directory(config.backup.directory, secret, node.id)
        self._peer = Peer(
            node.agent_id,
            node.id,
            node.agent.host,
            node.agent.page_port,
            directory if at == node.id else None,
        )
        self._identity = Identity(InstanceId("e1"), at, 1, fingerprint, PAGE_BYTES)
        links = SendingLinks(config.transfer, SendingFaults(), at)
        self._pusher = PagePusher(lambda: self._identity, secret, config.transfer, links)
        self._puller = PagePuller(lambda: self._identity, secret, config.transfer, time.monotonic)

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pusher.close()
        await self._puller.close()

    async def offer(
        self, stream: str, pages: int, tags: tuple[Tag, ...] = (), attempt: int = 1
    ) -> HeldPages:
        return await self._pusher.offer(
            self._peer, CheckpointClaim(StreamId(stream), 0, attempt), pages * PAGE_BYTES, tags
        )

    async def store(
        self, stream: str, first: int, tags: tuple[Tag, ...], attempt: int = 1
    ) -> HeldPages:
        views = [memoryview(page(tag)) for tag in tags]
        stored = StoredPages(CheckpointClaim(StreamId(stream), 0, attempt), first, tags, views)
        (held,) = await self._pusher.store(self._peer, [stored])
        return held

    @property
    def links(self) -> set[NodeId]:
        """Nodes from which pages have been pulled."""
        return set(self._puller.links())

    async def release(self, stream: str) -> None:
        """Release as a proxy does when a stream has ended."""
        async with session(self._config, self._secret) as client:
            await ask(
                client,
                "/kvrs/v1/leases",
                LeaseAnswer,
                LeaseUpdate(lease_s=30, release=[StreamId(stream)]),
            )

    async def fetch(self, tags: tuple[Tag, ...], epoch: int | None = None) -> PullResult:
        """Pull pages, and check their content."""
        views = [memoryview(bytearray(PAGE_BYTES)) for _ in tags]
        result = await self._puller.pull(self._peer, PullRequest(tags), views, None, epoch)
        for tag, view in zip(tags[: result.full_pages], views, strict=False):
            assert view == page(tag)
        return result


def tags(family: int, pages: int) -> tuple[Tag, ...]:
    return tuple(page_tags(root_tag("model"), [family] * pages, 1))


def page(tag: Tag) -> bytes:
    """The content of the page with this tag."""
    return tag * (PAGE_BYTES // len(tag))


def flip_a_byte(base: Path, wanted: bytes) -> None:
    """Damage a page with this content in an agent's memory."""
    for path in base.glob("kvrs-*/slab"):
        content = bytearray(path.read_bytes())
        if (start := content.find(wanted)) >= 0:
            with path.open("r+b") as file:
                file.seek(start + len(wanted) // 2)
                file.write(bytes([content[start + len(wanted) // 2] ^ 1]))
            return
    raise AssertionError("no such page")


@asynccontextmanager
async def session(
    config: Config, secret: bytes = SECRET, door: Scope = Scope.AGENT
) -> AsyncIterator[aiohttp.ClientSession]:
    (node,) = config.cluster.nodes
    async with client_of(node.agent.url, scoped_key(secret, door, node.agent_id)) as client:
        yield client


async def ask(
    client: aiohttp.ClientSession, path: str, kind: type[Answer], body: msgspec.Struct | None = None
) -> Answer:
    data = None if body is None else msgspec.json.encode(body)
    async with client.request("GET" if body is None else "POST", path, data=data) as answer:
        assert answer.status == 200, await answer.text()
        return msgspec.json.decode(await answer.read(), type=kind)
