"""A stream that is cut anywhere and continued from its history has exactly the output that it
would have had.

Three levels: ids that are forced on a run, runs on the real worker, and HTTP.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from kvrs.config.cluster import EngineSettings
from kvrs.ids import StreamId
from kvrs.protocol.openai.chunks import ChatChunkChoice
from kvrs.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from kvrs.protocol.pages import root_tag
from kvrs.proxy.wire.requests import CHAT
from kvrs.text.output import TextDelta, TokenPieces, load_tokenizer
from kvrs_engine.engine.answers import ChatAnswer, CompletionAnswer
from kvrs_engine.engine.requests import GenerationRun, Sampled, StepOutput, Vocabulary, make_run
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk, Sequence
from tests.engine.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.network]

STREAM = StreamId("the-stream")
END_ID = 1

# What is asked of the real model, beside the endpoint's own form of logprobs.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.3, "top_p": 0.95, "top_k": 200, "seed": 11},
    "penalties": {
        "temperature": 0.9,
        "seed": 3,
        "presence_penalty": 1.1,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
    },
    "greedy penalties": {"temperature": 0, "frequency_penalty": 2.0, "repetition_penalty": 0.8},
    "min_p": {"temperature": 1.1, "seed": 7, "min_p": 0.02},
    "json": {
        "temperature": 1.0,
        "seed": 8,
        "min_tokens": 24,
        "ignore_eos": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "list",
                "schema": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            },
        },
    },
    "min_tokens": {
        "temperature": 1.0,
        "seed": 5,
        "min_tokens": 20,
        "stop_token_ids": list(range(2, 300)),
    },
}
MAX_TOKENS = 26
PROMPT = "kalo miren. stavor 日本"


def run_of(
    request: CompletionRequest | ChatRequest,
    tokenizer: Tokenizer,
    prompt: list[int],
    output: list[int],
) -> GenerationRun:
    sequence = Sequence(
        STREAM, (0, 1), prompt + output, len(prompt), root_tag("model", ""), prefill_only=False
    )
    return make_run(
        request,
        request.max_tokens or 200,
        sequence,
        (),
        Vocabulary(tokenizer, 512, frozenset({END_ID})),
    )


def forced(
    request: CompletionRequest | ChatRequest,
    tokenizer: Tokenizer,
    prompt: str,
    output: list[int],
    cut: int,
) -> list[bytes]:
    """The events after `cut` tokens when the model produces just `output`."""
    run = run_of(request, tokenizer, tokenizer.encode(prompt).ids, output[:cut])
    pieces = TokenPieces(tokenizer)
    answer: ChatAnswer | CompletionAnswer
    if isinstance(request, ChatRequest):
        answer = ChatAnswer(request, run, "m", 1, pieces)
    else:
        answer = CompletionAnswer(request, run, "m", 1, pieces)
    events: list[msgspec.Struct | None] = [answer.opening()]
    for token_id in output[cut:]:
        run.sequence.token_ids.append(token_id)
        step = run.take(Sampled(token_id), run.produced_tokens)
        events.append(answer.event(step))
        if step.finish_reason is not None:
            events.append(answer.usage_event())
            break
    return [msgspec.json.encode(event) for event in events if event is not None]


FORCED = ["Hm, 日本 é?\n\nIt is 🚀 so.", "Let me see. Zürich 🙂, 2 days so on."]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


@pytest.mark.parametrize("text", FORCED)
@pytest.mark.parametrize("fields", [{}, {"stop": ["so.", "🙂"]}], ids=str)
def test_chats_continue_at_every_cut(
    tokenizer: Tokenizer, text: str, fields: dict[str, Any]
) -> None:
    """Half a stop string and half a character are held by the lost engine; its successor holds
    them again.
    """
    prompt = "user: hi\nassistant: "
    body = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True, **fields}
    request = parse_chat_request(msgspec.json.encode(body))
    output = [*tokenizer.encode(text, add_special_tokens=False).ids, END_ID]
    opening, *whole = forced(request, tokenizer, prompt, output, 0)

    assert b'"role":"assistant"' in opening
    for cut in range(1, len(whole) - 1):
        assert forced(request, tokenizer, prompt, output, cut) == whole[cut:]


@pytest.mark.parametrize("text", FORCED)
@pytest.mark.parametrize("fields", [{}, {"stop": ["so.", "🙂"]}], ids=str)
def test_chats_that_drafts_spell_are_those_of_single_steps(
    tokenizer: Tokenizer, text: str, fields: dict[str, Any]
) -> None:
    """Several tokens of a step are a part of a character, or the end and more."""
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, **fields}
    request = parse_chat_request(msgspec.json.encode(body))
    output = [*tokenizer.encode(text, add_special_tokens=False).ids, END_ID]
    rows = torch.nn.functional.one_hot(torch.tensor(output), 512).float()

    def answered_by(depth: int) -> list[StepOutput]:
        run = run_of(request, tokenizer, tokenizer.encode("user: ").ids, [])
        steps: list[StepOutput] = []
        while not steps or steps[-1].finish_reason is None:
            at = len(steps)
            drafts = output[at : at + depth][: len(output) - at - 1]
            wrong = [*drafts[:-1], 300] if drafts and at % 3 == 0 else drafts
            steps += run.step(rows[at : at + 1 + len(wrong)], wrong)
            run.sequence.token_ids += [
                token_id for step in steps[at:] for token_id in step.token_ids
            ]
        return steps

    single = answered_by(0)

    assert len(single) > 5
    for depth in (1, 2, 5, 8, 40):
        assert answered_by(depth) == single


def test_a_token_of_half_a_character_has_empty_content(tokenizer: Tokenizer) -> None:
    """vLLM does the same: `text += delta.content` fails where a client finds none."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    request = parse_chat_request(msgspec.json.encode(body))
    output = [*tokenizer.encode("🙂 é 🚀", add_special_tokens=False).ids, END_ID]

    events = [json.loads(event) for event in forced(request, tokenizer, "x", output, 0)]

    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta["content"] for delta in deltas) == "🙂 é 🚀"
    assert "" in [delta["content"] for delta in deltas[1:-1]]
    choice = CHAT.choice(TextDelta(""))
    assert isinstance(choice, ChatChunkChoice)
    assert choice.delta.content == ""


@pytest.mark.parametrize("text", ["日本 🙂 é and 🚀", "one two three END", "one EN", "é END"])
@pytest.mark.parametrize("stop", [None, ["END", "三"], ["o three E", " "]])
def test_completions_continue_at_every_cut(
    tokenizer: Tokenizer, text: str, stop: list[str] | None
) -> None:
    """Stop strings that straddle the cut, and characters that do."""
    request = parse_completion_request(
        msgspec.json.encode(
            {"prompt": "x", "stop": stop, "return_token_ids": True, "max_tokens": 200}
        )
    )
    output = [*tokenizer.encode(text, add_special_tokens=False).ids, END_ID]
    whole = forced(request, tokenizer, "x", output, 0)

    for cut in range(1, len(whole) - 1):
        assert forced(request, tokenizer, "x", output, cut) == whole[cut:]


def answered(
    worker: Worker,
    request: CompletionRequest,
    tokenizer: Tokenizer,
    prompt: list[int],
    outputs: list[list[int]],
) -> list[list[StepOutput]]:
    """The whole outputs of an engine after these histories, which are in one batch; it computes
    each history in two pieces, then token by token.
    """
    runs = [run_of(request, tokenizer, prompt, output) for output in outputs]
    histories = [run.sequence.token_ids for run in runs]
    room = (worker.pool.pages - 1) // len(runs)
    pages = [range(room * n, room * (n + 1)) for n in range(len(runs))]
    computed = [len(token_ids) // 2 for token_ids in histories]
    worker.execute(
        [
            Chunk(token_ids[:half], 0, own, logits=0)
            for token_ids, half, own in zip(histories, computed, pages, strict=True)
        ]
    )
    steps: list[list[StepOutput]] = [[] for _ in runs]
    # Another sequence in the batch, so that a row does not always stand in the same place.
    neighbour = Chunk([7], 0, [worker.pool.pages - 1], logits=1)
    going = [*range(len(runs))]
    while going:
        chunks = [
            Chunk(histories[n][computed[n] :], computed[n], pages[n], logits=1) for n in going
        ]
        for n, logits in zip(going, worker.execute([neighbour, *chunks])[1:], strict=True):
            computed[n] = len(histories[n])
            steps[n] += runs[n].step(logits[None])
            histories[n] += steps[n][-1].token_ids
        going = [n for n in going if steps[n][-1].finish_reason is None]
    return steps


@pytest.fixture(scope="module")
def worker(tiny_model: Path) -> Worker:
    return Worker(tiny_model, EngineSettings(pages=256))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_on_the_worker_every_cut_continues_exactly(
    worker: Worker, tokenizer: Tokenizer, sampling: str
) -> None:
    """The sampled ids, their probabilities, the text and the end are functions of the history; all
    cuts are in one batch, the whole is alone.
    """
    body = {"prompt": "x", "max_tokens": MAX_TOKENS, "logprobs": 5, **SAMPLINGS[sampling]}
    request = parse_completion_request(msgspec.json.encode(body))
    prompt = tokenizer.encode(PROMPT).ids
    (whole,) = answered(worker, request, tokenizer, prompt, [[]])
    output = [token_id for step in whole for token_id in step.token_ids]

    cuts = range(1, len(whole))
    continued = answered(worker, request, tokenizer, prompt, [output[:cut] for cut in cuts])
    assert continued == [whole[cut:] for cut in cuts]


@pytest.mark.parametrize(
    ("text", "fields", "output_text", "reason"),
    [
        ("one EN", {"stop": "END", "max_tokens": 0}, "EN", "length"),
        ("one EN", {"stop": "END"}, "EN", "stop"),
        ("one END", {"stop": "END"}, "", "stop"),
    ],
)
def test_a_complete_history_gets_what_was_held_back(
    tokenizer: Tokenizer, text: str, fields: dict[str, Any], output_text: str, reason: str
) -> None:
    """An engine may have died between its last token and the finish reason."""
    output = tokenizer.encode(text, add_special_tokens=False).ids
    if reason == "stop" and output_text:
        output.append(END_ID)
    body = {"prompt": "x", **fields, "max_tokens": len(output) if "max_tokens" in fields else 100}
    request = parse_completion_request(msgspec.json.encode(body))

    run = run_of(request, tokenizer, [5, 6], output)

    assert run.ending is not None
    assert (run.ending.token_ids, run.ending.delta.text, run.ending.finish_reason) == (
        [],
        output_text,
        reason,
    )


async def events_of(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[bytes]:
    """All events of a stream. Its name and its time of creation are taken out, which are no part of
    what is compared.
    """
    async with client.post(path, json={**body, "stream": True}) as response:
        raw = await response.read()
        assert response.status == 200, raw
    raw = raw.replace(body["kvrs"]["stream"].encode(), b"STREAM")
    return re.sub(rb'"created":\d+', b'"created":0', raw).split(b"\n\n")[:-1]


def ids_in(events: list[bytes]) -> list[int]:
    payloads = [json.loads(event[6:]) for event in events if event != b"data: [DONE]"]
    return [
        token_id
        for payload in payloads
        for choice in payload["choices"]
        for token_id in choice.get("token_ids", [])
    ]


def finish_of(events: list[bytes]) -> tuple[str, Any]:
    """Finish and stop reason of the event before usage and [DONE]."""
    choice = json.loads(events[-3][6:])["choices"][0]
    return choice["finish_reason"], choice["stop_reason"]


def stop_in_the_middle(events: list[bytes]) -> str:
    """A stop string of several tokens that this output would run into."""
    payloads = [json.loads(event[6:]) for event in events[:-2]]
    choices = [choice for payload in payloads for choice in payload["choices"]]
    text = "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
    )
    return text[len(text) // 2 :][:5]


@pytest.mark.parametrize(
    "endpoint", [pytest.param("completions", marks=pytest.mark.nightly), "chat/completions"]
)
async def test_over_http_every_cut_continues_exactly(tiny_model: Path, endpoint: str) -> None:
    """Same bytes for ids, text, log probabilities, finish and usage, but for what the first attempt
    had cached, which a later one does not know; all cuts run at once, so in other batches than the
    whole.
    """
    chat = endpoint.startswith("chat")
    async with serving(tiny_model) as (instance, client):
        for name, sampling in SAMPLINGS.items():
            body: dict[str, Any] = {
                **sampling,
                "max_tokens": MAX_TOKENS,
                "return_token_ids": True,
                "stream_options": {"include_usage": True},
                **(
                    {"messages": [{"role": "user", "content": PROMPT}]}
                    if chat
                    else {"prompt": PROMPT}
                ),
                **({"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}),
            }
            if chat:
                template = instance.chat_template
                assert template is not None
                asked = json.dumps(body | {"stream": True}).encode()
                text = template.render(parse_chat_request(asked))
                prompt = instance.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
            else:
                prompt = instance.vocabulary.tokenizer.encode(PROMPT).ids

            await _compare_cuts(client, f"/v1/{endpoint}", body, prompt, name, chat=chat)
        instance.pages.check()


async def _compare_cuts(
    client: aiohttp.ClientSession,
    path: str,
    body: dict[str, Any],
    prompt: list[int],
    name: str,
    *,
    chat: bool,
) -> None:
    plain = await events_of(
        client, path, {**body, "kvrs": {"stream": "plain", "attempt": 1, "prompt_tokens": 0}}
    )
    for stop in (None, stop_in_the_middle(plain)):
        asked = {**body, "stop": stop}
        first = {"stream": "whole", "attempt": 1, "prompt_tokens": 0}
        whole = await events_of(client, path, {**asked, "kvrs": first})
        whole[-2] = re.sub(rb',"prompt_tokens_details":{"cached_tokens":\d+}', b"", whole[-2])
        output = ids_in(whole)
        opening = 1 if chat else 0
        assert stop is None or b'"finish_reason":"stop"' in whole[-3], (
            f"{name}: stop string {stop!r} was never hit"
        )
        assert len(whole) == opening + len(output) + 2, (
            "the last token and the finish reason come in one event"
        )

        def resume(
            cut: int, asked: dict[str, Any] = asked, output: list[int] = output
        ) -> dict[str, Any]:
            kvrs = {"stream": f"cut-{cut}-", "attempt": 2, "prompt_tokens": len(prompt)}
            history = prompt + output[:cut]
            return (
                {**asked, "kvrs": {**kvrs, "token_ids": history}}
                if chat
                else {**asked, "prompt": history, "kvrs": kvrs}
            )

        cuts = range(1, len(output))
        resumed = await asyncio.gather(*(events_of(client, path, resume(cut)) for cut in cuts))
        for cut, events in zip(cuts, resumed, strict=True):
            assert events == whole[opening + cut :], f"{name}, stop {stop!r}, cut {cut}"
        _, *formal_end = ending = await events_of(client, path, resume(len(output)))
        assert ids_in(ending) == []
        assert finish_of(ending) == finish_of(whole), (
            "a history that is complete gets its formal end and no more tokens"
        )
        assert formal_end == whole[-2:]
