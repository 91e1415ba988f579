"""Supported requests of clients, and how all others are refused."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import RequestError
from kvrs.protocol.openai.chunks import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Choice,
    Completion,
    FunctionCall,
    ToolCall,
)
from kvrs.protocol.openai.decoding import MAX_DEPTH
from kvrs.protocol.openai.fields import EMBEDDED, VLLM, ApiKind
from kvrs.protocol.openai.requests import parse_chat_request, parse_completion_request, read_request

MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = "a text that is in no error"


def completion(**fields: Any) -> bytes:
    return msgspec.json.encode({"prompt": "hello", **fields})


def chat(**fields: Any) -> bytes:
    return msgspec.json.encode({"messages": MESSAGES, **fields})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("best_of", 2, "1 or null"),
        ("suffix", "x", '"" or null'),
        ("logit_bias", {"7": 1}, "{} or null"),
        ("bad_words", ["x"], r"\[\] or null"),
        ("allowed_token_ids", [7], "null"),
        ("min_p", 1.1, r"\[0.0, 1.0\]"),
        ("guided_json", {}, "null, or the field structured_outputs"),
        ("a_new_field", 1, "allowed: .*temperature, "),
        ("structured_outputs", {"regex": "a"}, "null"),
        ("use_beam_search", True, "false or null"),
        ("logits_processors", ["x"], r"\[\] or null"),
        ("include_reasoning", False, "true or null"),
        ("prompt_logprobs", 1, "null"),
        ("chat_template", "{{ messages }}", "null"),
        ("presence_penalty", 2.1, r"\[-2.0, 2.0\]"),
        ("frequency_penalty", -2.1, r"\[-2.0, 2.0\]"),
        ("repetition_penalty", 0, r"\[1e-06, 2.0\]"),
        ("n", 17, r"\[1, 16\]"),
        ("n", 0, r"\[1, 16\]"),
        ("temperature", -1, r"\[0.0, 2.0\]"),
        ("max_tokens", 0, r"at least 1, .*context"),
        ("stop", [""], "none of them empty"),
        ("stop", ["x"] * 17, "at most 16"),
    ],
)
@pytest.mark.parametrize("body", [completion, chat])
def test_what_is_not_supported_is_refused_by_name(
    body: Any, field: str, value: Any, allowed: str
) -> None:
    """Nothing that would change the output is ignored; the message names the field and what is
    allowed.
    """
    parse = parse_completion_request if body is completion else parse_chat_request

    with pytest.raises(RequestError, match=allowed) as refusal:
        parse(body(**{field: value}))

    assert refusal.value.param == field


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("logit_bias", dict.fromkeys(range(1025), 1), "at most 1024"),
        ("logit_bias", {"-1": 1}, "none of them negative"),
        ("logit_bias", {"5": 101}, r"logit_bias\[5\]"),
        ("bad_words", [""], "none of them empty"),
        ("bad_words", ["x"] * 1025, "at most 1024"),
        ("bad_words", ["x" * 16_385], "16384 characters"),
        ("allowed_token_ids", [], "not be empty"),
    ],
)
@pytest.mark.parametrize("body", [completion, chat])
def test_biases_have_limits_at_vllm(body: Any, field: str, value: Any, allowed: str) -> None:
    parse = parse_completion_request if body is completion else parse_chat_request

    with pytest.raises(RequestError, match=allowed):
        parse(body(**{field: value}), VLLM)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "best_of": 1,
            "suffix": None,
            "logit_bias": {},
            "response_format": {"type": "text"},
            "user": "somebody",
        },
        {
            "n": 16,
            "presence_penalty": -2,
            "frequency_penalty": 2.0,
            "repetition_penalty": 0.5,
            "top_k": -1,
        },
        {"store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
    ],
)
def test_values_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    """Clients name defaults, and fields that are about their own book-keeping."""
    parse_completion_request(completion(**fields))
    parse_chat_request(chat(**fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 16}, "prompt"),
        ({"add_special_tokens": False}, "add_special_tokens"),
    ],
)
def test_completions_have_limits_of_their_own(fields: dict[str, Any], param: str) -> None:
    """An engine takes one prompt, a proxy as many as are 128 choices; log probabilities of a prompt
    are not supported.
    """
    with pytest.raises(RequestError) as refusal:
        parse_completion_request(completion(**fields))

    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "who?"}]}, "messages[0].role"),
        ({"messages": [{"role": 3}]}, "messages[0].role"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": "f"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"echo": True}, "echo"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"tools": {"f": 1}}, "tools"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"max_tokens": 3, "max_completion_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_completion_tokens": 4}, "min_tokens"),
        (
            {"kvrs": {"stream": "s", "attempt": 1, "prompt_tokens": 1, "token_ids": [-1]}},
            "kvrs.token_ids",
        ),
        (
            {"kvrs": {"stream": "s", "attempt": 1, "prompt_tokens": 1, "token_ids": []}},
            "kvrs.token_ids",
        ),
    ],
)
def test_chats_have_limits_of_their_own(fields: dict[str, Any], param: str) -> None:
    """A call that must be made, for one, needs guided decoding."""
    with pytest.raises(RequestError) as refusal:
        parse_chat_request(chat(**fields))

    assert refusal.value.param == param


@pytest.mark.parametrize("body", [completion, chat])
def test_null_equals_an_absent_field(body: Any) -> None:
    """Many clients name every field of the API; it allows null for what has a default."""
    parse = parse_completion_request if body is completion else parse_chat_request
    silent = parse(body())

    nulls = dict.fromkeys(set(silent.__struct_fields__) - {"prompt", "messages"})

    assert parse(body(**nulls)) == silent
    streams = {"stream": True, "stream_options": {"include_usage": None}}
    assert parse(body(**{**nulls, "n": 2, **streams})).n == 2
    with pytest.raises(RequestError) as refusal:
        parse(body(**{**nulls, "top_p": "x"}))
    assert refusal.value.param == "top_p"


def test_no_engine_gets_a_null_that_equals_an_absent_field() -> None:
    """Not every engine accepts it, though the request is decoded with it."""
    _, fields, _ = read_request(
        completion(temperature=None, max_tokens=3), ApiKind.COMPLETIONS, EMBEDDED
    )

    assert set(fields) == {"prompt", "max_tokens"}


@pytest.mark.parametrize(
    "schema", [b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, b"[" + b"{}," * 9 + b"{}]"]
)
def test_a_body_of_too_many_values_or_too_deep_is_refused_before_it_is_decoded(
    schema: bytes,
) -> None:
    """However few bytes it has."""
    body = b'{"prompt":"a","response_format":' + schema + b"}"

    with pytest.raises(RequestError, match="allowed: at most"):
        read_request(body, ApiKind.COMPLETIONS, EMBEDDED, max_elements=9)


@pytest.mark.parametrize("prompt", ["é ka", [5, 6]])
def test_a_list_of_one_prompt_is_that_prompt(prompt: str | list[int]) -> None:
    """The API takes lists of prompts, and many clients send one that way."""
    assert parse_completion_request(completion(prompt=[prompt])).prompt == prompt


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (completion(max_tokens="ten"), 'Expected `int`, got `str` "ten" (field max_tokens)'),
        (completion(stream=3), "Expected `bool`, got `int` 3 (field stream)"),
        (completion(stop=["a", 3]), "Expected `str`, got `int` 3 (field stop[1])"),
        (completion(stop={"a": 3}), "Expected `str | array | null`, got `object` (field stop)"),
        (completion(logit_bias={"a": 3}), "Expected `int`, got `str` (a key of field logit_bias)"),
        (completion(stream="x" * 99), f'Expected `bool`, got `str` "{"x" * 79} (field stream)'),
        (b'{"stream": 3, a', "Expected `bool`, got `int` (field stream)"),
        (b"[1]", "Expected `object`, got `array` (the body)"),
        (b"{}", "prompt is missing"),
        (b'{"messages": [{}]}', "messages[0].role is missing"),
    ],
)
def test_a_value_of_another_type_is_shown_with_its_field(body: bytes, message: str) -> None:
    """Shortened, and only scalars."""
    parse = parse_chat_request if b"messages" in body else parse_completion_request
    with pytest.raises(RequestError) as refused:
        parse(body)

    assert str(refused.value) == message


@pytest.mark.parametrize(
    "body",
    [
        completion(prompt=[1, TEXT]),
        completion(prompt={"text": TEXT}),
        completion(suffix=TEXT),
        completion(user=[TEXT]),
        completion(cache_salt=7_154_286),
        chat(messages=TEXT),
        chat(messages=[TEXT]),
        chat(messages=[{"role": {"text": TEXT}}]),
        chat(tools=TEXT),
        chat(functions=[TEXT]),
        chat(chat_template=TEXT),
    ],
)
def test_a_private_value_is_in_no_error(body: bytes) -> None:
    """Clients log errors; the kind of the value is enough to find the mistake."""
    parse = parse_chat_request if b"messages" in body else parse_completion_request

    with pytest.raises(RequestError) as refused:
        parse(body)

    assert TEXT not in str(refused.value)
    assert "7154286" not in str(refused.value)


def test_what_is_passed_on_undecoded_must_be_text_too() -> None:
    """Bytes that are not UTF-8 would fail at one engine after the other."""
    for body in (
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user"}],"user":"\xff"}',
    ):
        with pytest.raises(RequestError, match="not valid JSON"):
            parse_chat_request(body)


def test_a_usage_in_every_event_comes_with_that_at_the_end() -> None:
    """The option alone does nothing, as in vLLM."""
    each = {"continuous_usage_stats": True}
    for options, wants in (
        (each | {"include_usage": True}, True),
        (each, False),
        ({"include_usage": True}, False),
    ):
        body = completion(stream_options=options, stream=True)

        assert parse_completion_request(body).wants_each_usage == wants


@pytest.mark.parametrize("body", [completion, chat])
def test_options_of_a_stream_need_a_stream(body: Any) -> None:
    """OpenAI and vLLM have the same rule; an empty object is no fault."""
    parse = parse_completion_request if body is completion else parse_chat_request

    assert not parse(body(stream_options={})).stream
    for options in ({"include_usage": None}, {"include_usage": False}):
        with pytest.raises(RequestError) as refusal:
            parse(body(stream_options=options))
        assert refusal.value.param == "stream_options"


def test_the_newer_name_of_max_tokens_counts() -> None:
    """Readers of the request use one field only."""
    request = parse_chat_request(chat(max_completion_tokens=7))

    assert (request.max_tokens, request.max_completion_tokens) == (7, None)
    assert parse_chat_request(chat()).max_tokens is None
    for older in (6, 7, 8):
        assert parse_chat_request(chat(max_tokens=older, max_completion_tokens=7)).max_tokens == 7


def test_messages_stay_the_bytes_that_they_were() -> None:
    """Only the engine's template reads them; a proxy passes them on."""
    body = b'{"messages": [ {"role":"user", "content":"\\u00e9  \xc3\xa9", "x": 1.50} ], "n":2}'

    request = parse_chat_request(body)

    assert (
        bytes(request.messages) == b'[ {"role":"user", "content":"\\u00e9  \xc3\xa9", "x": 1.50} ]'
    )


def test_both_endpoints_name_wanted_logprobs_alike() -> None:
    """A number and a flag have one meaning: how many alternatives to name beside each token."""
    assert parse_completion_request(completion()).wanted_logprobs is None
    assert parse_completion_request(completion(logprobs=0)).wanted_logprobs == 0
    assert parse_chat_request(chat(logprobs=False)).wanted_logprobs is None
    assert parse_chat_request(chat(logprobs=True)).wanted_logprobs == 0
    assert parse_chat_request(chat(logprobs=True, top_logprobs=3)).wanted_logprobs == 3


@given(
    body=st.binary(max_size=40)
    | st.recursive(st.none() | st.text(max_size=3), st.lists, max_leaves=5).map(msgspec.json.encode)
)
def test_garbage_is_a_refusal_and_never_a_crash(body: bytes) -> None:
    """Whatever a socket brings is the client's error."""
    for parse in (parse_completion_request, parse_chat_request):
        with pytest.raises(RequestError):
            parse(body)


def test_events_have_the_bytes_that_the_proxy_cuts() -> None:
    """Compact, in this order of keys, with `token_ids` last in its choice."""
    call = ToolCall("call_1", FunctionCall("f", "{}"), index=0)

    text = msgspec.json.encode(Completion("cmpl-s", 1, "m", [Choice("a", token_ids=[5])]))
    opening = msgspec.json.encode(
        ChatChunk(
            "chatcmpl-s", 1, "m", [ChatChunkChoice(delta=ChatDelta(role="assistant", content=""))]
        )
    )
    chunk = msgspec.json.encode(
        ChatChunk(
            "chatcmpl-s",
            1,
            "m",
            [ChatChunkChoice(delta=ChatDelta(tool_calls=[call]), token_ids=[5])],
        )
    )

    assert text == (
        b'{"id":"cmpl-s","created":1,"model":"m","choices":[{"text":"a","index":0,"logprobs":null,"finish_reason":null,'
        b'"stop_reason":null,"token_ids":[5]}],"object":"text_completion"}'
    )
    assert opening == (
        b'{"id":"chatcmpl-s","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
        b'"logprobs":null,"finish_reason":null,"stop_reason":null}],"object":"chat.completion.chunk"}'
    )
    assert chunk == (
        b'{"id":"chatcmpl-s","created":1,"model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"id":"call_1",'
        b'"function":{"name":"f","arguments":"{}"},"type":"function","index":0}]},"logprobs":null,'
        b'"finish_reason":null,"stop_reason":null,"token_ids":[5]}],"object":"chat.completion.chunk"}'
    )
