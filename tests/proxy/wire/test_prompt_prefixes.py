"""Which prompts of clients begin alike, by the bytes of their requests."""

import base64
from random import Random
from typing import Any

import msgspec
import pytest

from kvrs.core.model.cluster_view import BLOCK_BYTES, NO_PREFIX, Prefix
from kvrs.protocol.secrets import TenantSecret
from kvrs.proxy.wire.exactness import is_predictable
from kvrs.proxy.wire.requests import (
    CHAT,
    COMPLETIONS,
    Endpoint,
    ParsedRequest,
    prefix_of,
    read,
    salted,
)

LONG = "The quick brown fox jumps over the lazy dog. " * 200


def parsed(endpoint: Endpoint = COMPLETIONS, backend: str = "vllm", **body: Any) -> ParsedRequest:
    return read(endpoint, msgspec.json.encode({"model": "m", **body}), backend)


def chat(*texts: str, **body: Any) -> ParsedRequest:
    roles = ("system", "user", "assistant")
    messages = [
        {"role": roles[min(at, 1 + at % 2)], "content": text} for at, text in enumerate(texts)
    ]
    return parsed(CHAT, messages=messages, **body)


def common(one: Prefix, other: Prefix) -> int:
    """How many leading blocks are equal."""
    count = 0
    for ours, theirs in zip(one.hashes, other.hashes, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def test_the_next_turn_of_a_chat_begins_with_the_one_before() -> None:
    """But for the last block, in which the list of messages ended."""
    first = prefix_of(chat("Be brief.", LONG))
    second = prefix_of(chat("Be brief.", LONG, "Fine.", "And now?"))

    assert common(first, second) == len(first.hashes)
    assert len(first.hashes) == first.size_bytes // BLOCK_BYTES == 8


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"cache_salt": "mine"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template": "{{ messages }}"},
        {"add_generation_prompt": False},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"documents": [{"title": "t", "text": "x"}]},
    ],
)
def test_what_changes_every_token_is_in_every_block(other: dict[str, Any]) -> None:
    """Also what a chat template writes before the messages."""
    assert common(prefix_of(chat(LONG)), prefix_of(chat(LONG, **other))) == 0


@pytest.mark.parametrize("other", [{"temperature": 0.5}, {"max_tokens": 3}, {"stop": ["x"]}])
def test_what_changes_the_output_alone_is_in_none(other: dict[str, Any]) -> None:
    ours, theirs = prefix_of(chat(LONG)), prefix_of(chat(LONG, **other))

    assert ours == theirs


def test_tools_are_part_of_the_prefix() -> None:
    """A long list of them is in front of short questions."""
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "description": LONG, "parameters": {}}}
        for n in range(3)
    ]

    ours, theirs = prefix_of(chat("One?", tools=tools)), prefix_of(chat("Two?", tools=tools))

    assert common(ours, theirs) == len(ours.hashes) > 20


def test_tenants_share_nothing() -> None:
    """Their requests are salted, so that no cache has what another tenant has sent, and none can
    tell by its times what others ask.
    """
    ours, theirs = (
        prefix_of(salted(chat(LONG), TenantSecret([b"secret"], owner))) for owner in (b"a", b"b")
    )

    assert common(ours, theirs) == 0
    assert common(ours, prefix_of(chat(LONG))) == 0


def test_a_prompt_of_ids_is_found_by_these() -> None:
    """Four bytes each, so that a block is 256 of them; a text never equals ids."""
    ids = [*range(1000)]

    ours, theirs = prefix_of(parsed(prompt=ids)), prefix_of(parsed(prompt=[*ids[:600], 7, 8, 9]))

    assert common(ours, theirs) == 2
    assert (len(ours.hashes), ours.tokens(2, 1000)) == (3, 512)


def test_each_of_several_prompts_has_its_own() -> None:
    both = parsed(prompt=[LONG, LONG[::-1]])

    ours, theirs = (prefix_of(one) for one in both.prompts)

    assert ours == prefix_of(parsed(prompt=LONG))
    assert common(ours, theirs) == 0


def test_a_picture_is_as_long_as_its_hash() -> None:
    """Two of them are told apart, and their bytes are not taken for tokens."""
    pictures = [base64.b64encode(Random(n).randbytes(300_000)).decode() for n in range(2)]

    def asks(picture: str) -> Prefix:
        url = {"url": f"data:image/png;base64,{picture}"}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": LONG}]
        request = parsed(CHAT, messages=[{"role": "user", "content": content}])
        return prefix_of(request, has_media=not is_predictable(request))

    ours, theirs = map(asks, pictures)

    assert ours == asks(pictures[0])
    assert common(ours, theirs) == 0
    assert ours.size_bytes < len(LONG) + 200


@pytest.mark.parametrize("other", [{"echo": True}, {"prompt_logprobs": 1}])
def test_what_reads_no_cache_is_found_nowhere(other: dict[str, Any]) -> None:
    assert prefix_of(parsed(prompt=LONG, **other)) == NO_PREFIX
