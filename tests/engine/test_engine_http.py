"""Answers and refusals of an instance over HTTP."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from tokenizers import Tokenizer

from kvrs.protocol import frames
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.requests import GenerationRun, StepOutput
from kvrs_testkit.ports import tunnel
from tests.engine.serving import SECRET, serving

pytestmark = [pytest.mark.engine, pytest.mark.network]

MESSAGES = [{"role": "user", "content": "kalo miren"}]
KVRS = {"stream": "s", "attempt": 1, "prompt_tokens": 2}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.process  # The client asks the system for its platform, once.
async def test_the_openai_client_understands_both_endpoints(tiny_model: Path) -> None:
    """Streamed and whole, with usage and log probabilities; a stream and a whole answer are the
    same.
    """
    async with (
        serving(tiny_model) as (_, client),
        tunnel(client, scoped_key(SECRET, Scope.INSTANCE, "e0")) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as user,
    ):
        chat: dict[str, Any] = {
            "model": "tiny",
            "messages": MESSAGES,
            "max_completion_tokens": 9,
            "temperature": 0,
        }
        whole_chat = await user.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
        chunks = [chunk async for chunk in await user.chat.completions.create(**chat, stream=True)]
        whole_text = await user.completions.create(
            model="tiny", prompt="kalo", max_tokens=9, temperature=0, logprobs=2
        )
        echoed = [
            event.choices[0].text
            async for event in await user.completions.create(
                model="tiny", prompt="kalo", max_tokens=9, temperature=0, stream=True
            )
        ]

    message = whole_chat.choices[0].message
    assert (message.role, whole_chat.choices[0].finish_reason) == ("assistant", "length")
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * 9]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert whole_chat.usage is not None
    assert whole_chat.usage.completion_tokens == 9
    logprobs = whole_chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [2] * 9
    assert all(token.logprob == token.top_logprobs[0].logprob for token in logprobs.content), (
        "greedy takes the likeliest"
    )
    assert (
        bytes(byte for token in logprobs.content for byte in token.bytes or []).decode()
        == message.content
    )
    assert "".join(echoed) == whole_text.choices[0].text
    found = whole_text.choices[0].logprobs
    assert found is not None
    assert found.text_offset is not None
    assert found.tokens is not None
    assert found.text_offset == [len("".join(found.tokens[:index])) for index in range(9)]


async def test_prefill_of_a_chat_hands_its_ids_and_pages_over(tiny_model: Path) -> None:
    """The prompt's ids stand at the top, as in vLLM's answers to chats. With them decode needs no
    template.
    """
    body = {
        "messages": MESSAGES,
        "max_tokens": 1,
        "return_token_ids": True,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    async with serving(tiny_model) as (instance, client):
        answer = await (
            await client.post(CHAT, json={**body, "kvrs": {**KVRS, "prompt_tokens": 0}})
        ).json()

        text = "<|begin|>user: kalo miren<|end|>\nassistant: "
        assert answer["object"] == "chat.completion"
        assert (
            answer["prompt_token_ids"]
            == instance.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        )
        assert answer["kv_transfer_params"]["remote_engine_id"] == "e0"
        assert answer["choices"][0]["token_ids"] == []
        assert answer["usage"]["completion_tokens"] == 0


async def test_log_probabilities_are_the_models_own(tiny_model: Path) -> None:
    """Log probabilities describe, as in vLLM, the model before penalties and temperature."""
    body = {"prompt": "kalo kalo kalo", "max_tokens": 1, "logprobs": 4, "temperature": 0}
    async with serving(tiny_model) as (_, client):
        plain = await (await client.post(COMPLETIONS, json=body)).json()
        bent = await (
            await client.post(
                COMPLETIONS, json={**body, "temperature": 0.3, "repetition_penalty": 1.9}
            )
        ).json()

    plain_top, bent_top = (
        answer["choices"][0]["logprobs"]["top_logprobs"][0] for answer in (plain, bent)
    )
    assert plain_top == dict(list(bent_top.items())[:4])


# In the arguments, which are JSON within JSON.
HALF_A_PAIR = [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
]

TAKE_OVER = {"do_remote_prefill": True, "remote_engine_id": "e0"}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "x", "n": 2}, "n"),
    (CHAT, {"messages": MESSAGES, "n": 2}, "n"),
    (COMPLETIONS, {"prompt": "x", "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": [512]}, "prompt"),
    (CHAT, {"messages": MESSAGES, "kvrs": {**KVRS, "token_ids": [512]}}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [512]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1 << 20}, "max_tokens"),
    (COMPLETIONS, {"prompt": "kalo " * 5000}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "kalo " * 100_000}]}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": HALF_A_PAIR}]}, "messages"),
    (COMPLETIONS, {"prompt": [5] * 3000}, "prompt"),
    (
        COMPLETIONS,
        {"prompt": [5] * 3000, "kvrs": KVRS, "kv_transfer_params": {"do_remote_decode": True}},
        "max_tokens",
    ),
    (COMPLETIONS, {"prompt": [5, 5, 6, 7, 8], "max_tokens": 2, "kvrs": KVRS}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "kvrs": {**KVRS, "token_ids": [5]}}, "kvrs.token_ids"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    (COMPLETIONS, {"prompt": "x", "kvrs": {**KVRS, "stream": "é" * 128}}, "kvrs.stream"),
    (
        COMPLETIONS,
        {"prompt": "x", "kv_transfer_params": {**TAKE_OVER, "remote_request_id": "s" * 256}},
        "kv_transfer_params.remote_request_id",
    ),
]


async def test_what_an_engine_cannot_serve_is_refused(tiny_model: Path) -> None:
    """With 400 and the field's name; and the engine serves on."""
    async with serving(tiny_model) as (instance, client):
        ended = [5, 5, *instance.vocabulary.tokenizer.encode("END.", add_special_tokens=False).ids]
        for path, fields, param in [
            *REFUSED,
            (COMPLETIONS, {"prompt": ended, "stop": "EN", "kvrs": KVRS}, "stop"),
        ]:
            response = await client.post(path, json=fields)
            refusal = await response.json()

            assert (response.status, refusal["error"]["param"]) == (400, param), fields
        assert (await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})).status == 200
        assert instance.failed() is None


async def test_a_chat_without_max_tokens_may_fill_the_context(tiny_model: Path) -> None:
    """Whatever the prompt leaves of the instance's own limit, also where its pages are
    fewer than its positions.
    """
    async with serving(tiny_model, pages=4) as (instance, client):
        answer = await (
            await client.post(
                CHAT, json={"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
            )
        ).json()

        assert instance.info().max_model_len == 64
        assert answer["usage"]["total_tokens"] == 64
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_no_history_has_more_pages_than_a_frame_has_tags(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small pages a long prompt would; to ask a peer for them would end the instance."""
    monkeypatch.setattr(frames, "MAX_TAGS", 3)
    async with serving(tiny_model) as (instance, client):
        too_long = await client.post(
            COMPLETIONS, json={"prompt": [5] * 65, "max_tokens": 1, "kvrs": KVRS}
        )

        assert instance.info().max_model_len == 48
        assert too_long.status == 400


@pytest.mark.parametrize(
    "prompt",
    [[5] * 64, [5] * 60, "ka " * 60, "ka " * 10_000],
    ids=["prompt", "output", "text", "long-text"],
)
async def test_what_exceeds_the_context_is_refused_with_the_code_that_clients_know(
    tiny_model: Path, prompt: list[int] | str
) -> None:
    """The prompt counts alone and with the requested output; a text may be too long to count."""
    async with serving(tiny_model, pages=4) as (_, client):
        asked = {"prompt": prompt, "max_tokens": 8}
        answer = await client.post(COMPLETIONS, json=asked)
        error = (await answer.json())["error"]

    assert answer.status == 400
    assert error["code"] == "context_length_exceeded"


async def test_usage_has_the_tokens_that_the_prefix_cache_had(tiny_model: Path) -> None:
    """Full pages of the prompt, and never its last token, whose logits are needed."""
    # Sampled without a seed: the model may draw the end token first.
    asked: dict[str, Any] = {"prompt": [*range(5, 5 + 32)], "max_tokens": 2, "ignore_eos": True}
    longer = asked | {"prompt": [*asked["prompt"], 7, 8, 9]}
    async with serving(tiny_model) as (_, client):
        cached = [
            (await (await client.post(COMPLETIONS, json=body)).json())["usage"]
            for body in (asked, asked, longer)
        ]
        streamed = await client.post(
            COMPLETIONS, json=asked | {"stream": True, "stream_options": {"include_usage": True}}
        )
        *_, usage, _, _ = (await streamed.text()).split("\n\n")

    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached] == [0, 16, 32]
    assert json.loads(usage.removeprefix("data: "))["usage"] == cached[1]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_event_has_the_counts_up_to_it(tiny_model: Path, path: str) -> None:
    """The tokens that it and the events before it have count, though more are computed by then."""
    body = {
        **({"messages": MESSAGES} if path == CHAT else {"prompt": [5, 6, 7]}),
        "max_tokens": 5,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with serving(tiny_model) as (_, client):
        text = await (await client.post(path, json=body)).text()
    *events, last = [json.loads(each[6:]) for each in text.split("\n\n")[:-2]]

    had = 0
    for event in events:
        had += len(event["choices"][0].get("token_ids", ()))
        assert event["usage"]["completion_tokens"] == had
        assert event["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
    assert had == last["usage"]["completion_tokens"] == 5


async def test_a_model_without_a_template_takes_no_chats(tmp_path: Path) -> None:
    """The error names what is allowed instead; ids need no template."""
    write_tiny_model(tmp_path / "model", seed=0)
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    async with serving(tmp_path / "model") as (_, client):
        refusal = await client.post(CHAT, json={"messages": MESSAGES})
        resumed = await client.post(
            CHAT,
            json={
                "messages": MESSAGES,
                "max_tokens": 3,
                "ignore_eos": True,
                "kvrs": {**KVRS, "token_ids": [5, 6, 7]},
            },
        )

        assert refusal.status == 400
        assert (
            "no chat template; allowed: /v1/completions"
            in (await refusal.json())["error"]["message"]
        )
        assert (await resumed.json())["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
        }


async def test_a_superseded_attempt_ends_with_an_error(tiny_model: Path) -> None:
    """A stream has one writer: the lower attempt ends with that error, and one that comes late is
    refused.
    """
    body = {"messages": MESSAGES, "max_tokens": 1900, "ignore_eos": True}
    async with serving(tiny_model) as (_, client):
        lower = await client.post(CHAT, json={**body, "stream": True, "kvrs": KVRS})
        await lower.content.readany()
        higher = asyncio.create_task(
            client.post(CHAT, json={**body, "max_tokens": 2, "kvrs": {**KVRS, "attempt": 2}})
        )
        rest = await lower.content.read()
        late = await client.post(CHAT, json={**body, "kvrs": KVRS})

        assert b'"code":"fenced"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert (await higher).status == 200
        assert late.status == 409


async def test_tokenising_a_long_prompt_does_not_hold_up_the_streams(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds where a model has room for millions of characters: the event loop goes on
    meanwhile.
    """
    async with serving(tiny_model) as (instance, client):
        threads: list[bool] = []
        real = instance.vocabulary.tokenizer

        class Noting:
            """The tokenizer's own class takes no new methods."""

            def encode(self, text: str, **options: Any) -> Any:
                threads.append(threading.current_thread() is threading.main_thread())
                return real.encode(text, **options)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(
            instance,
            "vocabulary",
            replace(instance.vocabulary, tokenizer=cast(Tokenizer, Noting())),
        )
        for words in (10, 3000):
            assert (
                await client.post(COMPLETIONS, json={"prompt": "kalo " * words, "max_tokens": 1})
            ).status in (200, 400)

    assert threads == [True, False]


async def test_taking_over_a_long_stream_does_not_hold_up_the_others(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is fed to the text machine once more, token by token; an instance may take over
    many streams at a time.
    """
    async with serving(tiny_model) as (_, client):
        threads: list[bool] = []
        real = GenerationRun.replay

        def replay(run: GenerationRun, history: list[int]) -> StepOutput | None:
            threads.append(threading.current_thread() is threading.main_thread())
            return real(run, history)

        monkeypatch.setattr(GenerationRun, "replay", replay)
        for produced in (10, 1000):
            history = {
                "prompt": [5] * (3 + produced),
                "max_tokens": produced + 1,
                "ignore_eos": True,
            }
            answer = await client.post(
                COMPLETIONS, json={**history, "kvrs": {**KVRS, "prompt_tokens": 3}}
            )
            assert (await answer.json())["usage"]["completion_tokens"] == produced + 1

    assert threads == [True, False]
