"""The limits of the ports for HTTP: proxies, instances and agents have the same ones."""

import asyncio
import gzip
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.net import server
from kvrs.protocol.secrets import (
    END,
    NONCE_BYTES,
    ClientProof,
    ProofError,
    Scope,
    ScopedKey,
    scoped_key,
)
from kvrs.proxy.server import Proxy
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.server import serve_http
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import proven
from tests.agent.agents import SECRET, document, running

pytestmark = [pytest.mark.network, pytest.mark.engine, pytest.mark.usefixtures("tiny_beside")]

Opened = Callable[[Path], AbstractAsyncContextManager[int]]

HALF_A_HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "


@asynccontextmanager
async def agent(directory: Path) -> AsyncIterator[int]:
    config = parse_config(document(directory))
    async with running(config):
        yield config.cluster.nodes[0].agent.port


@asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[int]:
    port, page_port = free_ports(2)
    instance = {"id": "e0", "role": "both", "port": port, "page_port": page_port}
    nodes = [{"id": "n0", "instances": [instance]}]
    config = parse_config({"cluster": {"model": str(directory / "tiny"), "nodes": nodes}})
    async with serve_http(EngineInstance(config, InstanceId("e0"), 1, SECRET), allow_faults=False):
        yield port


@asynccontextmanager
async def proxy(directory: Path, *, which: str = "port") -> AsyncIterator[int]:
    port, page_port, peer_port = free_ports(3)
    instance = {"id": "e0", "role": "both", "port": port, "page_port": page_port}
    config = {"proxy": {"port": 0, "admin_port": 0, "peer_port": peer_port}}
    nodes = [{"id": "n0", "instances": [instance]}]
    served = Proxy(parse_config({**config, "cluster": {"nodes": nodes}}), SECRET)
    await served.start()
    try:
        ports = {"port": served.port, "admin_port": served.admin_port, "peer_port": peer_port}
        yield ports[which]
    finally:
        await served.close()


def admin(directory: Path) -> AbstractAsyncContextManager[int]:
    return proxy(directory, which="admin_port")


def peer(directory: Path) -> AbstractAsyncContextManager[int]:
    return proxy(directory, which="peer_port")


async def exchange(port: int, sent: bytes, key: ScopedKey | None = None) -> bytes:
    """All bytes that the server sends until it ends the connection, on which `key` was proved."""
    reader, writer = await (
        asyncio.open_connection("127.0.0.1", port) if key is None else proven(port, key)
    )
    writer.write(sent)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("opened", [agent, engine, proxy, admin, peer])
@pytest.mark.parametrize("sent", [b"", HALF_A_HEADER])
async def test_a_connection_without_a_whole_header_is_closed(
    opened: Opened, sent: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent connections and slow headers cannot use up descriptors."""
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    async with opened(tmp_path) as port:
        answer = await exchange(port, sent)

    assert answer == b""


@pytest.mark.parametrize("opened", [agent, engine, proxy, admin, peer])
async def test_http_1_0_with_chunks_is_refused_at_every_port(
    opened: Opened, tmp_path: Path
) -> None:
    """A request could be smuggled past a proxy in front by this pair of headers."""
    request = (
        "GET /healthz HTTP/1.0\r\nHost: x\r\n"
        "Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    async with opened(tmp_path) as port:
        answer = await exchange(port, request.encode())

    assert b" 400 " in answer.split(b"\r\n")[0]


KEYS: dict[Opened, ScopedKey] = {
    agent: scoped_key(SECRET, Scope.AGENT, "agent-n0"),
    engine: scoped_key(SECRET, Scope.INSTANCE, "e0"),
}


@pytest.mark.parametrize("opened", [agent, engine])
@pytest.mark.parametrize(("is_stranger", "status"), [(False, b"415"), (True, b"401")])
async def test_no_body_is_inflated(
    opened: Opened, is_stranger: bool, status: bytes, tmp_path: Path
) -> None:
    """Least of all that of a stranger, which would choose how long that takes."""
    body = gzip.compress(b'{"lease_s": 1.0, "renew": [], "release": []}')
    header = (
        f"POST /kvrs/v1/leases HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    key = None if is_stranger else KEYS[opened]
    async with opened(tmp_path) as port:
        answer = await exchange(port, header.encode() + body, key)

    assert answer.split()[1] == status


@pytest.mark.parametrize("opened", [agent, engine])
async def test_instances_and_agents_raise_their_soft_limit(opened: Opened, tmp_path: Path) -> None:
    """Every stream of every proxy is a connection of theirs."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        async with opened(tmp_path):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    assert soft == hard


ATTACKS = {
    "GET": (b"Host: evil.example", b"421"),
    "POST": (b"Host: evil.example", b"421"),
    "PUT": (b"Host: 127.0.0.1\r\nOrigin: https://evil.example", b"403"),
    "DELETE": (b"Host: 127.0.0.1\r\nContent-Type: text/plain", b"415"),
}


@pytest.mark.parametrize("opened", [agent, engine, admin, peer])
@pytest.mark.parametrize("method", ATTACKS)
async def test_no_web_page_reaches_a_port_that_is_not_for_clients(
    opened: Opened, method: str, tmp_path: Path
) -> None:
    """A page in a browser on this machine may send requests to loopback, and read the answers if
    the name of its own site resolves to it (DNS rebinding).
    """
    headers, status = ATTACKS[method]
    request = b"%s /kvrs/v1/state HTTP/1.1\r\n%s\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    async with opened(tmp_path) as port:
        answer = await exchange(port, request % (method.encode(), headers), KEYS.get(opened))

    assert answer.split()[1] == status


def keys_of(door: Scope, *names: str) -> list[ScopedKey]:
    return [scoped_key(SECRET, door, name) for name in names]


@pytest.mark.parametrize(
    ("opened", "path", "refused", "insufficient"),
    [
        (
            engine,
            "/kvrs/v1/fence",
            [
                *keys_of(Scope.INSTANCE, "e1"),
                *keys_of(Scope.AGENT, "e0"),
                *keys_of(Scope.PROXY, "e0"),
            ],
            keys_of(Scope.ADMIN, "e0"),
        ),
        (
            agent,
            "/kvrs/v1/slots",
            [*keys_of(Scope.AGENT, "agent-n1"), *keys_of(Scope.INSTANCE, "agent-n0")],
            keys_of(Scope.ADMIN, "agent-n0"),
        ),
        (engine, "/reset_prefix_cache", [], keys_of(Scope.INSTANCE, "e0")),
        (agent, "/kvrs/v1/faults", [], keys_of(Scope.AGENT, "agent-n0")),
    ],
)
async def test_a_key_opens_the_door_that_it_was_derived_for(
    opened: Opened,
    path: str,
    refused: list[ScopedKey],
    insufficient: list[ScopedKey],
    tmp_path: Path,
) -> None:
    """Keys of other processes prove nothing; those of another purpose give no access."""
    request = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Connection: close\r\nContent-Length: 2\r\n\r\n{}"
    )
    async with opened(tmp_path) as port:
        for key in refused:
            with pytest.raises(ProofError, match="another process"):
                await proven(port, key)
        answers = [await exchange(port, request.encode(), key) for key in insufficient]
        answers.append(await exchange(port, request.encode()))

    assert {answer.split()[1] for answer in answers} == {b"401"}


@pytest.mark.parametrize("opened", [agent, engine])
@pytest.mark.parametrize(
    "nonsense",
    [
        b"KVRS-PROOF/1 " + b"0" * 300,
        b"KVRS-PROOF/1 00\r\n\r\n",
        b"KVRS-PROOF/1 xx yy\r\n\r\n",
        b"KVRS-PROOF/1 \xff\r\n\r\n",
    ],
)
async def test_a_broken_proof_ends_the_connection(
    opened: Opened, nonsense: bytes, tmp_path: Path
) -> None:
    """Nothing is kept or awaited for it."""
    async with opened(tmp_path) as port:
        with suppress(ConnectionResetError):
            assert await exchange(port, nonsense) == b""


async def test_a_client_with_a_wrong_proof_gets_nothing(tmp_path: Path) -> None:
    """It may have heard the key's id."""
    key = replace(KEYS[agent], key=bytes(32))
    async with agent(tmp_path) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ClientProof(key, bytes(NONCE_BYTES)).hello)
        await reader.readuntil(END)
        writer.write(b"KVRS-PROOF/1 " + b"00" * 32 + END)
        writer.write(b"GET /kvrs/v1/agent HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        received = b""
        with suppress(ConnectionResetError):
            received = await reader.read()
        writer.close()

    assert received == b""


@pytest.mark.parametrize("opened", [agent, engine, proxy, admin, peer])
async def test_responses_of_every_port_name_no_version(opened: Opened, tmp_path: Path) -> None:
    """Neither of Python nor of aiohttp: whole, refused, not there, and to what is no HTTP."""
    requests = [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
        b"no HTTP at all\r\n\r\n",
    ]
    async with opened(tmp_path) as port:
        answers = [await exchange(port, request) for request in requests]

    for answer in answers:
        head = answer.partition(b"\r\n\r\n")[0].lower()
        servers = [line for line in head.split(b"\r\n") if line.startswith(b"server:")]
        assert servers == [b"server: kvrs"], answer
