"""Features of the API that are the proxy's own work: choices, echo, the form of whole answers, what
is refused or marked.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs.ids import StreamId
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest, packed
from kvrs.proxy.streams.continuation import Continuation
from kvrs.proxy.streams.whole_answers import WholeClient
from kvrs.proxy.wire.exactness import inexact_features
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CHAT as CHAT_ENDPOINT
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs_testkit.plays import SCENARIOS
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Cut, Fault, Scripted
from kvrs_testkit.scripted_model import vocabulary
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "play latin."}],
    "temperature": 0,
    "max_tokens": 50,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def plain(instances: dict[str, Scripted]) -> None:
    for instance in instances.values():
        instance.capabilities = []


async def whole(system: ProxyCluster, **fields: Any) -> Any:
    status, body = await system.complete(**fields)
    assert status == 200, body
    return msgspec.json.decode(body)


async def events(system: ProxyCluster, **fields: Any) -> list[Any]:
    status, body = await system.complete(**fields, stream=True)
    assert status == 200, body
    *payloads, end, nothing = events_of(body)
    assert (end, nothing) == (b"data: [DONE]", b"")
    return [msgspec.json.decode(payload[6:]) for payload in payloads]


# Requests that engines receive.


async def test_a_client_s_fields_are_forwarded_as_they_came(build: ProxyClusterBuilder) -> None:
    """Byte for byte; those of the proxy's own work, and those that mean nothing to an engine, are
    not forwarded.
    """
    system = await build(pairs=1)
    request = CHAT | {
        "chat_template_kwargs": {"é": 1.50},
        "user": "u",
        "n": 2,
        "seed": 7,
        "temperature": 0.5,
        "metadata": {"some": "field"},
        "top_p": None,
    }

    await whole(system, **request)

    prefill, decode = system.instances["p0"].bodies[0], system.instances["d0"].bodies[0]
    for body in (prefill, decode):
        for name in ("messages", "chat_template_kwargs", "user"):
            assert body[name] == request[name]
        assert not {"n", "metadata"} & body.keys()
        assert "top_p" not in body
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert (decode["max_tokens"], decode["stream"], decode["temperature"]) == (50, True, 0.5)


async def test_a_chat_s_template_is_rendered_once(build: ProxyClusterBuilder) -> None:
    """The first prefill reads the messages; every later call carries the history as ids."""
    system = await build()
    system.script.cuts["cut"] = Cut(Fault.RESET, 4)

    await whole(system, **CHAT, user="cut")

    calls = [
        c for i in system.instances.values() for c in i.completions if isinstance(c, ChatRequest)
    ]
    calls.sort(key=lambda call: (call.kvrs.attempt if call.kvrs else 0, call.stream))
    histories = [call.kvrs.token_ids for call in calls if call.kvrs]
    prompt = list(b"user: play latin.\n")
    assert histories[0] is None
    assert histories[1] == prompt
    assert all(
        history == prompt + vocabulary().spell("latin", SCENARIOS["latin"])[:3]
        for history in histories[2:]
    )
    assert len(histories) >= 3


# Several choices.


async def test_every_choice_has_its_own_seed_and_stream(build: ProxyClusterBuilder) -> None:
    """Choice i samples with seed + i, on an engine that sees one choice."""
    system = await build()

    answer = await whole(
        system,
        prompt=[1, 2],
        max_tokens=6,
        temperature=1.0,
        n=3,
        seed=(1 << 63) - 2,
        return_token_ids=True,
    )

    completions = [c for name in ("d0", "d1") for c in system.instances[name].completions]
    assert sorted(c.seed for c in completions if c.seed is not None) == [
        -(1 << 63),
        (1 << 63) - 2,
        (1 << 63) - 1,
    ]
    assert len({c.kvrs.stream for c in completions if c.kvrs}) == 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 18, "total_tokens": 20}


async def test_choices_share_one_head_one_usage_and_one_end(build: ProxyClusterBuilder) -> None:
    """The choices look like those of one engine; each finishes once."""
    system = await build()

    chunks = await events(system, **CHAT, n=3, stream_options={"include_usage": True})

    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert sum("usage" in chunk for chunk in chunks) == 1
    per_choice = [
        [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        for index in range(3)
    ]
    for choices in per_choice:
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
        assert [c["delta"]["role"] for c in choices if "role" in c["delta"]] == ["assistant"]
        assert "".join(c["delta"].get("content", "") for c in choices) == SCENARIOS["latin"]


async def test_one_choice_that_fails_ends_the_response(build: ProxyClusterBuilder) -> None:
    """Half an answer is an error; the other choices are not left running."""
    system = await build(policy={"recovery": {"max_attempts": 1}})
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    task = asyncio.create_task(
        system.complete(prompt=[1], max_tokens=9, temperature=0, n=3, seed=1, stream=True)
    )
    await system.until_streams_hold(3, count=3)
    victim = next(s for s in (await system.state())["streams"])

    await system.instances[victim["decode"]].kill()

    status, body = await task
    assert status == 200
    assert b'"code":"retries"' in events_of(body)[-2]
    assert b"[DONE]" not in body
    assert (await system.state())["streams"] == []


async def test_choices_count_as_streams(build: ProxyClusterBuilder) -> None:
    """`proxy.max_streams` bounds what engines run."""
    system = await build(pairs=1, proxy={"max_streams": 2})

    status, _ = await system.complete(prompt="a", n=3, temperature=0)

    assert status == 503


# Echo.


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_sends_the_prompt_s_text_first(
    build: ProxyClusterBuilder, model: str, stream: bool
) -> None:
    """A prompt of ids is turned into text by the model's tokenizer."""
    system = await build(pairs=1, model=model)
    known = vocabulary()
    ids = known.spell("emoji", SCENARIOS["emoji"])[:-1]

    for prompt, text in (("play cjk.", "play cjk."), (ids, SCENARIOS["emoji"])):
        request: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "echo": True,
        }
        chunks = await events(system, **request) if stream else [await whole(system, **request)]
        without = await whole(system, **request | {"echo": False})

        assert (
            "".join(chunk["choices"][0]["text"] for chunk in chunks)
            == text + without["choices"][0]["text"]
        )


async def test_echo_of_ids_without_a_tokenizer_is_refused(build: ProxyClusterBuilder) -> None:
    """400, with what is missing."""
    system = await build(pairs=1)

    status, body = await system.complete(prompt=[1], echo=True)

    assert status == 400
    assert b"cluster.model" in body


# Whole answers.


async def test_a_whole_chat_gathers_all_parts_of_the_message(build: ProxyClusterBuilder) -> None:
    """Content, ids and log probabilities, as the engine's own whole answers have them; through a
    cut.
    """
    system = await build()
    system.script.cuts["cut"] = Cut(Fault.ERROR, 9)
    messages = [{"role": "user", "content": "play latin."}]

    answer = await whole(
        system, **CHAT | {"messages": messages}, logprobs=True, return_token_ids=True, user="cut"
    )

    assert not system.script.cuts
    assert answer["object"] == "chat.completion"
    assert answer["prompt_token_ids"] == list(b"user: play latin.\n")
    (choice,) = answer["choices"]
    assert choice["message"] == {"content": SCENARIOS["latin"], "role": "assistant"}
    assert choice["token_ids"] == vocabulary().spell("latin", SCENARIOS["latin"])
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"t{i}" for i in choice["token_ids"]
    ]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


async def test_calls_that_come_in_pieces_are_put_together() -> None:
    """Some engines send the arguments of a call in pieces; the index identifies the call. Reasoning
    comes before.
    """
    client = WholeClient()
    pieces: list[dict[str, Any]] = [
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x"'}},
        {"index": 1, "function": {"arguments": "{}"}},
        {"index": 0, "function": {"arguments": ":1}"}},
    ]
    for delta in ({"reasoning_content": "é?"}, *({"tool_calls": [piece]} for piece in pieces)):
        client.send([msgspec.json.encode({"choices": [{"delta": delta, "token_ids": [1]}]})])

    parsed = read(CHAT_ENDPOINT, msgspec.json.encode(CHAT))
    message = client.choice(Journal(StreamId("1"), parsed, arrived_s=0.0, prompt_ids=[1]), 0, None)[
        "message"
    ]

    assert (message["content"], message["reasoning_content"]) == (None, "é?")
    assert [(call["id"], call["function"]) for call in message["tool_calls"]] == [
        ("a", {"name": "f", "arguments": '{"x":1}'}),
        ("b", {"name": "g", "arguments": "{}"}),
    ]


# Plain engines.


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": "a", "temperature": 0.5}, "temperature"),
        (CHAT | {"logprobs": True}, "logprobs"),
        ({"prompt": "a", "temperature": 0, "presence_penalty": 1.0}, "presence_penalty"),
        ({"prompt": "a", "temperature": 0, "stop": ["x"], "min_tokens": 3}, "min_tokens"),
        (CHAT | {"tools": TOOLS}, "tools"),
    ],
)
async def test_what_a_plain_engine_cannot_continue_is_refused_or_marked(
    build: ProxyClusterBuilder, model: str, fields: dict[str, Any], name: str
) -> None:
    """`proxy.inexact` decides which; never silently."""
    refusing = await build(pairs=1, proxy={"inexact": "refuse"}, prepare=plain, model=model)
    marking = await build(pairs=1, proxy={"inexact": "mark"}, prepare=plain, model=model)

    status, body = await refusing.complete(**fields)
    assert status == 400
    assert msgspec.json.decode(body)["error"]["param"] == name
    assert not refusing.instances["p0"].completions

    for stream in (False, True):
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        async with marking.http.post(
            marking.url + path, json=fields | {"stream": stream}
        ) as response:
            assert response.status == 200
            assert response.headers["x-kvrs-exact"] == "no"


async def test_a_marked_stream_is_shown_as_such(build: ProxyClusterBuilder, model: str) -> None:
    """In the state too, by the names of what is inexact; and it goes on after a cut."""
    system = await build(prepare=plain, model=model)
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    system.script.cuts["cut"] = Cut(Fault.RESET, 5)
    task = asyncio.create_task(
        system.complete(prompt=[3], max_tokens=8, temperature=1.0, frequency_penalty=1, user="cut")
    )
    await system.until_streams_hold(3)

    (shown,) = (await system.state())["streams"]
    system.script.gate.set()
    status, body = await task

    assert (shown["exact"], shown["inexact"]) == (False, ["temperature", "frequency_penalty"])
    assert status == 200
    assert msgspec.json.decode(body)["usage"]["completion_tokens"] == 8
    assert not system.script.cuts


async def test_exact_engines_are_never_marked(build: ProxyClusterBuilder) -> None:
    """They continue everything."""
    system = await build(pairs=1)

    async with system.http.post(
        f"{system.url}/v1/completions", json={"prompt": "a", "logprobs": 1}
    ) as response:
        assert response.status == 200
        assert "x-kvrs-exact" not in response.headers


@pytest.mark.parametrize("inexact", ["refuse", "mark"])
async def test_reasoning_that_a_plain_engine_split_off_is_not_continued_as_if_it_were_text(
    build: ProxyClusterBuilder, model: str, inexact: str
) -> None:
    """It shows only while the stream runs, whose head had no mark: then a cut ends it with an
    error.
    """

    def prepare(instances: dict[str, Scripted]) -> None:
        plain(instances)
        for instance in instances.values():
            instance.parses = True

    system = await build(prepare=prepare, model=model, proxy={"inexact": inexact})
    system.script.cuts["cut"] = Cut(Fault.RESET, 8)
    messages = [{"role": "user", "content": "play thought."}]

    status, body = await system.complete(**CHAT | {"messages": messages}, stream=True, user="cut")

    assert status == 200
    assert b'"reasoning_content":' in body
    assert b'"code":"inexact"' in body
    assert not body.endswith(b"data: [DONE]\n\n")


def test_a_continuation_begins_where_the_client_s_text_ends() -> None:
    """Other engines hold back more, or less, than the proxy's own text machine."""
    known = vocabulary()
    text = SCENARIOS["stops"]
    ids = known.spell("stops", text)
    parsed = read(
        COMPLETIONS,
        msgspec.json.encode(
            {"prompt": [1], "max_tokens": 50, "stop": ["STOP f"], "temperature": 0}
        ),
    )
    expected = text[: text.index("STOP f")]

    for cut in range(1, len(ids) - 2):
        complete = len(known.tokenizer.decode(ids[:cut]))
        for sent in range(max(0, complete - 6), complete + 1):
            if sent > len(expected):
                continue  # No engine shows a part of a stop string that completes.
            journal = Journal(
                StreamId("1"),
                parsed,
                arrived_s=0.0,
                prompt_ids=[1],
                output_ids=packed(ids[:cut]),
                text_sent=sent,
            )
            continuation = Continuation(journal, known.tokenizer)
            pieces = [continuation.take([token_id], None, None) for token_id in ids[cut:-2]]

            ending = next(
                number for number, piece in enumerate(pieces) if piece.finish_reason is not None
            )
            assert (
                expected[:sent] + "".join(piece.delta.text for piece in pieces[: ending + 1])
                == expected
            )
            assert (pieces[ending].finish_reason, pieces[ending].stop_reason) == ("stop", "STOP f")


def test_foreign_text_before_the_cut_costs_none_of_the_output() -> None:
    """vLLM shows the whole prompt where that ends within a character: what was counted then is no
    measure of what is sent.
    """
    known = vocabulary()
    text = SCENARIOS["latin"]
    ids = known.spell("latin", text)
    parsed = read(
        COMPLETIONS, msgspec.json.encode({"prompt": [1], "max_tokens": 500, "temperature": 0})
    )
    journal = Journal(
        StreamId("1"),
        parsed,
        arrived_s=0.0,
        prompt_ids=[1],
        output_ids=packed(ids[:3]),
        text_sent=200,
    )
    continuation = Continuation(journal, known.tokenizer)

    pieces = [continuation.take([token_id], None, None) for token_id in ids[3:-1]]

    assert known.tokenizer.decode(ids[:3]) + "".join(piece.delta.text for piece in pieces) == text


def test_chats_and_completions_are_parsed_by_their_endpoint() -> None:
    """One path, one form."""
    parsed = read(
        COMPLETIONS,
        b'{"prompt":"a","kvrs":{"stream":"x","attempt":1,"prompt_tokens":1},"k\\u0076rs":null,"n":1}',
    )

    assert isinstance(parsed.request, CompletionRequest)
    assert {name: bytes(value) for name, value in parsed.fields.items()} == {
        "prompt": b'"a"',
        "n": b"1",
    }


@pytest.mark.parametrize(
    ("content", "inexact"),
    [
        ("hello", ()),
        (None, ()),
        (["hello", {"text": "x"}, {"type": "text", "text": "hello"}], ()),
        (
            [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": "data:,"}},
            ],
            ("messages",),
        ),
    ],
)
def test_a_picture_cannot_be_continued_from_ids(content: Any, inexact: tuple[str, ...]) -> None:
    """After a cut a plain engine gets the chat as ids, in which only the picture's place is
    left.
    """
    parsed = read(
        CHAT_ENDPOINT,
        msgspec.json.encode({"messages": [{"role": "user", "content": content}], "temperature": 0}),
    )

    assert inexact_features(parsed, has_tokenizer=True) == inexact


@pytest.mark.parametrize("number", ["1e400", "1" * 5000])
def test_a_message_that_cannot_be_decoded_may_hold_a_picture(number: str) -> None:
    """Engines read numbers that are out of range here."""
    part = f'{{"type": "text", "text": "a", "x": {number}}}'
    body = f'{{"messages": [{{"role": "user", "content": [{part}]}}], "temperature": 0}}'
    parsed = read(CHAT_ENDPOINT, body.encode())

    assert inexact_features(parsed, has_tokenizer=True) == ("messages",)
