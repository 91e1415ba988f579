"""Events of responses as a function of the events of their chats."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import RequestError
from kvrs.protocol.openai.responses import (
    Event,
    Stored,
    Tokens,
    Translator,
    encoded,
    parse_response_request,
)

TEXT = "a text that is in no error"
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
STORED = Stored("resp_" + "a" * 48, 7, b'{"input":"hi"}')

# What each event of a chat adds: text, reasoning, or a piece of the arguments of a call.
chats = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["content", "reasoning_content"]), st.text(max_size=3)),
        st.tuples(st.integers(0, 2), st.text(max_size=3)),
    ),
    max_size=12,
)


def chat_events(pieces: list[tuple[str | int, str]]) -> list[bytes]:
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
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
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
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
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
