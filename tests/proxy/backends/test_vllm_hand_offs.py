"""How long a hand-off of vLLM may be used, and the ids that go with it."""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import InstanceInfo, MeasuredPrefill, Role
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.backends.backend import Prefilled
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs.proxy.backends.pd import OpenAiPeer
from kvrs.proxy.backends.stock_facts import ConfiguredIdentity
from kvrs.proxy.backends.vllm import _HAND_OFF_S, VllmBackend
from kvrs.proxy.wire.upstream import Access, EngineLinks
from kvrs.proxy.wire.watchdog import Watchdog
from kvrs_testkit.virtual_time import run_virtually, virtual_loop
from kvrs_testkit.vllm_cluster import LONG, Builder

IDENTITY = ConfiguredIdentity(InstanceId("p0"), NodeId("n0"), Role.PREFILL, ModelFiles("x"))
GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=1, dtype_bytes=2, page_size_tokens=32)
MEASURED = MeasuredPrefill("", 1, [0.0, 1.0])
INFO = InstanceInfo(
    InstanceId("p0"), NodeId("n0"), Role.PREFILL, 1, 1, "m", "f", GEOMETRY, 0, 1, [], MEASURED
)
TRANSFER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5801,
    "tp_size": 1,
}


def test_a_hand_off_ages_while_the_proxy_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer may have lain in the socket all that time. And it ends before the shortest lease
    that docs/guide/vllm.md names.
    """

    async def prefill(_: OpenAiPeer, call: Call) -> Prefilled:
        await asyncio.sleep(0.7)
        if call.path == "stopped":
            virtual_loop().stall(1.5)
            await asyncio.sleep(0.01)
        return Prefilled(packed([1]), msgspec.Raw(msgspec.json.encode(TRANSFER)))

    async def remaining_s(how: str) -> float:
        loop = virtual_loop()
        async with EngineLinks(Access()) as links:
            backend = VllmBackend(links, "http://x", IDENTITY, b"")
            backend._info = INFO
            with Watchdog(lambda *_: 60.0):  # As a stream has one.
                good_until_s = (await backend.prefill(Call(how, {}))).good_until_s
        assert good_until_s is not None
        return good_until_s - loop.time()

    monkeypatch.setattr(OpenAiPeer, "prefill", prefill)
    good_s, stopped_s = [run_virtually(remaining_s(how)) for how in ("good", "stopped")]

    assert good_s == pytest.approx(_HAND_OFF_S)
    assert 0 < stopped_s <= _HAND_OFF_S - 1.5
    assert _HAND_OFF_S < 10


async def test_decode_gets_the_ids_that_the_client_gave(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of prefill names others, with as many tokens: the stream's history is the
    client's, here as after a failure.
    """
    system = await vllms()
    prefill = OpenAiPeer.prefill

    async def other(peer: OpenAiPeer, call: Call) -> Prefilled:
        answer = await prefill(peer, call)
        answer.prompt_ids = packed([9] * len(answer.prompt_ids))
        answer.ids_text = msgspec.Raw(msgspec.json.encode([9] * len(answer.prompt_ids)))
        return answer

    monkeypatch.setattr(OpenAiPeer, "prefill", other)
    await system.ids(LONG)

    assert system.servers["d0"].bodies[-1]["prompt"] == LONG
