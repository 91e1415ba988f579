"""The proxy in front of real SGLang, prefill and decode apart: clients get what transformers
computes, also when servers die.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest

from kvrs_testkit.sglang_servers import Part, SglangServers
from tests.vllm.test_vllm_proxy import (
    MESSAGES,
    PROMPT,
    Front,
    assert_steps_are_reported,
    open_front,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

LONG = [3 + (7 * n * n) % 400 for n in range(300)]
TOKENS = 64
_GREEDY = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model, prompt, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
ids = found.generate(
    torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False
)
print(json.dumps(ids[0, len(prompt):].tolist()))
"""


@pytest.fixture
async def front(sglang_servers: SglangServers) -> AsyncIterator[Front]:
    async with open_front(sglang_servers, sglang_servers.config) as opened:
        yield opened


async def reference(servers: SglangServers, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy output by transformers, which has no end within it."""
    command = [os.environ["KVRS_SGLANG_PYTHON"], "-c", _GREEDY]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, servers.model, json.dumps(list(prompt)), str(count)],
        capture_output=True,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


async def stream(front: Front, **fields: Any) -> list[int]:
    """The ids of a stream that is complete."""
    status, events = await front.ask(stream=True, ignore_eos=True, **fields)
    assert status == 200, events
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return [i for choice in choices for i in choice["token_ids"]]


async def test_a_stream_is_what_transformers_computes(front: Front) -> None:
    assert isinstance(front.servers, SglangServers)
    expected = await reference(front.servers, LONG, TOKENS)

    assert await stream(front, prompt=LONG, max_tokens=TOKENS) == expected


@pytest.mark.parametrize("part", Part)
async def test_a_stream_outlives_its_decode_server(front: Front, part: Part) -> None:
    """All of it, or its scheduler alone."""
    servers = front.servers
    assert isinstance(servers, SglangServers)
    expected = await reference(servers, LONG, 500)
    streaming = asyncio.create_task(stream(front, prompt=LONG, max_tokens=500))
    victim = await _decoding(front, 20)

    servers.kill(victim, part)

    try:
        assert await streaming == expected
    finally:
        await asyncio.to_thread(servers.start, victim)
        await asyncio.to_thread(servers.wait_ready, victim)


async def test_streams_wait_for_a_prefill_server_that_died(front: Front) -> None:
    """There is one: those that decode go on, and the others begin when it is back."""
    servers = front.servers
    assert isinstance(servers, SglangServers)
    expected = await reference(servers, LONG, 300)
    before = asyncio.create_task(stream(front, prompt=LONG, max_tokens=300))
    await _decoding(front, 5)

    servers.kill("p0")
    after = asyncio.create_task(stream(front, prompt=LONG[::-1], max_tokens=TOKENS))
    try:
        assert await before == expected
    finally:
        await asyncio.to_thread(servers.start, "p0")
        await asyncio.to_thread(servers.wait_ready, "p0")

    assert await after == await reference(servers, LONG[::-1], TOKENS)


async def test_chats_of_the_openai_client(front: Front) -> None:
    """With a stream and without; their text is that of the ids by the engine's own template."""
    assert isinstance(front.servers, SglangServers)
    asked: dict[str, Any] = {"model": front.servers.model, "messages": MESSAGES, "temperature": 0}
    url, parts = f"http://127.0.0.1:{front.proxy.port}/v1", list[str]()

    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        chats = client.chat.completions
        whole = await chats.create(**asked, max_tokens=20)
        async for chunk in await chats.create(**asked, max_tokens=20, stream=True):
            parts += [choice.delta.content or "" for choice in chunk.choices]
        models = await client.models.list()

    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == "".join(parts) != ""
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert [each.id for each in models.data]


async def test_text_prompts_and_choices(front: Front) -> None:
    status, answer = await front.ask(prompt=PROMPT, max_tokens=12, n=2, logprobs=1)

    assert status == 200, answer
    first, second = answer["choices"]
    assert first["token_ids"] == second["token_ids"]
    assert len(first["logprobs"]["token_logprobs"]) == 12


async def _decoding(front: Front, tokens: int) -> str:
    """Wait until the only stream has so many tokens; return its decode server."""
    async with asyncio.timeout(60):
        while True:
            for each in (await front.state())["streams"]:
                if each["output_tokens"] >= tokens:
                    return str(each["decode"])
            await asyncio.sleep(0.005)


async def test_the_steps_of_a_server_are_known(front: Front) -> None:
    """By its counters of steps without prompts, in `/v1/loads`."""
    await assert_steps_are_reported(front, within_s=10.0)
