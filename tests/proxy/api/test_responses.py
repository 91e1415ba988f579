"""The Responses API with the openai package, unmodified, as the client."""

import asyncio
from typing import Any

import openai
import pytest

from kvrs_testkit.plays import SCENARIOS
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from kvrs_testkit.scripted import Fault
from tests.proxy.conftest import ProxyClusterBuilder

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def asked(play: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "input": f"play {play}.",
        "temperature": 0,
        "max_output_tokens": 90,
    } | fields


async def test_a_response_has_the_text_and_the_usage_of_its_chat(
    client: openai.AsyncOpenAI,
) -> None:
    """And is found again under its id."""
    chat = await client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "play emoji."}],
        temperature=0,
        max_completion_tokens=90,
    )

    response = await client.responses.create(**asked("emoji"))
    again = await client.responses.retrieve(response.id)

    assert response.status == "completed"
    assert response.output_text == SCENARIOS["emoji"] == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert again == response


async def test_events_are_numbered_without_a_gap_through_a_cut(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """The instance is lost in the middle; the package's accumulation has the whole text."""
    system.script.faults[6] = Fault.RESET

    async with client.responses.stream(**asked("emoji")) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    assert not system.script.faults
    numbers = [getattr(event, "sequence_number", None) for event in events]
    assert numbers == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert final.output_text == SCENARIOS["emoji"]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_response_has_the_same_items_however_it_is_read(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """The items of a response are the same streamed through a cut, whole and read again."""
    system.script.faults[9] = Fault.RESET
    streamed = [
        event
        async for event in await client.responses.create(
            **asked("latin", tools=[TOOL]), stream=True
        )
    ]
    whole = await client.responses.create(**asked("latin", tools=[TOOL]))

    last = streamed[-1]
    assert last.type == "response.completed"
    again = await client.responses.retrieve(last.response.id)
    responses: list[Any] = [whole, last.response, again]
    for response in responses:
        (message,) = response.output
        assert message.type == "message"
        assert response.output_text == SCENARIOS["latin"]


async def test_a_conversation_reaches_the_engine_as_messages(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """Instructions, roles, parts, calls and their outputs."""
    items: Any = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "rs_0", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c0", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c0", "output": "3"},
        {"role": "user", "content": "play latin."},
    ]

    await client.responses.create(
        **asked("latin", instructions="i", tools=[TOOL]) | {"input": items}
    )

    body = next(body for each in system.instances.values() for body in each.bodies if body)
    called = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert body["messages"] == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
        {"role": "user", "content": "play latin."},
    ]
    assert body["tools"][0]["function"]["name"] == "f"


async def test_a_response_in_the_background_is_polled_read_and_cancelled(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """It runs without a client; readers come and go; a cancelled one keeps what it had."""
    system.script.gate, system.script.gate_at = asyncio.Event(), 4
    first = await client.responses.create(**asked("emoji"), background=True)
    second = await client.responses.create(**asked("cjk"), background=True)
    await system.until_streams_hold(4, count=2)

    polled = await client.responses.retrieve(first.id)
    reader = await client.responses.retrieve(first.id, stream=True)
    seen = [await anext(reader) for _ in range(5)]
    await reader.close()
    cancelled = await client.responses.cancel(second.id)
    system.script.gate.set()
    rest = [
        event
        async for event in await client.responses.retrieve(
            first.id, stream=True, starting_after=seen[-1].sequence_number
        )
    ]

    assert first.status in ("queued", "in_progress")
    assert polled.status == "in_progress"
    assert SCENARIOS["emoji"].startswith(polled.output_text)
    assert polled.output_text
    numbers = [event.sequence_number for event in (*seen, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    assert (await client.responses.retrieve(first.id)).output_text == SCENARIOS["emoji"]
    assert cancelled.status == "cancelled"
    assert SCENARIOS["cjk"].startswith(cancelled.output_text)
    assert await client.responses.retrieve(second.id) == cancelled
    assert (await system.state())["streams"] == []


async def test_every_answer_has_the_head_of_an_inexact_chat(build: ProxyClusterBuilder) -> None:
    """Streamed, whole, in the background, and retrieved while the stream runs."""

    def prepare(instances: Any) -> None:
        for instance in instances.values():
            instance.capabilities = []

    system = await build(prepare=prepare)
    body = asked("latin", presence_penalty=0.5)

    async def head(method: str = "POST", path: str = "", **fields: Any) -> tuple[Any, Any]:
        """The heads of an answer, and the answer unless it is a stream."""
        url, json = f"{system.url}/v1/responses{path}", body | fields if not path else None
        async with system.http.request(method, url, json=json) as response:
            is_stream = response.content_type == "text/event-stream"
            found = {} if is_stream else await response.json()
            return [response.headers.get(f"X-Kvrs-{one}") for one in ("Exact", "Inexact")], found

    heads = [(await head())[0], (await head(stream=True))[0]]
    system.script.gate, system.script.gate_at = asyncio.Event(), 4
    background, begun = await head(background=True)
    await system.until_streams_hold(4)
    heads += [background, (await head("GET", f"/{begun['id']}"))[0]]
    heads.append((await head("GET", f"/{begun['id']}?stream=true"))[0])
    system.script.gate.set()

    assert heads == [["no", "presence_penalty, tokenizer"]] * 5


@pytest.mark.parametrize("retrieved", [False, True])
async def test_the_head_of_a_stream_is_a_promise(
    system: ProxyCluster, client: openai.AsyncOpenAI, retrieved: bool
) -> None:
    """Also that of a response that began without a stream, and not that of a whole answer."""
    system.script.gate, system.script.gate_at = asyncio.Event(), 4
    begun: Any = await client.responses.create(
        **asked("latin", background=retrieved), stream=not retrieved
    )
    await system.until_streams_hold(4)
    (live,) = system.proxy.parts.driver.streams.values()
    before = live.journal.exactness.is_promised
    if retrieved:
        begun = await client.responses.retrieve(begun.id, stream=True)
    await anext(begun)
    after = live.journal.exactness.is_promised
    system.script.gate.set()
    await begun.close()

    assert before is (None if retrieved else True)
    assert after is True


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_any_event_is_a_status(
    build: ProxyClusterBuilder, stream: bool
) -> None:
    """SDKs repeat it then; nothing is kept of a response whose id no client has."""
    system = await build(policy={"recovery": {"wait_s": 0.2, "role_wait_s": 0.2}})
    for name in ("d0", "d1"):
        if name in system.instances:
            await system.instances[name].kill()

    body = asked("latin") | {"stream": stream}
    async with system.http.post(f"{system.url}/v1/responses", json=body) as response:
        assert response.status in (502, 503), await response.read()

    assert not system.proxy.parts.mirror.streams


async def test_max_output_tokens_leave_an_incomplete_response(client: openai.AsyncOpenAI) -> None:
    """With the reason that OpenAI gives."""
    response = await client.responses.create(**asked("emoji", max_output_tokens=3))

    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


REFUSALS = (b'{"error": {"message": "no", "code": "bad"}}', b'{"error": {"message": "no"}}')


@pytest.mark.parametrize("refusal", REFUSALS, ids=["with a code", "without"])
async def test_a_failure_is_a_status_at_first_and_an_event_later(
    system: ProxyCluster, client: openai.AsyncOpenAI, refusal: bytes
) -> None:
    """In the background it is the status of the response."""
    for instance in system.instances.values():
        instance.refusal = (400, refusal)

    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**asked("latin"), stream=stream)
    begun = await client.responses.create(**asked("latin"), background=True)
    async with asyncio.timeout(WITHIN_S):
        while (found := await client.responses.retrieve(begun.id)).status != "failed":
            await asyncio.sleep(0.01)

    assert found.error is not None
    assert found.error.message == "no"


async def test_a_deleted_response_is_unknown(client: openai.AsyncOpenAI) -> None:
    """Responses that were not to be stored, and those that never were, are unknown too."""
    kept = await client.responses.create(**asked("latin"))
    unstored = await client.responses.create(**asked("latin"), store=False)

    await client.responses.delete(kept.id)

    for name in (kept.id, unstored.id, "resp_" + "0" * 48, "resp_x"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(name)


async def test_another_clients_response_is_unknown(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """It may be neither read, nor cancelled, nor deleted."""
    response = await client.responses.create(**asked("latin"))
    stranger = client.with_options(api_key="another")

    for call in (stranger.responses.retrieve, stranger.responses.cancel, stranger.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await call(response.id)

    assert (await client.responses.retrieve(response.id)).output_text == SCENARIOS["latin"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "store"),
        ({"temperature": 9.0}, "temperature"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
    ],
)
async def test_what_is_not_supported_is_refused_by_its_name(
    client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    """Nothing that would change the output is silently ignored."""
    with pytest.raises(openai.BadRequestError) as raised:
        await client.responses.create(**asked("latin") | fields)

    assert (raised.value.param or "").startswith(param)
