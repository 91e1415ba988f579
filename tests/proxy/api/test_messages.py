"""The Messages API with the anthropic package, unmodified, as the client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from kvrs_testkit.plays import SCENARIOS
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Fault
from tests.proxy.conftest import ProxyClusterBuilder

KEYED = {"Idempotency-Key": "k"}


def client_of(system: ProxyCluster) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0)


@pytest.fixture
async def claude(system: ProxyCluster) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(system) as made:
        yield made


def asked(play: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": f"play {play}."}],
        "max_tokens": 90,
        "extra_body": {"temperature": 0},
    } | fields


def plain(message: anthropic.types.Message) -> dict[str, Any]:
    """Without the id, which differs from message to message."""
    return message.model_dump(exclude={"id": True, "content": {"__all__": {"parsed_output"}}})


@pytest.mark.parametrize(
    ("play", "fields", "ended"),
    [
        ("emoji", {}, ("end_turn", None)),
        ("latin", {"max_tokens": 12}, ("max_tokens", None)),
        ("stops", {"stop_sequences": ["STOP", "never"]}, ("stop_sequence", "STOP")),
    ],
)
async def test_a_message_streams_through_a_cut_as_it_is_whole(
    system: ProxyCluster,
    claude: anthropic.AsyncAnthropic,
    play: str,
    fields: dict[str, Any],
    ended: tuple[str, str | None],
) -> None:
    """The package's accumulation of events is the message of a calm request without a stream."""
    calm = await claude.messages.create(**asked(play, **fields))
    system.script.faults[6] = Fault.RESET

    async with claude.messages.stream(**asked(play, **fields)) as stream:
        began = await anext(aiter(stream))
        final = await stream.get_final_message()

    assert not system.script.faults
    assert plain(final) == plain(calm)
    assert (final.stop_reason, final.stop_sequence) == ended
    (block,) = final.content
    assert block.type == "text"
    assert SCENARIOS[play].startswith(block.text)
    assert began.type == "message_start"
    assert began.message.usage.input_tokens == calm.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_goes_on_without_a_thread(
    claude: anthropic.AsyncAnthropic, *, stream: bool
) -> None:
    """It asks the server to hold the conversation, and holds it itself where the refusal says why;
    had the field no effect, its second request would have the new messages alone.
    """

    @anthropic.beta_async_tool
    async def nothing() -> str:
        """Do nothing."""
        return ""

    runner = claude.beta.messages.tool_runner(**asked("latin"), tools=[nothing], stream=stream)
    final = await runner.until_done()

    (block,) = final.content
    assert block.type == "text"
    assert block.text == SCENARIOS["latin"]


async def test_a_resumed_message_has_each_event_once(system: ProxyCluster) -> None:
    """With a key every event has an id, and the rest after any of them comes again."""
    body = asked("emoji", stream=True, temperature=0)
    del body["extra_body"]

    async def events(headers: dict[str, str], status: int = 200) -> list[bytes]:
        async with system.http.post(
            system.url + "/v1/messages", json=body, headers=KEYED | headers
        ) as response:
            assert response.status == status
            return (await response.read()).split(b"\n\n")

    *whole, end = await events({})
    ids = [event.partition(b"\n")[0].removeprefix(b"id: ").decode() for event in whole]

    assert end == b""
    assert [int(name.partition(":")[2]) for name in ids] == list(range(len(ids)))
    for number, name in enumerate(ids[:-1]):
        assert (await events({"Last-Event-ID": name}))[:-1] == whole[number + 1 :]
    await events({"Last-Event-ID": ids[0], "X-Api-Key": "of another client"}, status=404)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, KEYED], ids=["plain", "keyed"])
async def test_a_message_has_the_head_of_an_inexact_chat(
    build: ProxyClusterBuilder, headers: dict[str, str], stream: bool
) -> None:
    """It is continued as the chat is."""

    def prepare(instances: Any) -> None:
        for instance in instances.values():
            instance.capabilities = []

    system = await build(pairs=1, prepare=prepare)
    body = asked("latin", stream=stream, presence_penalty=0.5)
    del body["extra_body"]
    async with system.http.post(
        system.url + "/v1/messages", json=body, headers=headers
    ) as response:
        await response.read()

    assert response.headers["X-Kvrs-Exact"] == "no"
    assert "presence_penalty" in response.headers["X-Kvrs-Inexact"]


async def test_a_message_that_waits_gets_pings(build: ProxyClusterBuilder) -> None:
    """Between whole events, which stay those of a calm message."""
    system = await build(pairs=1, proxy={"token_gap_s": 3600.0})
    system.script.gate, system.script.gate_at = asyncio.Event(), 4
    body = asked("latin", stream=True)["messages"]
    async with system.http.post(
        system.url + "/v1/messages",
        json={"messages": body, "max_tokens": 90, "temperature": 0, "stream": True},
    ) as response:
        found = [await response.content.readuntil(b"\n\n")]
        while found[-1] != b'event: ping\ndata: {"type":"ping"}\n\n':
            found.append(await response.content.readuntil(b"\n\n"))
        system.script.gate.set()
        rest = await response.read()

    said = [
        json.loads(frame.partition(b"data: ")[2])
        for frame in b"".join([*found[:-1], rest]).split(b"\n\n")[:-1]
    ]
    deltas = [event["delta"]["text"] for event in said if event["type"] == "content_block_delta"]
    assert "".join(deltas) == SCENARIOS["latin"]
    assert said[-1] == {"type": "message_stop"}


async def test_reasoning_that_an_engine_parses_is_thinking(build: ProxyClusterBuilder) -> None:
    """Streamed and whole; the first token is a marker, which its parser leaves out."""

    def prepare(instances: Any) -> None:
        for instance in instances.values():
            instance.capabilities, instance.parses = [], True

    system = await build(pairs=1, prepare=prepare)
    async with client_of(system) as claude:
        whole = await claude.messages.create(**asked("latin"))
        async with claude.messages.stream(**asked("latin")) as stream:
            streamed = await stream.get_final_message()

    for message in (whole, streamed):
        (block,) = message.model_dump()["content"]
        text = SCENARIOS["latin"].removeprefix("Où")
        assert (block["type"], block["thinking"]) == ("thinking", text)


async def test_errors_are_those_of_the_package(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Anthropic's types and statuses; a full proxy is overloaded."""
    system = await build(pairs=1, proxy={"max_streams": 1})
    async with client_of(system) as claude:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await claude.messages.create(**asked("latin") | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError) as wrong:
            await claude.messages.create(**asked("latin"), container="c")
        with pytest.raises(anthropic.NotFoundError) as nowhere:
            await claude.messages.batches.list()
        system.script.gate = asyncio.Event()
        first = asyncio.create_task(claude.messages.create(**asked("latin")))
        await system.until_streams_hold(0)
        with pytest.raises(anthropic.APIStatusError) as full:
            await claude.messages.create(**asked("latin"))
        system.script.gate.set()
        await first

    types = [found.value.body["error"]["type"] for found in (unknown, wrong, nowhere, full)]  # type: ignore[index]
    overloaded, refused = "overloaded_error", "invalid_request_error"
    assert types == ["not_found_error", refused, "not_found_error", overloaded]
    assert "container" in wrong.value.message
    assert full.value.status_code == 529
    assert "Retry-After" in full.value.response.headers
    assert await system.count("kvrs_http_responses_total", path="/v1/messages", code="529") == 1


async def test_a_message_that_cannot_go_on_ends_with_an_error(
    build: ProxyClusterBuilder,
) -> None:
    """An event of the type `error`, and no `message_stop`."""
    system = await build(pairs=1, policy={"recovery": {"max_attempts": 1}})
    system.script.faults[6] = Fault.RESET
    async with client_of(system) as claude, claude.messages.stream(**asked("latin")) as stream:
        with pytest.raises(anthropic.APIStatusError) as failed:
            await stream.until_done()
        snapshot = stream.current_message_snapshot

    assert failed.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert snapshot.content
    assert snapshot.stop_reason is None


async def test_tokens_are_counted_as_a_message_counts_them(
    claude: anthropic.AsyncAnthropic,
) -> None:
    request = asked("emoji", system="Be brief.")
    message = await claude.messages.create(**request)
    del request["max_tokens"], request["extra_body"]

    count = await claude.messages.count_tokens(**request)

    assert count.input_tokens == message.usage.input_tokens
