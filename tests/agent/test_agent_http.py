"""HTTP between agents and proxies."""

import os
import socket
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs.gossip.membership import Membership
from kvrs.ids import NodeId, StreamId
from kvrs.net.proving import UnprovenError
from kvrs.protocol.instance import AgentInfo, AgentReport, LeaseAnswer, LeaseUpdate
from kvrs.protocol.pages import HeldPages, StoreCode
from kvrs.protocol.secrets import Scope
from kvrs.transfer.rows.tags import RowTagger
from kvrs.transfer.store.directory import StoreDirectory, store_directory
from kvrs.transfer.store.host import Slab
from kvrs_testkit.free_ports import free_ports
from tests.agent.agents import (
    N0,
    PAGE_BYTES,
    SECRET,
    Engine,
    ask,
    document,
    running,
    session,
    tags,
)
from tests.gossip.gatherings import QUICK, until

pytestmark = pytest.mark.network

S, T, U = StreamId("s"), StreamId("t"), StreamId("u")


async def test_an_agent_identifies_itself(tmp_path: Path) -> None:
    """With node, epoch and page port."""
    config = parse_config(document(tmp_path))
    async with running(config), session(config) as client:
        info = await ask(client, "/kvrs/v1/agent", AgentInfo)

    agent = config.cluster.nodes[0].agent
    assert (info.id, info.node, info.pid) == ("agent-n0", "n0", os.getpid())
    assert info.epoch > 0
    assert (info.page_port, info.capacity_bytes) == (agent.page_port, 64 * PAGE_BYTES)
    assert info.host_to_device_bytes_per_s == 26e9


async def test_holdings_are_reported_and_leases_released(tmp_path: Path) -> None:
    """Once, and as a stream of changes; releases free room at once."""
    config = parse_config(document(tmp_path, capacity_pages=8))
    async with running(config), session(config) as client, Engine(config) as engine:
        await engine.offer("s", 4)
        await engine.store("s", 0, tags(1, 3))
        once = await ask(client, "/kvrs/v1/holdings", AgentReport)
        async with client.get("/kvrs/v1/holdings?watch=0.02") as watched:
            lines = [msgspec.json.decode(await watched.content.readline(), type=AgentReport)]
            await engine.offer("t", 5)
            await engine.offer("u", 4)
            while not any(U in line.pages for line in lines):
                lines.append(
                    msgspec.json.decode(await watched.content.readline(), type=AgentReport)
                )
        released = await ask(
            client,
            "/kvrs/v1/leases",
            LeaseAnswer,
            LeaseUpdate(lease_s=30, renew=[S, T, U], release=[S]),
        )
        left = await ask(client, "/kvrs/v1/holdings", AgentReport)

    assert (once.reserved_bytes, once.held_bytes) == (4 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert (once.checkpoints, once.pages, once.denied) == (1, {S: 3}, [])
    assert lines[0] == once
    assert [stream for line in lines[1:] for stream in line.denied] == [T]
    assert {stream: count for line in lines[1:] for stream, count in line.pages.items()} == {
        T: 0,
        U: 0,
    }
    assert released.unknown == [S, T]
    assert (left.reserved_bytes, left.held_bytes, left.checkpoints) == (
        4 * PAGE_BYTES,
        3 * PAGE_BYTES,
        1,
    )


async def test_leases_that_are_not_renewed_expire(tmp_path: Path) -> None:
    """A dead proxy releases nothing; watchers get a report."""
    written = document(tmp_path)
    written["transfer"] = {"lease_s": 1.5}
    config = parse_config(written)
    async with running(config), session(config) as client, Engine(config) as engine:
        await engine.offer("s", 4)
        async with client.get("/kvrs/v1/holdings?watch=0.02") as watched:
            while (
                report := msgspec.json.decode(await watched.content.readline(), type=AgentReport)
            ).checkpoints:
                pass

    assert report.pages == {S: 0}
    assert report.reserved_bytes == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/kvrs/v1/holdings?watch=soon", b"", 400),
        ("POST", "/kvrs/v1/leases", b"{", 400),
        ("POST", "/kvrs/v1/leases", b'{"lease_s":1,"renew":["\xff"]}', 400),
        pytest.param("POST", "/kvrs/v1/slots", b'{"other":' + b"[" * 100_000, 400, id="nested"),
        ("POST", "/kvrs/v1/leases", b'{"lease_s":-1}', 400),
        ("POST", "/kvrs/v1/faults", b'{"type":"none"}', 401),
        ("GET", "/healthz", b"", 200),
    ],
)
async def test_invalid_requests_are_rejected(
    tmp_path: Path, method: str, path: str, body: bytes, status: int
) -> None:
    """Also injected faults, unless the file allows them."""
    config = parse_config(document(tmp_path))
    async with (
        running(config),
        session(config) as client,
        client.request(method, path, data=body) as answer,
    ):
        assert answer.status == status


async def test_secrets_rotate_without_a_gap(tmp_path: Path) -> None:
    """During a rotation all accept the new secret before any uses it, and the old one until it is
    removed.
    """
    old, new = SECRET, b"the secret of tomorrow, as long"
    config = parse_config(document(tmp_path))
    for used, other in ((old, new), (new, old)):
        async with running(config, used, older=[other]):
            for brought in (used, other):
                async with session(config, brought) as http, Engine(config, brought) as engine:
                    assert (await ask(http, "/kvrs/v1/agent", AgentInfo)).id == "agent-n0"
                    assert await engine.offer("s", 2) == HeldPages(StoreCode.OK, 0)
    async with running(config, new), session(config, old) as http:
        with pytest.raises(UnprovenError, match="another secret"):
            await http.get("/kvrs/v1/agent")


async def test_each_start_makes_tags_of_rows_under_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts from 0."""
    config, salts = parse_config(document(tmp_path)), list[bytes]()

    def tagger(secret: bytes, salt: bytes) -> RowTagger:
        salts.append(salt)
        return RowTagger(secret, salt)

    monkeypatch.setattr("kvrs.agent.node.RowTagger", tagger)
    for _ in range(2):
        async with running(config):
            pass

    assert len(set(salts)) == 2


async def test_requests_without_the_secret_get_nothing(tmp_path: Path) -> None:
    """Except the health check."""
    config = parse_config(document(tmp_path))
    async with running(config), aiohttp.ClientSession(config.cluster.nodes[0].agent.url) as client:
        statuses = {}
        for path in (
            "/healthz",
            "/kvrs/v1/agent",
            "/kvrs/v1/holdings",
            "/kvrs/v1/holdings?watch=1",
        ):
            async with client.get(path) as answer:
                statuses[path] = answer.status
        async with client.post("/kvrs/v1/leases", data=b"{}") as answer:
            statuses["leases"] = answer.status

    assert statuses.pop("/healthz") == 200
    assert set(statuses.values()) == {401}


async def test_injected_faults_affect_what_the_agent_sends(tmp_path: Path) -> None:
    """An agent carries out injected faults as an instance does."""
    config = parse_config(document(tmp_path, allow_faults=True))
    async with (
        running(config),
        session(config, door=Scope.ADMIN) as client,
        Engine(config) as engine,
    ):
        await engine.offer("s", 3)
        await engine.store("s", 0, tags(1, 3))
        async with client.post("/kvrs/v1/faults", data=b'{"type":"pages","pages":1}') as answer:
            assert answer.status == 200
        hit = await engine.fetch(tags(1, 3))
        whole = await engine.fetch(tags(1, 3))

    assert (hit.full_pages, hit.error) == (0, "checksum of page 0 is wrong")
    assert whole.full_pages == 3


async def test_the_end_releases_everything(tmp_path: Path) -> None:
    """Descriptors, and all memory. The first agent of a process opens what all later ones use, and
    threads of other tests open some for a moment; what an agent leaves open stays open.
    """
    config, descriptors = parse_config(document(tmp_path)), list[int]()
    for _ in range(7):
        async with running(config), Engine(config) as engine:
            await engine.offer("s", 40)
            await engine.store("s", 0, tags(1, 40))
            assert (await engine.fetch(tags(1, 40))).full_pages == 40
        descriptors.append(len(os.listdir("/proc/self/fd")))

    assert list(tmp_path.iterdir()) == []
    assert min(descriptors[4:]) <= min(descriptors[1:4]), descriptors
    maps = Path("/proc/self/maps").read_text()
    assert "slab" not in maps


def _unknown_node(written: dict[str, Any]) -> None:
    written["cluster"]["nodes"][0]["id"] = "n7"


def _no_base(written: dict[str, Any]) -> None:
    written["backup"]["directory"] += "/missing"


def _too_much(written: dict[str, Any]) -> None:
    written["backup"]["capacity_bytes"] = 1 << 60


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_unknown_node, "node 'n0' is not in cluster.nodes; allowed: n7"),
        (_no_base, "No such file or directory"),
        (_too_much, f"backup.capacity_bytes: got {1 << 60}; allowed: at most "),
    ],
)
async def test_a_configuration_that_cannot_be_served_is_rejected(
    tmp_path: Path, spoil: Any, reason: str
) -> None:
    """With the value and the allowed ones; nothing is left behind."""
    written = document(tmp_path)
    spoil(written)

    with pytest.raises(ConfigError) as caught:
        async with running(parse_config(written)):
            pass

    assert reason in str(caught.value)
    assert list(tmp_path.iterdir()) == []


async def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of a killed agent may be where this one cannot take them over."""

    def refuse(directory: StoreDirectory, capacity_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Slab, "open", refuse)
    config = parse_config(document(tmp_path))
    with pytest.raises(ConfigError) as caught:
        async with running(config):
            pass

    assert caught.value.faults == [
        f"backup.directory: {store_directory(str(tmp_path), SECRET, N0)}: No space left on device"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["port", "page_port"])
async def test_a_port_in_use_is_named(tmp_path: Path, key: str) -> None:
    """Both ports of an agent."""
    written = document(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = written["cluster"]["nodes"][0]["agent"][key] = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            async with running(parse_config(written)):
                pass

    assert caught.value.faults == [
        f"agent of node n0: {key}: 127.0.0.1:{port} is in use; allowed: a free port"
    ]
    assert list(tmp_path.iterdir()) == []


async def test_an_agent_that_cannot_start_leaves_the_pages_to_the_next(tmp_path: Path) -> None:
    """Only a clean end removes pages."""
    config = parse_config(document(tmp_path))
    with socket.socket() as taken:
        async with running(config), Engine(config) as engine:
            await engine.offer("s", 2)
            await engine.store("s", 0, tags(1, 2))
            kept = {path: path.read_bytes() for path in tmp_path.glob("*/*") if path.is_file()}
        directory = next(iter(kept)).parent
        directory.mkdir(0o700)
        for path, content in kept.items():
            path.write_bytes(content)
            path.chmod(0o600)
        taken.bind(("127.0.0.1", config.cluster.nodes[0].agent.port))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use"):
            async with running(config):
                pass

    async with running(config), Engine(config) as engine:
        assert (await engine.fetch(tags(1, 2))).full_pages == 2


async def test_an_agent_listens_at_its_bind_and_is_reached_by_name(tmp_path: Path) -> None:
    """HTTP, pages and gossip: the other members are told an address of the name, not the bind."""
    written = document(tmp_path) | {"gossip": QUICK | {"enabled": True}}
    agent = written["cluster"]["nodes"][0]["agent"]
    agent |= {"host": "localhost", "bind": "0.0.0.0", "gossip_port": free_ports(1)[0]}
    written["proxy"] = {"port": 0, "admin_port": 0}
    config = parse_config(written)
    other = Membership(NodeId("other"), 0.5, [SECRET])
    async with running(config), session(config) as client, Engine(config) as engine:
        info = await ask(client, "/kvrs/v1/agent", AgentInfo)
        held = await engine.offer("s", 1)
        for key in ("port", "page_port"):
            socket.create_connection(("127.0.0.2", agent[key])).close()
        try:
            await other.start("localhost", 0, {N0: f"127.0.0.2:{agent['gossip_port']}"})
            await until(lambda: N0 in other.members)
            told = other.members[N0].address
        finally:
            await other.close()

    assert info.page_port == agent["page_port"]
    assert held.code is StoreCode.OK
    assert told == f"127.0.0.1:{agent['gossip_port']}"
