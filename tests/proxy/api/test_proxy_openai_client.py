"""The openai package, unmodified, as the client: both endpoints, with and without streaming,
through cuts.
"""

from typing import Any

import openai
import pytest

from kvrs_testkit.plays import SCENARIOS
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Cut, Fault

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]


def chat(play: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": f"play {play}."}],
        "temperature": 0,
        "max_completion_tokens": 90,
        "user": "cut",
    } | fields


def cut(system: ProxyCluster, event: int, seed: int | None = None) -> None:
    system.script.cuts["cut"] = Cut(Fault.RESET, event, seed)


async def test_a_chat_streams_through_a_cut(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """One role, one finish, one id, the whole text, and the usage at the end."""
    cut(system, 6)

    stream = await client.chat.completions.create(
        **chat("emoji"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert not system.script.cuts
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == SCENARIOS["emoji"]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert [
        chunk.choices[0].finish_reason
        for chunk in chunks
        if chunk.choices and chunk.choices[0].finish_reason
    ] == ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(deltas) - 1


async def test_usage_says_what_the_first_attempt_had_cached(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """The count is that of prefill, which alone looks up the prompt for the client: a decode
    instance has pages of others, and a recovery those of the stream itself.
    """
    for instance in system.instances.values():
        is_prefill = instance.id.startswith("p")
        instance.cached_tokens = 7 if is_prefill else 9
    asked = chat("emoji", stream_options={"include_usage": True})
    cut(system, 0)

    whole = await client.chat.completions.create(**chat("emoji"), n=2)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    response = await client.responses.create(model="scripted", input="play emoji.")
    for instance in system.instances.values():
        instance.cached_tokens = None
    unknown = await client.chat.completions.create(**chat("emoji"))

    assert not system.script.cuts
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 7
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 7
    assert unknown.usage is not None
    assert unknown.usage.prompt_tokens_details is None


async def test_the_helper_for_streams_puts_a_message_together(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """The package's own accumulation of deltas, through a cut."""
    whole = await client.chat.completions.create(**chat("latin", tools=TOOLS))
    cut(system, 9)

    async with client.chat.completions.stream(**chat("latin", tools=TOOLS)) as stream:
        streamed = await stream.get_final_completion()

    assert not system.script.cuts
    for answer in (whole, streamed):
        assert answer.choices[0].message.content == SCENARIOS["latin"]


async def test_log_probabilities_and_choices_of_a_chat(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """Every choice has its own; a cut of one leaves both whole."""
    request = chat("latin", logprobs=True, n=2, seed=5)
    undisturbed = await client.chat.completions.create(**request)
    cut(system, 5, seed=6)

    answer = await client.chat.completions.create(**request)

    assert not system.script.cuts
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == [SCENARIOS["latin"]] * 2
    assert [choice.logprobs for choice in answer.choices] == [
        choice.logprobs for choice in undisturbed.choices
    ]
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) > 5
    assert answer.usage == undisturbed.usage


async def test_log_probabilities_and_choices_of_a_completion(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """A cut changes neither, as in a chat; their shape is the older one."""
    request: dict[str, Any] = {
        "model": "scripted",
        "prompt": "play cjk.",
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": 1,
        "n": 2,
        "seed": 5,
        "user": "cut",
    }
    undisturbed = await client.completions.create(**request)
    cut(system, 5, seed=5)

    answer = await client.completions.create(**request)

    assert not system.script.cuts
    assert [choice.text for choice in answer.choices] == [SCENARIOS["cjk"]] * 2
    assert answer.choices == undisturbed.choices
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset is not None
    assert answer.choices[0].logprobs.text_offset[0] == 0
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(answer.choices[0].logprobs.tokens or ())


@pytest.mark.parametrize("prompts", [["play cjk.", "play latin."], [[1, 600, 2], [5, 6]]])
async def test_every_prompt_of_a_request_is_answered_as_if_alone(
    system: ProxyCluster, client: openai.AsyncOpenAI, prompts: Any
) -> None:
    """Choice k of prompt i has the index `i * n + k`, as OpenAI counts; the cut of one leaves the
    others whole, and the usage has each prompt once.
    """
    request: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 30,
        "temperature": 1.0,
        "echo": isinstance(prompts[0], str),
        "n": 2,
        "seed": 5,
        "user": "cut",
    }
    alone = [await client.completions.create(**request, prompt=one) for one in prompts]
    cut(system, 5, seed=6)

    whole = await client.completions.create(**request, prompt=prompts)
    cuts_left = len(system.script.cuts)
    cut(system, 5, seed=5)
    texts = [""] * 4
    stream = await client.completions.create(
        **request, prompt=prompts, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert (cuts_left, system.script.cuts) == (0, {})
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    expected = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in whole.choices] == texts == expected
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage == chunks[-1].usage
    assert whole.usage is not None
    used = [answer.usage for answer in alone if answer.usage]
    assert whole.usage.prompt_tokens == sum(usage.prompt_tokens for usage in used)
    assert whole.usage.completion_tokens == sum(usage.completion_tokens for usage in used)


async def test_equal_prompts_of_a_request_draw_differently(client: openai.AsyncOpenAI) -> None:
    """Without a seed of the client's each prompt has its own."""
    answer = await client.completions.create(
        model="scripted", prompt=[[5, 6, 7]] * 2, max_tokens=30, temperature=1.0
    )

    first, second = answer.choices
    assert first.text != second.text


async def test_several_choices_stream_side_by_side(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """Their index distinguishes them."""
    cut(system, 7, seed=9)

    stream = await client.chat.completions.create(**chat("thought", n=2, seed=9), stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert not system.script.cuts
    assert set(texts.values()) == {SCENARIOS["thought"]}


async def test_a_chat_that_is_wrong_is_a_bad_request(
    system: ProxyCluster, client: openai.AsyncOpenAI
) -> None:
    """With the name of the field."""
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs") as raised:
        await client.chat.completions.create(**chat("latin", top_logprobs=2))

    assert raised.value.param == "top_logprobs"
