"""Anthropic's Messages API in front of real vLLM, which has that endpoint too: what clients get
through kvrs is what one server alone would have given them.
"""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from kvrs_testkit.vllm_servers import VllmServers
from tests.messages_cases import CASES, WALK, Message, ask, body_of, count
from tests.vllm.marks import REAL_VLLM
from tests.vllm.test_vllm_proxy import Front, open_front

pytestmark = REAL_VLLM


@pytest.fixture
async def front(vllm_servers: VllmServers) -> AsyncIterator[Front]:
    async with open_front(vllm_servers, vllm_servers.config) as opened:
        yield opened


async def both(front: Front, name: str, stream: bool) -> tuple[Message, Message]:
    """From a server alone, and through kvrs."""
    body = {"model": front.servers.model} | body_of(name, stream)
    behind = f"http://127.0.0.1:{front.proxy.port}"
    alone, ours = [await ask(front.http, url, body) for url in (front.servers.url("d0"), behind)]
    return alone, ours


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CASES)
async def test_messages_are_those_of_one_server(front: Front, name: str, stream: bool) -> None:
    """Blocks, reason and usage."""
    alone, ours = await both(front, name, stream)

    assert ours == alone


async def test_tokens_are_counted_as_by_one_server(front: Front) -> None:
    behind = f"http://127.0.0.1:{front.proxy.port}"
    for name in CASES:
        body = {"model": front.servers.model} | body_of(name, stream=False)
        alone, ours = [
            await count(front.http, url, body) for url in (front.servers.url("d0"), behind)
        ]
        assert ours == alone, name


async def test_a_call_of_a_tool_survives_its_decode_server(front: Front) -> None:
    """The server hangs within the call, and the client gets each part of the arguments once."""
    body = {"model": front.servers.model} | body_of("text", stream=True) | WALK
    alone = await ask(front.http, front.servers.url("d0"), body)

    asked = asyncio.create_task(ask(front.http, f"http://127.0.0.1:{front.proxy.port}", body))
    victim = await front.hang_in_mid_stream(least_tokens=20)
    try:
        ours = await asked
    finally:
        front.servers.signal(victim, signal.SIGCONT)

    assert ours == alone
    assert [row["from"] for row in (await front.state())["recoveries"]] == [victim]
    await front.until_up()
