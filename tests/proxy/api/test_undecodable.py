"""Output that a message or a response cannot express: its client gets an error with a reason, no
instance is blamed, and nothing is tried again.
"""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from kvrs_testkit.multi_proxy_cluster import open_proxy_group
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

MESSAGE: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 90,
    "messages": [{"role": "user", "content": "play latin."}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
}
RESPONSE: dict[str, Any] = {
    "model": "scripted",
    "input": "play latin.",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
}
CHAT = MESSAGE | {"tools": [{"type": "function", "function": {"name": "f"}}]}


def call(index: Any = 0, **function: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": "c", "type": "function", "function": function}]}


BEGUN = [{"content": "Look."}, call(name="f", arguments='{"private":')]
# Messages that end with such an event, and the reason that their clients get.
BROKEN: dict[str, Any] = {
    "not complete": ([*BEGUN, {}], "not a JSON object"),
    "another block": ([*BEGUN, {"content": "and"}, {}], "not a JSON object"),
    "malformed": ([*BEGUN, {"tool_calls": [{"index": 0, "id": ["private"]}]}, {}], "malformed"),
}


def plain(instances: Any) -> None:
    """Make the instances plain engines, whose events are passed on."""
    for instance in instances.values():
        instance.capabilities = []


def play(system: ProxyCluster, name: str) -> None:
    system.script.deltas, _ = BROKEN[name]
    system.script.stop_after = len(system.script.deltas)


@pytest.fixture(params=BROKEN)
async def broken(build: ProxyClusterBuilder, request: pytest.FixtureRequest) -> ProxyCluster:
    system = await build(prepare=plain)
    play(system, request.param)
    return system


async def post(system: ProxyCluster, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    async with system.http.post(system.url + path, json=body, headers=headers) as response:
        return response.status, await response.read()


def events_of(raw: bytes) -> list[dict[str, Any]]:
    lines = [line for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]


async def assert_none_is_blamed(system: ProxyCluster, requests: int = 1) -> None:
    """Each request was decoded once, and no instance failed."""
    decodes = [one for name, one in system.instances.items() if name.startswith("d")]
    assert sum(len(one.completions) for one in decodes) == requests
    assert {*(await system.health()).values()} == {"up"}
    assert await system.count("kvrs_attempts_failed_total") == 0
    assert await system.count("kvrs_requests_total", outcome="failed") == requests


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}], ids=["plain", "keyed"])
async def test_a_streamed_message_ends_with_an_api_error(
    broken: ProxyCluster, headers: dict[str, str]
) -> None:
    """The text before it is there, the call's block stays open, and the client raises."""
    status, raw = await post(broken, "/v1/messages", MESSAGE | {"stream": True}, **headers)

    events = events_of(raw)
    kinds = [event["type"] for event in events]
    assert status == 200
    assert kinds.count("error") == 1
    assert events[-1]["error"]["type"] == "api_error"
    assert kinds.count("content_block_start") == 2
    assert kinds.count("content_block_stop") == 1
    assert not {"message_delta", "message_stop"} & {*kinds}
    assert "private" not in str(events[-1])
    await assert_none_is_blamed(broken)
    async with anthropic.AsyncAnthropic(base_url=broken.url, api_key="none") as client:
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(**MESSAGE) as stream:
                await stream.until_done()


async def test_a_keyed_message_that_is_sent_again_ends_alike(broken: ProxyCluster) -> None:
    """The record has the same events, so the client gets the same error."""
    answers = [
        events_of((await post(broken, "/v1/messages", body, **{"Idempotency-Key": "k"}))[1])
        for body in [MESSAGE | {"stream": True}] * 2
    ]

    assert answers[0][1:] == answers[1][1:]
    assert answers[1][-1]["error"]["type"] == "api_error"


async def test_a_whole_message_is_a_502_that_clients_do_not_repeat(broken: ProxyCluster) -> None:
    """The client would send the request again after another 5xx."""
    async with anthropic.AsyncAnthropic(base_url=broken.url, api_key="none") as client:
        with pytest.raises(anthropic.APIStatusError) as failed:
            await client.messages.create(**MESSAGE)

    assert failed.value.status_code == 502
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    assert "private" not in failed.value.message
    decodes = [one for name, one in broken.instances.items() if name.startswith("d")]
    assert sum(len(one.completions) for one in decodes) == 1


async def test_a_whole_answer_of_a_malformed_piece_is_a_502(build: ProxyClusterBuilder) -> None:
    """A chat's too, with a key and without; nothing of the piece is in the error."""
    system = await build(prepare=plain)
    play(system, "malformed")

    for headers in ({}, {"Idempotency-Key": "k"}):
        status, raw = await post(system, "/v1/chat/completions", CHAT, **headers)
        assert status == 502
        assert json.loads(raw)["error"]["code"] == "undecodable"
        assert b"private" not in raw
    await assert_none_is_blamed(system, requests=2)


async def test_a_whole_answer_without_a_time_is_a_502(build: ProxyClusterBuilder) -> None:
    """An engine's head may lack what the head of an answer needs."""
    system = await build(prepare=plain)
    for instance in system.instances.values():
        instance.created = None  # type: ignore[assignment]

    status, raw = await post(system, "/v1/chat/completions", CHAT)

    assert status == 502
    assert json.loads(raw)["error"]["code"] == "undecodable"
    await assert_none_is_blamed(system)


async def test_a_response_fails_alike_however_it_is_read(broken: ProxyCluster) -> None:
    """The call is neither done nor completed; the record gives the same events and response."""
    _, raw = await post(broken, "/v1/responses", RESPONSE | {"stream": True})
    events = events_of(raw)
    last = events[-1]
    path = f"/v1/responses/{last['response']['id']}"
    async with broken.http.get(broken.url + path) as found:
        again = await found.json()
    async with broken.http.get(broken.url + path, params={"stream": "true"}) as found:
        replayed = events_of(await found.read())

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "private" not in last["response"]["error"]["message"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message"]
    statuses = [item["status"] for item in last["response"]["output"]]
    assert statuses == ["completed", "incomplete"]
    assert again == last["response"]
    assert replayed == events
    await assert_none_is_blamed(broken)


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_nobody_reads_fails_too(
    broken: ProxyCluster, background: bool
) -> None:
    """Its record alone says so."""
    async with openai.AsyncOpenAI(base_url=f"{broken.url}/v1", api_key="none") as client:
        begun = await client.responses.create(**RESPONSE, background=background)
        async with asyncio.timeout(WITHIN_S):
            while (found := await client.responses.retrieve(begun.id)).status != "failed":
                await asyncio.sleep(0.01)

    assert background or begun == found
    assert found.error is not None
    assert [item.status for item in found.output] == ["completed", "incomplete"]  # type: ignore[union-attr]


@pytest.mark.parametrize("kill", [False, True], ids=["here", "elsewhere"])
async def test_a_reader_that_comes_later_gets_the_failure_at_once(kill: bool) -> None:
    """The stream still runs, at this proxy or, after its proxy's death, at the next one."""
    async with open_proxy_group(2, prepare=plain) as group:
        play(group.system, "malformed")
        group.system.script.gate, group.system.script.gate_at = asyncio.Event(), 3
        async with openai.AsyncOpenAI(base_url=f"{group.url(0)}/v1", api_key="none") as client:
            begun = await client.responses.create(**RESPONSE, background=True)
        (keyed,) = group.mirror(0).streams.values()
        await group.until(lambda: len(keyed.given) > 3)
        if kill:
            await group.kill(0)
        async with (
            openai.AsyncOpenAI(base_url=f"{group.url(int(kill))}/v1", api_key="none") as client,
            asyncio.timeout(WITHIN_S),
        ):
            began_s = asyncio.get_running_loop().time()
            reader = await client.responses.retrieve(begun.id, stream=True)
            events = [event async for event in reader]
            took_s = asyncio.get_running_loop().time() - began_s
            found = await client.responses.retrieve(begun.id)
        group.system.script.gate.set()

    last = events[-1]
    assert took_s < 1.0  # The engine is silent for longer.
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert last.type == "response.failed"
    assert found == last.response


async def test_a_chat_has_the_pieces_as_they_came(broken: ProxyCluster) -> None:
    """Its client reads them itself."""
    status, raw = await post(broken, "/v1/chat/completions", CHAT | {"stream": True})

    deltas = [event["choices"][0]["delta"] for event in events_of(raw)[1:]]
    assert status == 200
    assert deltas == broken.script.deltas
