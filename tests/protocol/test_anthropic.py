"""Messages of Anthropic's API as a function of chats, checked by the types of its package."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from pydantic import TypeAdapter

from kvrs.errors import RequestError, UndecodableError
from kvrs.protocol.anthropic import (
    MessageTranslator,
    chat_of,
    count_of,
    error_of,
    message_of,
    prompt_of,
)
from kvrs.protocol.openai.translated import Event
from tests.protocol.test_openai_responses import BROKEN_CALLS, chat_events, chats

USER = {"role": "user", "content": "u"}
CALL = {"type": "tool_use", "id": "c0", "name": "f", "input": {"q": "é"}}
CHAT_CALL = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"q":"é"}'}}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}, "description": "d"},
}
HEAD = b'{"id":"chatcmpl-7","created":1,"model":"m"'

event_types: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def text_block(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def image(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


def translated(**fields: Any) -> dict[str, Any]:
    body = json.dumps({"max_tokens": 9, "messages": [USER]} | fields).encode()
    chat: dict[str, Any] = json.loads(chat_of(body))
    return chat


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], [USER]),
        (
            [{"role": "user", "content": [text_block("a"), text_block("b")]}],
            [{**USER, "content": "a\nb"}],
        ),
        (
            [{"role": "user", "content": [text_block("a"), image(type="url", url="http://x/y")]}],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": {"url": "http://x/y"}},
                    ],
                }
            ],
        ),
        (
            [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        text_block("a"),
                        CALL,
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c0",
                            "content": [
                                text_block("3"),
                                image(type="base64", media_type="image/png", data="AA=="),
                            ],
                        },
                        {"type": "tool_result", "tool_use_id": "c1"},
                    ],
                },
            ],
            [
                USER,
                {"role": "assistant", "content": "a", "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "c0", "content": "3"},
                {"role": "tool", "tool_call_id": "c1", "content": ""},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": "data:image/png;base64,AA=="},
                        }
                    ],
                },
            ],
        ),
        (
            [
                USER,
                {"role": "assistant", "content": [CALL]},
                {"role": "system", "content": "late"},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c0"}]},
            ],
            [
                {"role": "system", "content": "late"},
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "c0", "content": ""},
            ],
        ),
    ],
)
def test_turns_of_blocks_become_messages(messages: Any, expected: Any) -> None:
    """Results of tools are messages of their own, before all else of their turn."""
    assert translated(messages=messages)["messages"] == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"system": "i"}, {"messages": [{"role": "system", "content": "i"}, USER]}),
        (
            {
                "system": [
                    text_block("x-anthropic-billing-header: 7"),
                    text_block("i"),
                    text_block("j"),
                ]
            },
            {"messages": [{"role": "system", "content": "i\nj"}, USER]},
        ),
        ({"stop_sequences": ["a"], "top_k": 3}, {"stop": ["a"], "top_k": 3}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"stream": False, "metadata": {"user_id": "u"}, "service_tier": "auto"}, {}),
        ({"thinking": {"type": "adaptive"}, "container": None}, {}),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, {}),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        (
            {"tools": [TOOL | {"strict": True}]},
            {"tools": [CHAT_TOOL | {"function": CHAT_TOOL["function"] | {"strict": True}}]},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any"}},
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
        (
            {
                "tools": [TOOL | {"type": "custom"}],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            },
            {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}}},
            {
                "reasoning_effort": "low",
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": {}},
                },
            },
        ),
    ],
)
def test_fields_become_those_of_a_chat(fields: Any, expected: Any) -> None:
    assert translated(**fields) == {"max_tokens": 9, "messages": [USER]} | expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "private"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": "begun"}]}, "messages"),
        (
            {"messages": [USER, {"role": "user", "content": {"a": "private"}}]},
            "messages[1].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [image(type="file", file_id="f")]}]},
            "messages[0].content[0].source",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0].strict"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"output_config": {"task_budget": 1}}, "output_config"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management"),
        ({"mcp_servers": [{"authorization_token": "private"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"mystery": 1}, "mystery"),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(fields: Any, param: str) -> None:
    """The name of the field, and no private value."""
    with pytest.raises(RequestError) as refusal:
        translated(**fields)

    assert refusal.value.param == param
    assert "private" not in str(refusal.value)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [USER, {"role": "bot", "content": "private"}],
            'messages[1].role="bot" is not supported; ',
        ),
        ([{"content": "private"}], "messages[0].role: null is not supported; allowed: user, "),
        (["private"], "messages[0]: a string is not supported; allowed: an object with role"),
        (5, "messages: a number is not supported; allowed: a list of messages"),
        ([], "messages: an empty list is not supported; allowed: a list of messages"),
        (None, "messages is missing; allowed: a list of messages"),
    ],
)
def test_an_error_names_the_role_or_the_kind_that_was_given(messages: Any, says: str) -> None:
    with pytest.raises(RequestError) as refusal:
        translated(messages=messages)

    assert str(refusal.value).startswith(says)
    assert "private" not in str(refusal.value)


def test_a_count_is_of_the_prompt_alone() -> None:
    """Whatever is asked of the output; from a chat, or from an answer to `/tokenize`."""
    asked = {"messages": [USER], "tools": [TOOL], "stop_sequences": ["a"], "stream": True}

    assert json.loads(prompt_of(json.dumps(asked).encode(), max_tokens=1)) == {
        "messages": [USER],
        "tools": [CHAT_TOOL],
        "max_tokens": 1,
    }
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
    for answer in ({"count": 7, "tokens": []}, {"choices": [], "usage": usage}):
        assert json.loads(count_of(json.dumps(answer).encode())) == {"input_tokens": 7}


# Events and whole messages.


def events_of(chunks: list[bytes]) -> list[Event]:
    made = MessageTranslator()
    events = made.begin(HEAD, 3)
    for chunk in chunks:
        events += made.take(chunk)
    return [*events, *made.end()]


@given(chats)
def test_deltas_add_up_to_the_blocks_of_a_message(pieces: list[tuple[str | int, str]]) -> None:
    """Each block begins and ends once, in order, and all text of the chat is in one."""
    events = events_of(chat_events(pieces))

    for event in events:
        event_types.validate_python(event)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    said: dict[str, str] = {}
    opened, index = False, -1
    for event in events[1:-2]:
        assert opened is not (event["type"] == "content_block_start")
        opened = event["type"] != "content_block_stop"
        index += event["type"] == "content_block_start"
        assert event["index"] == index
        if "delta" in event:
            kind, text = event["delta"].values()
            said[kind] = said.get(kind, "") + text
    assert not opened
    for kind, where in (("text_delta", "content"), ("thinking_delta", "reasoning_content")):
        assert said.get(kind, "") == "".join(each for place, each in pieces if place == where)
    arguments = "".join(each for place, each in pieces if isinstance(place, int))
    assert said.get("input_json_delta", "") == arguments


@pytest.mark.parametrize(
    ("ended", "calls", "expected"),
    [
        ({"finish_reason": "stop"}, False, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": 7}, False, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "END"}, False, ("stop_sequence", "END")),
        ({"finish_reason": "length"}, True, ("max_tokens", None)),
        ({"finish_reason": "tool_calls"}, True, ("tool_use", None)),
        # vLLM's reason where the request names the tool.
        ({"finish_reason": "stop"}, True, ("tool_use", None)),
        ({"finish_reason": "content_filter"}, False, ("refusal", None)),
    ],
)
def test_an_end_has_the_same_reason_streamed_and_whole(
    ended: dict[str, Any], calls: bool, expected: tuple[str, str | None]
) -> None:
    said = {"content": "é", "reasoning": "hm"}
    function = {"name": "f", "arguments": '{"q":1}'}
    called = [{"index": 0, "id": "c0", "function": function}] if calls else []
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    message = said | ({"tool_calls": called} if calls else {})
    chunk = {"choices": [{"delta": message, **ended}], "usage": usage}
    choices = [{"message": message, **ended}]
    chat = {"id": "chatcmpl-7", "model": "m", "usage": usage, "choices": choices}

    *_, last, _ = events_of([json.dumps(chunk).encode()])
    found = json.loads(message_of(json.dumps(chat).encode()))

    Message.model_validate(found, strict=True)
    assert (found["id"], found["model"]) == ("msg_7", "m")
    assert (found["stop_reason"], found["stop_sequence"]) == expected
    assert last["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}
    assert last["usage"] == found["usage"]
    assert (found["usage"]["input_tokens"], found["usage"]["cache_read_input_tokens"]) == (7, 2)
    assert found["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "é"},
        *([{"type": "tool_use", "id": "c0", "name": "f", "input": {"q": 1}}] if calls else []),
    ]


@pytest.mark.parametrize("pieces", BROKEN_CALLS)
def test_a_call_that_is_not_complete_is_an_error(pieces: list[tuple[str | int, str]]) -> None:
    """Its block is not closed, and the message has no end that a client could take for one."""
    *events, last = events_of(chat_events(pieces))

    kinds = [event["type"] for event in events]
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert "private" not in last["error"]["message"]
    assert kinds.count("content_block_stop") < kinds.count("content_block_start") or len(pieces) > 2
    assert not {"message_delta", "message_stop"} & {*kinds}


def test_a_call_that_a_limit_cuts_ends_the_message_as_cut() -> None:
    """The reason says that its arguments are not all."""
    *_, delta, last = events_of(chat_events([(0, '{"q":')], "length"))

    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"type": "server_error", "code": "retries"}, "overloaded_error"),
        ({"type": "server_error", "code": "no_instance"}, "overloaded_error"),
        ({"type": "server_error", "code": "inexact"}, "overloaded_error"),
        ({"type": "server_error", "code": "shutting_down"}, "overloaded_error"),
        ({"type": "server_error", "code": "handed_over"}, "overloaded_error"),
        ({"type": "server_error", "code": None}, "overloaded_error"),
        ({"type": "rate_limit_error", "code": "busy"}, "overloaded_error"),
        ({"type": "server_error", "code": "undecodable"}, "api_error"),
        ({"type": "server_error", "code": "not_a_number"}, "api_error"),
        ({"type": "server_error", "code": "denied"}, "api_error"),
        ({"type": "server_error", "code": "superseded"}, "api_error"),
        ({"type": "invalid_request_error", "code": "poison"}, "api_error"),
        ({"type": "invalid_request_error", "code": "beyond_end"}, "invalid_request_error"),
        ("no object", "invalid_request_error"),
    ],
)
def test_an_error_is_overloaded_only_if_a_repeated_message_can_succeed(
    error: Any, kind: str
) -> None:
    """Agents repeat a message after that type, however often. The open block stays open."""
    if isinstance(error, dict):
        error |= {"message": "m"}
    made = MessageTranslator()
    made.begin(HEAD, 3)
    made.take(chat_events([("content", "a")])[1])

    (event,) = made.take(json.dumps({"error": error}).encode())

    assert event["error"]["type"] == kind


def whole(finish: str, *calls: Any) -> bytes:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    choice = {"message": {"content": None, "tool_calls": calls}, "finish_reason": finish}
    return json.dumps({"id": "7", "model": "m", "usage": usage, "choices": [choice]}).encode()


@pytest.mark.parametrize("arguments", ['{"private":', "[1]", '"private"'])
def test_a_whole_call_that_is_not_complete_is_an_error(arguments: str) -> None:
    """Unless the limit has cut it."""
    call = {"id": "c0", "function": {"name": "f", "arguments": arguments}}

    with pytest.raises(UndecodableError) as failed:
        message_of(whole("tool_calls", call))

    assert "private" not in str(failed.value)


def test_a_whole_call_may_have_nulls() -> None:
    """SGLang's calls of a whole answer have no index."""
    call = {"index": None, "id": "c0", "type": None, "function": {"name": "f", "arguments": None}}

    (block,) = json.loads(message_of(whole("tool_calls", call)))["content"]

    assert block == {"type": "tool_use", "id": "c0", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [("", {}), ("[1]", {"arguments": "[1]"}), ('{"q":', {"arguments": '{"q":'})],
)
def test_a_broken_call_is_no_call_without_arguments(arguments: str, given: Any) -> None:
    """A client that runs it gets its text, and no defaults."""
    call = {"id": "c0", "function": {"name": "f", "arguments": arguments}}

    (block,) = json.loads(message_of(whole("length", call)))["content"]

    assert block["input"] == given


@pytest.mark.parametrize(
    ("status", "kind", "answered"),
    [
        (400, "invalid_request_error", 400),
        (401, "authentication_error", 401),
        (404, "not_found_error", 404),
        (422, "invalid_request_error", 422),
        (429, "rate_limit_error", 429),
        (502, "api_error", 502),
        (503, "overloaded_error", 529),
    ],
)
def test_errors_have_the_types_of_their_status(status: int, kind: str, answered: int) -> None:
    body = b'{"error":{"message":"m","type":"t","param":null,"code":null}}'

    found, made = error_of(body, status, "id")

    assert (found, json.loads(made)) == (
        answered,
        {"type": "error", "error": {"type": kind, "message": "m"}, "request_id": "id"},
    )
