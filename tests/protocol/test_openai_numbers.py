"""Whole numbers of requests as languages without a type for them write them."""

import json
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import RequestError
from kvrs.protocol.openai.decoding import INTEGERS, LISTS, MAX_ELEMENTS, with_whole_numbers
from kvrs.protocol.openai.fields import BACKENDS, VLLM, ApiKind
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest, read_prompt, read_request

MESSAGES = '"messages": [{"role": "user", "content": "4.0"}]'


def completion(text: str, backend: str = VLLM) -> tuple[Any, dict[str, Any]]:
    request, fields, _ = read_request(text.encode(), ApiKind.COMPLETIONS, backend, MAX_ELEMENTS)
    return request, {name: json.loads(bytes(value)) for name, value in fields.items()}


def chat(text: str) -> tuple[Any, dict[str, Any]]:
    request, fields, _ = read_request(text.encode(), ApiKind.CHAT, VLLM, MAX_ELEMENTS)
    return request, {name: json.loads(bytes(value)) for name, value in fields.items()}


@pytest.mark.parametrize("four", ["4.0", "4e0", "4.00", "40E-1", "0.4e1", "4"])
def test_whole_numbers_may_have_a_fraction_of_zero(four: str) -> None:
    """The engine gets them as JSON has whole numbers."""
    request, fields = completion(
        f'{{"prompt": [{four}, 5.0], "max_tokens": {four}, "n": {four}, "seed": {four}, '
        f'"top_k": {four}, "min_tokens": {four}, "logprobs": {four}, '
        f'"stop_token_ids": [{four}], "allowed_token_ids": [{four}], "user": "4.0"}}'
    )
    chatted, sent = chat(
        f'{{{MESSAGES}, "max_completion_tokens": {four}, "logprobs": true, "top_logprobs": {four}}}'
    )

    assert request.prompt == [4, 5]
    for name in ("max_tokens", "n", "seed", "top_k", "min_tokens", "logprobs"):
        assert (getattr(request, name), fields[name]) == (4, 4)
        assert isinstance(fields[name], int)
    assert fields["stop_token_ids"] == request.stop_token_ids == [4]
    assert fields["allowed_token_ids"] == request.allowed_token_ids == [4]
    assert fields["user"] == "4.0"
    assert (chatted.max_tokens, chatted.top_logprobs) == (4, 4)
    assert sent["messages"][0]["content"] == "4.0"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_takes_them(backend: str) -> None:
    """The engine gets a form that the strictest parser reads."""
    request, fields = completion('{"prompt": "a", "max_tokens": 4.0}', backend)

    assert request.max_tokens == 4
    assert isinstance(fields["max_tokens"], int)


def test_several_prompts_may_be_of_them() -> None:
    """Each is read by itself."""
    body = b'{"prompt": [[1.0, 2], [3, 4e0]], "n": 1.0}'

    request, _, more = read_request(body, ApiKind.COMPLETIONS, VLLM, MAX_ELEMENTS)
    assert isinstance(request, CompletionRequest)

    assert (request.prompt, [read_prompt(each) for each in more]) == ([1, 2], [[3, 4]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in ("4.5", '"4"', '"4.0"', "true", "4e-1", "1e400")),
        *(("max_tokens", value) for value in ("-4.0", "0.0", "1e30", "NaN", "Infinity")),
        *(("max_tokens", value) for value in ("4.", ".4", "04.0", "+4.0")),
        *(("seed", value) for value in ("1e30", "0.5", "[4.0]")),
        *(("prompt", value) for value in ("[4.5]", "[4.0, true]", "4.0", "[1e30]")),
        *(("prompt", value) for value in ("[-1.0]", "[[4.5]]", "[{}]", "[4294967296.0]")),
        *(("stream", value) for value in ("1.0", "1", "0.0")),
        *(("stop", value) for value in ("4.0", "[4.0]")),
        ("stop_token_ids", "4.0"),
    ],
)
def test_what_is_no_whole_number_is_refused(name: str, value: str) -> None:
    """Texts, truths and fractions are no counts, as before; and ranges hold."""
    fields = {"prompt": '"a"', name: value}
    body = "{" + ", ".join(f'"{each}": {text}' for each, text in fields.items()) + "}"

    with pytest.raises(RequestError):
        completion(body)


def test_every_field_of_whole_numbers_is_known() -> None:
    """One that is added to the requests is added to the list as well."""

    def parts(hint: Any) -> tuple[Any, ...]:
        is_union = get_origin(hint) in (Union, types.UnionType)
        return get_args(hint) if is_union else (hint,)

    for kind in (CompletionRequest, ChatRequest):
        for name, hint in get_type_hints(kind).items():
            assert (int not in parts(hint)) or name in INTEGERS, name
            assert (list[int] not in parts(hint)) or name in LISTS, name


@given(st.dictionaries(st.sampled_from([*INTEGERS, *LISTS, "other"]), st.text(max_size=30)))
def test_texts_are_left_as_they_are(fields: dict[str, str]) -> None:
    """Whatever looks like a number in them."""
    given = {name: msgspec.Raw(json.dumps(text).encode()) for name, text in fields.items()}

    found = with_whole_numbers(given)
    assert {name: bytes(value) for name, value in found.items()} == {
        name: bytes(value) for name, value in given.items()
    }
