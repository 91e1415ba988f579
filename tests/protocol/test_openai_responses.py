"""Events of responses as a function of the events of their chats."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import RequestError
from kvrs.protocol.openai.responses import (
    Stored,
    Tokens,
    Translator,
    encoded,
    parse_response_request,
)
from kvrs.protocol.openai.translated import Event

TEXT = "a text that is in no error"
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
STORED = Stored("resp_" + "a" * 48, 7, b'{"input":"hi"}')

# Chats with a call that is not complete, or whose pieces are not together.
BROKEN_CALLS: list[list[tuple[str | int, str]]] = [
    [(0, '{"private":')],
    [(0, "[1]")],
    [(0, "null")],
    [(0, '{"private":'), ("content", "a")],
    [(0, '{"private":'), (1, "{}")],
    [(0, "{}"), (1, "{}"), (0, "private")],
]
ADDED, DONE = "response.output_item.added", "response.output_item.done"
ARGUMENTS_DONE = "response.function_call_arguments.done"
# Parts of a chat: a text, a reasoning, or the arguments of a call.
_parts = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["content", "reasoning_content"]), st.text(max_size=3)),
        st.dictionaries(st.text(max_size=2), st.integers() | st.text(max_size=3), max_size=2),
    ),
    max_size=6,
)


@st.composite
def _chats(draw: st.DrawFn) -> list[tuple[str | int, str]]:
    """The pieces that the events of a chat add: text, reasoning, or a part of the arguments of a
    call, by its index.
    """
    pieces: list[tuple[str | int, str]] = []
    calls = 0
    for part in draw(_parts):
        if not isinstance(part, dict):
            pieces.append(part)
            continue
        arguments = msgspec.json.encode(part).decode()
        cut = draw(st.integers(0, len(arguments)))
        pieces += [(calls, arguments[:cut]), (calls, arguments[cut:])]
        calls += 1
    return pieces


chats = _chats()


def chat_events(pieces: list[tuple[str | int, str]], finish: str | None = "stop") -> list[bytes]:
    events: list[Any] = [{"role": "assistant", "content": ""}]
    for where, text in pieces:
        if isinstance(where, str):
            events.append({where: text})
        else:
            function = {"name": f"f{where}", "arguments": text}
            events.append(
                {"tool_calls": [{"index": where, "id": f"c{where}", "function": function}]}
            )
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in events]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return [msgspec.json.encode(chunk) for chunk in chunks]


def events_of(chunks: list[bytes]) -> list[Event]:
    made = Translator(STORED, parse_response_request(STORED.body), "m")
    events = made.begin()
    for chunk in chunks:
        events += made.take(chunk)
    return [*events, *made.end(Tokens(3, 4, 2))]


def sent(events: list[Event], after: int) -> bytes:
    written: list[bytes] = []
    encoded(events, after, written.append)
    return b"".join(written)


@given(chats)
def test_numbers_have_no_gap_and_what_is_left_out_is_what_the_client_has(
    pieces: list[tuple[str | int, str]],
) -> None:
    """Each number continues the stream exactly."""
    events = events_of(chat_events(pieces))
    frames = [sent([event], -1) for event in events]

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for after in range(-1, len(events)):
        assert sent(events_of(chat_events(pieces)), after) == b"".join(frames[after + 1 :])


@given(chats)
def test_deltas_add_up_to_the_items_of_the_response(pieces: list[tuple[str | int, str]]) -> None:
    """Every item is added once and done once, in order, with all of its text."""
    events = events_of(chat_events(pieces))
    *_, last = events

    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    output = last["response"]["output"]
    added = [e["item"]["id"] for e in events if e["type"] == ADDED]
    done = [e["item"] for e in events if e["type"] == DONE]
    assert done == output
    assert added == [item["id"] for item in output]
    for item in output:
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert text == texts.get(item["id"], "")
        assert item["status"] == "completed"
    said = "".join(text for where, text in pieces if where == "content")
    messages = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert "".join(messages) == said


def test_an_error_is_the_end_of_a_response() -> None:
    """One of the code `cancelled` is its client's wish."""
    text = chat_events([("content", "a")])[:2]
    failed = msgspec.json.encode({"error": {"message": "no", "code": "retries"}})
    cancelled = msgspec.json.encode({"error": {"message": "x", "code": "cancelled"}})

    ends = [events_of([*text, error])[-1] for error in (failed, cancelled)]

    assert [end["type"] for end in ends] == ["response.failed", "response.incomplete"]
    assert [end["response"]["status"] for end in ends] == ["failed", "cancelled"]
    assert ends[0]["response"]["error"] == {"code": "server_error", "message": "no"}
    assert ends[1]["response"]["error"] is None


@pytest.mark.parametrize("open_part", [(0, '{"q":'), ("content", "a"), ("reasoning_content", "a")])
def test_an_item_that_is_open_at_a_failure_is_incomplete(open_part: tuple[str | int, str]) -> None:
    """It is never done, and those before it stay completed."""
    chunks = chat_events([(1, "{}"), open_part])[:-1]
    failed = msgspec.json.encode({"error": {"message": "no", "code": "retries"}})

    *events, last = events_of([*chunks, failed])

    (first,) = [event["item"]["id"] for event in events if event["type"] == DONE]
    output = last["response"]["output"]
    assert last["type"] == "response.failed"
    assert output[0]["id"] == first
    assert [item["status"] for item in output] == ["completed", "incomplete"]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("length", "max_output_tokens"), ("content_filter", "content_filter")],
)
def test_a_call_that_a_limit_cuts_is_incomplete(finish: str, reason: str) -> None:
    """Its arguments are not done, and no client runs it."""
    *events, last = events_of(chat_events([(0, '{"q":')], finish))

    (done,) = [event["item"] for event in events if event["type"] == DONE]
    assert ARGUMENTS_DONE not in [event["type"] for event in events]
    assert done["status"] == "incomplete"
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": reason}
    assert last["response"]["output"] == [done]


def test_a_call_without_a_name_fails_the_response() -> None:
    """No client could run it."""
    call = {"index": 0, "id": "c", "function": {"name": None, "arguments": "{}"}}
    choice = {"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}

    last = events_of([msgspec.json.encode({"choices": [choice]})])[-1]

    assert last["type"] == "response.failed"
    assert "name" in last["response"]["error"]["message"]


@pytest.mark.parametrize("pieces", BROKEN_CALLS)
def test_a_call_that_is_not_complete_fails_the_response(
    pieces: list[tuple[str | int, str]],
) -> None:
    """The same is true if the chat ends, another item begins, or a piece comes too late."""
    *events, last = events_of(chat_events(pieces))

    done = [event["item"] for event in events if event["type"] == DONE]
    assert last["type"] == "response.failed"
    assert all(item["status"] == "completed" for item in done)
    assert all(json.loads(item["arguments"]) == {} for item in done if "arguments" in item)
    assert "private" not in last["response"]["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b"\xff",
        b'{"input": 3}',
        b'{"input": ["a"]}',
        b'{"input": "a", "stream": 1}',
        b'{"input": "a", "instructions": 1}',
        b'{"input": "a", "instructions": []}',
        b'{"input": "a", "top_logprobs": false}',
        b'{"input": "a", "tools": {}}',
        b'{"input": "a", "tools": [1]}',
        b'{"input": "a", "reasoning": 1}',
        b'{"input": "a", "reasoning": {"summary": "auto"}}',
        b'{"input": "a", "text": {"format": {"type": "grammar"}}}',
        b'{"input": [{"role": "tool", "content": "a"}]}',
        b'{"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}',
    ],
)
def test_a_request_that_is_wrong_is_refused(body: bytes) -> None:
    """With an error of the request, whatever it holds."""
    with pytest.raises(RequestError):
        parse_response_request(body)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": [TEXT]}, "input[0]: a string is"),
        ({}, "input is missing; allowed: a string or a list of items"),
        ({"input": []}, "input: an empty list is not supported; allowed: a string or"),
        ({"input": {"a": TEXT}}, "input: an object is"),
        ({"input": [{"role": "user", "content": [TEXT]}]}, "input[0].content: a string is"),
        ({"input": [{"role": "user", "content": {"a": TEXT}}]}, "input[0].content: an object is"),
        ({"input": [{"role": TEXT, "content": "a"}]}, "input[0].role: a string is"),
        ({"input": [{"type": "image"}]}, 'input[0].type="image" is'),
        ({"input": [CALL | {"arguments": {"a": TEXT}}]}, "input[0].arguments: an object is"),
        ({"input": "a", "instructions": [TEXT]}, "instructions: a list is"),
        ({"input": "a", "tools": [TEXT]}, "tools[0]: a string is"),
        ({"input": "a", "stream": 3}, "stream=3 is"),
    ],
)
def test_an_error_names_the_place_and_shows_no_private_value(fields: Any, says: str) -> None:
    """Clients log errors; words of the API are shown."""
    with pytest.raises(RequestError) as refused:
        parse_response_request(msgspec.json.encode(fields))

    assert str(refused.value).startswith(says)
    assert TEXT not in str(refused.value)


def test_what_is_allowed_is_said_in_words_of_json() -> None:
    """Clients know null, and no None."""
    body = b'{"input":"hi","previous_response_id":"resp_1"}'

    with pytest.raises(RequestError, match=r"is not supported; allowed: null$"):
        parse_response_request(body)
