"""Translators of chats, fed with pieces of any form: they never raise, and never end as complete
what is not.
"""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import UndecodableError
from kvrs.protocol.anthropic import MessageTranslator, message_of
from kvrs.protocol.openai import translated
from kvrs.protocol.openai.responses import Tokens, Translator, parse_response_request
from kvrs.protocol.openai.translated import CallLog, Event
from tests.protocol.test_openai_responses import DONE, STORED

HEAD = b'{"id":"chatcmpl-7","created":1,"model":"m"'
FAILED = msgspec.json.encode(
    {"error": {"message": "no", "type": "server_error", "code": "retries"}}
)

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
_text = st.none() | st.text(max_size=3)
_arguments = st.sampled_from(["", "{}", "{", "}", '{"q":', "1}", "[1]", "null"])


def _fields(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: one | _json for name, one in values.items()})


_functions = _fields(name=st.just("f"), arguments=_arguments)
_good_calls = st.fixed_dictionaries(
    {
        "index": st.integers(0, 2),
        "function": st.fixed_dictionaries({"name": st.just("f"), "arguments": _arguments}),
    }
)
_calls = _good_calls | _fields(index=st.integers(0, 2), id=_text, type=_text, function=_functions)
_deltas = _fields(
    content=_text, reasoning=_text, reasoning_content=_text, tool_calls=st.lists(_calls, max_size=2)
)
_good_deltas = st.fixed_dictionaries(
    {}, optional={"content": _text, "tool_calls": st.lists(_good_calls, max_size=2)}
)
_finishes = st.sampled_from([None, None, None, "stop", "tool_calls", "length", "content_filter"])
_choices = st.fixed_dictionaries(
    {"delta": _good_deltas | _deltas, "finish_reason": _finishes},
    optional={"stop_reason": _json, "logprobs": _json},
)
_chunks = st.fixed_dictionaries({"choices": st.lists(_choices, max_size=2)})
streams = st.lists(
    _chunks.map(msgspec.json.encode)
    | _fields(choices=_json, usage=_json, error=_json).map(msgspec.json.encode)
    | st.binary(max_size=9),
    max_size=6,
)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False


def message_events(stream: list[bytes]) -> list[Event]:
    """The events that a client gets: all until an error, a fault or the end."""
    made = MessageTranslator()
    events = made.begin(HEAD, 3)
    for data in stream:
        events += made.take(data)
        if made.fault is not None or events[-1]["type"] == "error":
            break
    return events if events[-1]["type"] == "error" else [*events, *made.end()]


@given(streams)
def test_a_message_ends_explicitly_whatever_the_pieces_are(stream: list[bytes]) -> None:
    """A closed call is complete unless a limit cut it; an error leaves its block open."""
    events = message_events(stream)

    is_open, kinds = False, [event["type"] for event in events]
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            if event["content_block"]["type"] == "tool_use":
                arguments[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            assert is_open
            arguments[event["index"]] = arguments.get(event["index"], "") + event["delta"].get(
                "partial_json", "{}" if event["index"] not in arguments else ""
            )
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
    if kinds[-1] == "error":
        assert not {"message_delta", "message_stop"} & {*kinds}
        return
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert not is_open
    reason = events[-2]["delta"]["stop_reason"]
    uses = [e["index"] for e in events if e.get("content_block", {}).get("type") == "tool_use"]
    whole = [is_object(arguments[index]) for index in uses]
    assert all(whole[:-1] if reason in ("max_tokens", "refusal") else whole)
    assert reason != "tool_use" or whole


@given(streams, st.booleans())
def test_a_response_ends_explicitly_whatever_the_pieces_are(
    stream: list[bytes], fails: bool
) -> None:
    """A completed call has a JSON object; what is not done at a failure is incomplete; and the same
    pieces make the same events.
    """
    made = [Translator(STORED, parse_response_request(STORED.body), "m") for _ in range(2)]

    pieces = [*stream, *([FAILED] * fails)]
    events, again = (
        [
            *each.begin(),
            *(event for data in pieces for event in each.take(data)),
            *each.end(Tokens(3, 4, 2)),
        ]
        for each in made
    )

    assert events == again
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last, done = events[-1], [event["item"] for event in events if event["type"] == DONE]
    status, output = last["response"]["status"], last["response"]["output"]
    assert last["type"] == f"response.{status}"
    assert [item for item in output if item["status"] == "completed"] == [
        item for item in done if item["status"] == "completed"
    ]
    assert all(
        is_object(i["arguments"]) for i in done if i["status"] == "completed" and "name" in i
    )
    if status == "completed":
        assert output == done
    if made[0].fault is not None or fails:
        assert status == "failed"
        assert last["response"]["error"]["message"]


@given(st.binary(max_size=20) | _json.map(msgspec.json.encode) | _chunks.map(msgspec.json.encode))
def test_a_whole_answer_of_any_form_is_a_message_or_undecodable(body: bytes) -> None:
    """No other error comes out."""
    with suppress(UndecodableError):
        assert json.loads(message_of(body))["type"] == "message"


def test_an_event_without_id_and_model_is_a_fault() -> None:
    """The message then has no beginning, and its end is an error."""
    made = MessageTranslator()

    assert made.begin(b'{"id":7', 3) == []
    (error,) = made.end()
    assert error["error"]["type"] == "api_error"


NULLS: list[Any] = [
    {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}},
    {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": '{"q":'}},
    {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": None}},
    {"index": 0, "function": None},
    {"index": 0, "function": {"arguments": "1}"}},
]


def test_later_pieces_of_a_call_may_have_nulls() -> None:
    """Id, type, name, arguments and function, as SGLang and vLLM send them."""
    log = CallLog()

    for piece in NULLS:
        call, _ = log.take(msgspec.Raw(msgspec.json.encode(piece)))

    assert (call.id, call.type, call.name, call.arguments) == ("c", "function", "f", '{"q":1}')


def test_an_empty_piece_of_a_closed_call_adds_nothing() -> None:
    """vLLM sends such a piece with the finish reason."""
    late = {"index": 0, "id": None, "function": {"name": None, "arguments": ""}}
    deltas = [{"tool_calls": NULLS}, {"content": "a"}, {"tool_calls": [late]}]
    finish = {"delta": {}, "finish_reason": "tool_calls"}
    stream = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": [finish]}]

    events = message_events([msgspec.json.encode(chunk) for chunk in stream])

    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("is_apart", [True, False])
def test_text_within_a_call_follows_the_call(is_apart: bool) -> None:
    """Parsers send the text between two calls with, or before, the first one's last piece."""
    begin, end = (
        {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": arguments}}]}
        for name, arguments in (("f", '{"q":'), (None, "1}"))
    )
    deltas = [begin, {"content": "a"}, end] if is_apart else [begin, {"content": "a"} | end]
    finish = {"delta": {}, "finish_reason": "tool_calls"}
    stream = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": [finish]}]
    data = [msgspec.json.encode(chunk) for chunk in stream]
    response = Translator(STORED, parse_response_request(STORED.body), "m")

    events = message_events(data)
    response.begin()
    items = [event["item"] for each in data for event in response.take(each) if "item" in event]
    items += [event["item"] for event in response.end(Tokens(3, 4, 2)) if "item" in event]

    begun = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert begun == ["tool_use", "text"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    done = [(item["type"], item["status"]) for item in items]
    assert done == [
        (kind, status)
        for kind in ("function_call", "message")
        for status in ("in_progress", "completed")
    ]


def test_a_call_without_a_name_is_a_fault() -> None:
    """No client could run it."""
    call = {"index": 0, "id": "c", "function": {"name": None, "arguments": "{}"}}
    choice = {"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}

    *_, last = message_events([msgspec.json.encode({"choices": [choice]})])

    assert last["type"] == "error"
    assert "name" in last["error"]["message"]


def test_the_arguments_of_a_stream_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all its calls together, closed ones too."""
    monkeypatch.setattr(translated, "_MOST_ARGUMENT_BYTES", 9)
    log = CallLog()
    piece = {"index": 0, "function": {"name": "f", "arguments": '"ää"'}}
    log.take(msgspec.Raw(msgspec.json.encode(piece)))

    with pytest.raises(UndecodableError, match="more than 9 bytes"):
        log.take(msgspec.Raw(msgspec.json.encode(piece | {"index": 1})))
