"""Other processes at the port of a dead instance, agent or proxy: they get nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

import pytest

from kvrs.protocol.instance import Role
from kvrs.protocol.secrets import END, NONCE_BYTES, ClientProof, Scope, scoped_key
from kvrs_testkit.multi_proxy_cluster import open_proxy_group
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import SECRET, Scripted
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

PROMPT = [111, 222, 121]
MANY = 40


class Pretence(StrEnum):
    SILENT = "silent"
    HTTP = "http"  # Answers every request with 200.
    RELAY = "relay"  # Between the proxy and another instance of the cluster.


class Squatter:
    """Keeps all bytes that come to a port."""

    def __init__(self, pretence: Pretence, to_port: int = 0) -> None:
        self.received = b""
        self.connections = 0
        self._pretence = pretence
        self._to_port = to_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, to_there = reader, writer
        if self._pretence is Pretence.RELAY:
            there, to_there = await asyncio.open_connection("127.0.0.1", self._to_port)
            back = asyncio.ensure_future(self._carry(there, writer))
        try:
            while data := await reader.read(1 << 16):
                self.received += data
                if self._pretence is Pretence.HTTP and b"\r\n\r\n" in data:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                elif self._pretence is Pretence.RELAY:
                    to_there.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()
            if self._pretence is Pretence.RELAY:
                to_there.close()
                await back

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    def got_nothing(self) -> bool:
        """Neither a token nor a header, path or prompt; only messages of the proof, at most."""
        words = [b"Bearer", b"HTTP", b"kvrs", b"111,222", b"o\xcc\xde", b"epoch", b"prompt"]
        return not any(word in self.received for word in words)


@asynccontextmanager
async def squatting(port: int, squatter: Squatter) -> AsyncIterator[None]:
    server = await asyncio.start_server(squatter.serve, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


async def complete_all(system: ProxyCluster, count: int) -> list[str]:
    answers = [await system.complete(prompt=PROMPT, max_tokens=4) for _ in range(count)]
    return [f"{status} {body.decode()}" for status, body in answers]


@pytest.mark.parametrize("pretence", Pretence)
async def test_a_stranger_at_the_port_of_a_dead_instance_gets_nothing(
    build: ProxyClusterBuilder, pretence: Pretence
) -> None:
    """Neither a token nor a prompt, whatever it answers; nor does one that passes the proof on to
    another instance. The instance itself is taken back.
    """
    system = await build()
    dead, live = system.instances["d0"], system.instances["d1"]
    squatter, epoch = Squatter(pretence, live.port), live.epoch
    await dead.kill()
    async with squatting(dead.port, squatter):
        await system.until_health(d0="refused" if pretence is not Pretence.SILENT else "down")

        answers = await complete_all(system, MANY)
        while not squatter.connections:
            await asyncio.sleep(0.01)
    await dead.restart()
    await system.until_health(d0="up")

    assert squatter.got_nothing(), squatter.received
    assert all(answer.startswith("200") for answer in answers), answers
    assert live.epoch == epoch
    assert not live.fences


async def test_an_instance_of_another_cluster_is_not_used(build: ProxyClusterBuilder) -> None:
    """It speaks the whole protocol and has another secret."""
    system = await build()
    dead = system.instances["d0"]
    await dead.kill()
    other = Scripted(
        "d0", "n0", role=Role.DECODE, script=system.script, port=dead.port, secret=b"of another one"
    )
    await other.start()
    try:
        await system.until_health(d0="refused")
        answers = await complete_all(system, MANY)
        (row,) = (each for each in (await system.state())["instances"] if each["id"] == "d0")
    finally:
        await other.close()

    assert "another secret" in row["reason"]
    assert other.calls == []
    assert all(answer.startswith("200") for answer in answers), answers


async def test_a_recorded_proof_is_void_on_another_connection(build: ProxyClusterBuilder) -> None:
    """A squatter may have listened while the instance lived."""
    system = await build()
    dead = system.instances["d0"]
    reader, writer = await asyncio.open_connection("127.0.0.1", dead.port)
    writer.write(ClientProof(scoped_key(SECRET, Scope.INSTANCE, "d0"), bytes(NONCE_BYTES)).hello)
    recorded = await reader.readuntil(END)
    writer.close()
    after_it: list[bytes] = []

    async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(END)
        writer.write(recorded)
        after_it.append(await reader.read())
        writer.close()

    await dead.kill()
    server = await asyncio.start_server(replay, "127.0.0.1", dead.port)
    await system.until_health(d0="refused")
    (row,) = (each for each in (await system.state())["instances"] if each["id"] == "d0")
    server.close()

    assert "its proof is wrong" in row["reason"]
    assert set(after_it) <= {b""}


@pytest.mark.parametrize("pretence", [Pretence.SILENT, Pretence.HTTP])
async def test_a_stranger_at_the_port_of_a_dead_agent_gets_nothing(
    build: ProxyClusterBuilder, pretence: Pretence
) -> None:
    """Leases and slots name streams."""
    system = await build(backup={"mode": "remote"})
    dead, squatter = system.agents["agent-n0"], Squatter(pretence)
    await dead.kill()
    async with squatting(dead.port, squatter):
        answers = await complete_all(system, MANY)
        while not squatter.connections:
            await asyncio.sleep(0.01)

    assert squatter.got_nothing(), squatter.received
    assert all(answer.startswith("200") for answer in answers), answers


@pytest.mark.parametrize("pretence", [Pretence.SILENT, Pretence.HTTP])
async def test_a_stranger_at_the_port_of_a_dead_proxy_gets_no_record(pretence: Pretence) -> None:
    """Neither a prompt nor an answer is mirrored to it."""
    async with open_proxy_group(2) as group:
        await group.kill(1)
        squatter = Squatter(pretence)
        async with squatting(group.configs[1].proxy.peer_port, squatter):
            reader = group.reader("key", prompt=PROMPT)
            await reader.read_all(0)
            while not squatter.connections:
                await asyncio.sleep(0.01)

    assert reader.done
    assert squatter.got_nothing(), squatter.received
