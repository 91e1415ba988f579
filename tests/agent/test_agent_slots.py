"""Slots of a running agent: its answers, and its fence requests to instances."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId, StreamId
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.instance import (
    AgentReport,
    FenceRequest,
    Slot,
    SlotAnswer,
    SlotCounts,
    SlotRequest,
    SlotUpdate,
)
from kvrs.protocol.secrets import Scope, scoped_keys
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import serving
from tests.agent.agents import SECRET, ask, document, running, session

pytestmark = pytest.mark.network

E0 = InstanceId("e0")


def asked(stream: str, attempt: int = 2, owner_epoch: int = 0) -> SlotRequest:
    return SlotRequest(E0, StreamId(stream), attempt, owner_epoch)


def with_slots(base: Path, slots_max: int = 2) -> dict[str, Any]:
    written = document(base)
    written["cluster"]["nodes"][0]["instances"][0]["port"] = free_ports(1)[0]
    return written | {"policy": {"slots_max": slots_max}}


@asynccontextmanager
async def instance(port: int, failures: int = 0) -> AsyncIterator["asyncio.Queue[FenceRequest]"]:
    """The fence requests to e0, ; the first few fail."""
    requests: asyncio.Queue[FenceRequest] = asyncio.Queue()
    left = failures

    async def fence(request: Request) -> Response:
        nonlocal left
        left -= 1
        if left >= 0:
            return Response(503)
        assert "Authorization" not in request.headers
        requests.put_nowait(msgspec.json.decode(await request.read(), type=FenceRequest))
        return Response(body=b"{}")

    routes = Routes()
    routes.add("POST", "/kvrs/v1/fence", fence)
    async with serving(routes, scoped_keys([SECRET], "e0", Scope.INSTANCE), port):
        yield requests


async def test_an_agent_grants_slots_to_all_proxies(tmp_path: Path) -> None:
    """In batches: what ends makes room for what is requested. Watchers get the counts."""
    config = parse_config(with_slots(tmp_path))
    async with running(config), session(config) as client:
        first = await ask(
            client,
            "/kvrs/v1/slots",
            SlotAnswer,
            SlotUpdate("a", 30.0, acquire=[asked("s"), asked("t"), asked("u")]),
        )
        second = await ask(
            client,
            "/kvrs/v1/slots",
            SlotAnswer,
            SlotUpdate("b", 30.0, renew=[asked("s")], acquire=[asked("v")]),
        )
        third = await ask(
            client,
            "/kvrs/v1/slots",
            SlotAnswer,
            SlotUpdate("a", 30.0, release=[asked("s")], renew=[asked("t")], acquire=[asked("w")]),
        )
        report = await ask(client, "/kvrs/v1/holdings", AgentReport)

    tokens = [slot.token for slot in first.acquired]
    assert tokens[1] == tokens[0] + 1
    assert tokens[2] == 0
    assert first.acquired[2].wait_s > 0
    assert (second.acquired[0].token, second.lost) == (0, ["s"])
    assert (third.acquired, third.lost) == ([Slot(tokens[1] + 1)], [])
    assert report.slots == {
        E0: SlotCounts(held=2, waiting=2, most=2, granted=3, denied=2, expired=0)
    }


async def test_tokens_rise_over_restarts_although_the_wall_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets survive a restart of the agent, and must distinguish old grants from new ones."""
    config, tokens = parse_config(with_slots(tmp_path)), list[int]()
    wall_ns = time.time_ns()
    for hours in (2, 1):
        monkeypatch.setattr(time, "time_ns", lambda back=hours: wall_ns + back * 3600 * 10**9)
        async with running(config), session(config) as client:
            answer = await ask(
                client, "/kvrs/v1/slots", SlotAnswer, SlotUpdate("a", 30.0, acquire=[asked("s")])
            )
            tokens += [slot.token for slot in answer.acquired]

    assert tokens == sorted(set(tokens))


async def test_transfers_of_a_dead_owner_are_fenced(tmp_path: Path) -> None:
    """The instance gets the request until it succeeds, with the owner's epoch, over a
    connection on which it has proved itself.
    """
    config = parse_config(with_slots(tmp_path))
    port = config.cluster.nodes[0].instances[0].port
    async with running(config), session(config) as client, instance(port, failures=1) as requests:
        update = SlotUpdate("a", 0.2, acquire=[asked("s"), asked("t", 1, owner_epoch=7)])
        await ask(client, "/kvrs/v1/slots", SlotAnswer, update)
        async with asyncio.timeout(60):
            fence = await requests.get()
        report = await ask(client, "/kvrs/v1/holdings", AgentReport)

    assert fence == FenceRequest(
        {StreamId("s"): 3, StreamId("t"): 2}, {StreamId("s"): 0, StreamId("t"): 7}, slots_only=True
    )
    assert (report.slots[E0].held, report.slots[E0].expired) == (0, 2)


async def test_a_server_of_vllm_is_asked_for_nothing(tmp_path: Path) -> None:
    """It has no fences and no load reports: a lease there ends by itself."""
    written = with_slots(tmp_path)
    written["cluster"] |= {"backend": "vllm", "model": str(tmp_path)}
    written["cluster"]["nodes"][0]["instances"][0]["role"] = "decode"
    written["cluster"]["nodes"][0]["agent"]["gossip_port"] = free_ports(1)[0]
    config = parse_config(written | {"gossip": {"enabled": True}})
    port, calls = config.cluster.nodes[0].instances[0].port, list[int]()

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(port)
        writer.close()

    listener = await asyncio.start_server(called, "127.0.0.1", port)
    async with listener, running(config), session(config) as client:
        update = SlotUpdate("a", 0.1, acquire=[asked("s")])
        await ask(client, "/kvrs/v1/slots", SlotAnswer, update)
        async with asyncio.timeout(60):
            while not (await ask(client, "/kvrs/v1/holdings", AgentReport)).slots[E0].expired:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)

    assert calls == []


async def test_an_agent_ends_while_an_instance_does_not_answer(tmp_path: Path) -> None:
    """Pending fence requests do not delay its end."""
    config = parse_config(with_slots(tmp_path))
    async with running(config), session(config) as client:
        await ask(client, "/kvrs/v1/slots", SlotAnswer, SlotUpdate("a", 0.1, acquire=[asked("s")]))
        while (await ask(client, "/kvrs/v1/holdings", AgentReport)).slots[E0].held:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (SlotUpdate("a", 30.0, acquire=[SlotRequest(InstanceId("e9"), StreamId("s"), 1)]), "e0"),
        (SlotUpdate("a", 0.0), "lease_s"),
        (SlotUpdate("", 1.0), "owner"),
    ],
)
async def test_invalid_slot_requests_are_rejected(
    tmp_path: Path, body: SlotUpdate, message: str
) -> None:
    """Instances of another node, leases without a duration, owners without a name."""
    config = parse_config(with_slots(tmp_path))
    async with (
        running(config),
        session(config) as client,
        client.post("/kvrs/v1/slots", data=msgspec.json.encode(body)) as answer,
    ):
        assert (answer.status, message in await answer.text()) == (400, True)


def test_fence_requests_of_older_versions_are_understood() -> None:
    """A request without owners is for attempts of the first owner, and fences the whole
    instance.
    """
    fence = msgspec.json.decode(b'{"attempts":{"s":3}}', type=FenceRequest)

    assert (fence.numbers(), fence.slots_only) == ({StreamId("s"): (0, 3)}, False)
