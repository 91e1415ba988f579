"""Scripted engines play a recording: a chat as recorded, its continuation by ids, its deaths."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from kvrs_testkit.engine_streams import HEAD, Recording, recordings
from kvrs_testkit.engine_streams.reading import Answer
from kvrs_testkit.engine_streams.vocabulary import OTHER_TEXT, other_id
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_sglang import ScriptedSglang
from kvrs_testkit.scripted_vllm import ScriptedVllm

pytestmark = pytest.mark.network

VLLM, SGLANG = recordings("vllm"), recordings("sglang")
HERMES, QWEN = VLLM["vllm-tools-hermes"], SGLANG["sglang-tools-qwen25"]
THOUGHT = VLLM["vllm-tools-hermes-thought-qwen3"]
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Tidy up."}]}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Server = ScriptedVllm | ScriptedSglang
Ask = Callable[..., Awaitable[bytes]]


@pytest.fixture
async def play() -> AsyncIterator[Callable[..., Awaitable[tuple[Server, Ask]]]]:
    """`server, ask = await play(recording, differs_at=3)`."""
    servers: list[Server] = []
    async with aiohttp.ClientSession() as http:

        async def make(recording: Recording, **fields: Any) -> tuple[Server, Ask]:
            kind = ScriptedVllm if recording.engine == "vllm" else ScriptedSglang
            server = kind("d0", "n0", recording=recording, **fields)
            if isinstance(server, ScriptedSglang):
                server.mode = "null"
            servers.append(server)
            await server.start()
            return server, lambda path, **body: ask(http, server, path, body)

        yield make
        for server in servers:
            await server.close()


async def ask(
    http: aiohttp.ClientSession, server: Server, path: str, body: dict[str, Any]
) -> bytes:
    """The body of the answer, as far as it comes."""
    body = {"model": "tiny", "stream": True} | body
    if path == CHAT:
        body.setdefault("messages", MESSAGES)
    got = b""
    try:
        async with http.post(f"http://127.0.0.1:{server.port}{path}", json=body) as response:
            assert response.status == 200, await response.text()
            async for piece in response.content.iter_any():
                got += piece
    except aiohttp.ClientError:
        pass
    return got


def data_of(body: bytes) -> list[str]:
    """The data of events, without `[DONE]`, which has to be the last."""
    *events, done, end = body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [event.removeprefix("data: ") for event in events]


def behind_head(data: str) -> str:
    return data[data.index('"choices"') :]


def texts(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def ids(events: list[str]) -> list[int]:
    return [one for event in events for one in json.loads(event)["choices"][0]["token_ids"]]


@pytest.mark.parametrize("recording", [HERMES, THOUGHT, VLLM["vllm-tools-pythonic-required"], QWEN])
async def test_a_chat_is_answered_as_recorded(play: Any, recording: Recording) -> None:
    """All but id, time and model is as the engine has sent it, nulls and order included."""
    _, ask = await play(recording)
    fields = {"return_token_ids": True} if recording.engine == "vllm" else {}

    events = data_of(await ask(CHAT, seed=7, temperature=1.0, **fields))

    assert [behind_head(each) for each in events] == [behind_head(each) for each in recording.data]
    assert {json.loads(each)["id"] for each in events} == {"chatcmpl-played-1"}
    assert not events[0].startswith(HEAD)


async def test_ids_come_only_where_they_were_asked_for(play: Any) -> None:
    """Without ids vLLM sends no event for tokens of which a client gets nothing."""
    _, ask = await play(HERMES)

    events = data_of(await ask(CHAT))

    assert {json.dumps(json.loads(each)["choices"][0].get("token_ids")) for each in events} == {
        "null"
    }
    assert json.loads(events[0])["prompt_token_ids"] is None
    assert all(
        choice["delta"] or choice["finish_reason"]
        for each in events
        for choice in json.loads(each)["choices"]
    )
    assert Answer.of(events).parsed_calls() == HERMES.calls


async def test_usage_counts_the_recorded_tokens(play: Any) -> None:
    for recording in (HERMES, QWEN):
        _, ask = await play(recording)

        *_, last = data_of(await ask(CHAT, stream_options={"include_usage": True}))

        assert json.loads(last)["usage"]["completion_tokens"] == len(recording.ids)
        assert json.loads(last)["usage"]["prompt_tokens"] == len(recording.prompt_ids)


@pytest.mark.parametrize("recording", [HERMES, QWEN])
async def test_a_whole_chat_has_the_recorded_message(play: Any, recording: Recording) -> None:
    _, ask = await play(recording)

    answer = json.loads(await ask(CHAT, stream=False))
    (choice,) = answer["choices"]
    kept = json.loads(bytes(recording.whole))

    assert choice["message"] == kept["message"]
    assert choice["finish_reason"] == kept["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == len(recording.ids)
    assert choice.get("token_ids") is None


@pytest.mark.parametrize("recording", [HERMES, THOUGHT, QWEN])
async def test_a_completion_by_ids_continues_at_each_position(
    play: Any, recording: Recording
) -> None:
    _, ask = await play(recording)

    for cut in range(0, len(recording.ids), 5):
        prompt = [*recording.prompt_ids, *recording.ids[:cut]]
        events = data_of(
            await ask(COMPLETIONS, prompt=prompt, return_token_ids=True, max_tokens=999)
        )

        assert ids(events) == recording.ids[cut:]
        assert json.loads(events[0])["choices"][0]["prompt_token_ids"] == prompt
        assert json.loads(events[-1])["choices"][0]["finish_reason"] == "stop"


async def test_a_completion_has_the_text_of_special_tokens_only_where_asked(play: Any) -> None:
    recording = VLLM["vllm-tools-mistral"]
    _, ask = await play(recording)
    fields = {"prompt": recording.prompt_ids, "max_tokens": 999}

    plain = texts(data_of(await ask(COMPLETIONS, **fields)))
    shown = texts(data_of(await ask(COMPLETIONS, **fields, skip_special_tokens=False)))

    assert plain == "".join(recording.texts)
    assert "[TOOL_CALLS]" not in plain
    assert shown.replace("[TOOL_CALLS]", "").replace("[ARGS]", "") == plain
    assert shown != plain


async def test_other_prompts_are_answered_as_without_a_recording(play: Any) -> None:
    """Self-tests send short prompts of their own."""
    _, ask = await play(HERMES)

    events = data_of(await ask(COMPLETIONS, prompt=[5, 6, 7], return_token_ids=True, max_tokens=6))

    assert ids(events) == expected_ids([5, 6, 7], 6)


@pytest.mark.parametrize("recording", [HERMES, QWEN])
async def test_a_fault_comes_at_its_position_once(play: Any, recording: Recording) -> None:
    for position in (0, 11, len(recording.ids) - 1):
        server, ask = await play(recording)
        server.script.faults[position] = Fault.RESET

        cut = (
            await ask(CHAT, return_token_ids=True) if recording is HERMES else await ask(CHAT)
        ).decode()
        events = [each.removeprefix("data: ") for each in cut.split("\n\n")[:-1]]
        whole = data_of(await ask(CHAT))

        expected = [n for n in recording.covered if n <= position]
        assert len(events) == len(expected)
        assert Answer.of(whole).parsed_calls() == recording.calls


@pytest.mark.parametrize("recording", [HERMES, QWEN])
async def test_a_stream_dies_behind_each_byte(play: Any, recording: Recording) -> None:
    """The client has exactly the bytes before the death, and the next stream is complete."""
    server, ask = await play(recording)
    server.bodies.clear()
    complete = await ask(CHAT)
    length = len(complete)

    for dies_at in (0, 1, 5, length // 3, length // 2, length - 1, length):
        server.dies_at_byte = dies_at
        server.bodies.clear()
        assert await ask(CHAT) == complete[:dies_at]
        assert server.dies_at_byte is None

    server.bodies.clear()
    assert await ask(CHAT) == complete


@pytest.mark.parametrize("recording", [HERMES, QWEN])
async def test_a_near_tie_changes_one_token_and_its_text(play: Any, recording: Recording) -> None:
    position = recording.texts.index(" tidy")
    _, ask = await play(recording, differs_at=position)

    chat = Answer.of(
        data_of(await ask(CHAT, **({"return_token_ids": True} if recording is HERMES else {})))
    )
    made = ids(
        data_of(
            await ask(
                COMPLETIONS, prompt=recording.prompt_ids, return_token_ids=True, max_tokens=999
            )
        )
    )

    assert chat.content == recording.content.replace(" tidy", OTHER_TEXT)
    assert chat.parsed_calls() == recording.calls
    assert made == [other_id() if at == position else one for at, one in enumerate(recording.ids)]
    if recording is HERMES:
        assert chat.ids == made


async def test_an_output_with_a_near_tie_is_continued(play: Any) -> None:
    """The server that did not differ continues what the other one has written."""
    _, ask = await play(HERMES)
    prompt = [*HERMES.prompt_ids, other_id(), *HERMES.ids[1:5]]

    events = data_of(await ask(COMPLETIONS, prompt=prompt, return_token_ids=True, max_tokens=999))

    assert ids(events) == HERMES.ids[5:]


async def test_prefill_of_a_chat_hands_over_the_recorded_prompt(play: Any) -> None:
    server, ask = await play(HERMES)
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}

    prefilled = json.loads(await ask(CHAT, stream=False, max_tokens=1, kv_transfer_params=transfer))
    pulled = {"kv_transfer_params": prefilled["kv_transfer_params"], "return_token_ids": True}
    events = data_of(await ask(CHAT, **pulled))

    assert prefilled["choices"][0]["prompt_token_ids"] == HERMES.prompt_ids
    assert Answer.of(events).ids == HERMES.ids
    assert isinstance(server, ScriptedVllm)
    assert (server.pulled, server.script.violations) == (1, [])


async def test_streams_wait_at_the_gate(play: Any) -> None:
    server, ask = await play(HERMES)
    server.script.gate, server.script.gate_at = asyncio.Event(), 3

    asked = asyncio.create_task(ask(CHAT, return_token_ids=True))
    await asyncio.sleep(0.1)
    assert not asked.done()
    server.script.gate.set()

    assert Answer.of(data_of(await asked)).ids == HERMES.ids


async def test_a_server_that_plays_a_thought_reports_its_reasoning_parser(play: Any) -> None:
    """A proxy renders the chats of servers without one itself."""
    server, _ = await play(SGLANG["sglang-thought-qwen3"])

    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{server.port}/server_info") as response,
    ):
        assert (await response.json())["reasoning_parser"] == "qwen3"
