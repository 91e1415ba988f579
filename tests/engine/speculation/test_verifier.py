"""Drafts change when tokens come, never which: whole answers and pages, with and without."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.protocol.pages import page_tags
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.requests import GenerationRun
from tests.engine.guesses import Guesses
from tests.engine.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.network]

PAGE = 16
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
    "required": ["city", "ok"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {
        "temperature": 0.5,
        "seed": 6,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.1,
    },
    "stop": {"temperature": 1.0, "seed": 7, "stop": ["e", "un"]},
    "min_tokens": {"temperature": 1.0, "seed": 8, "min_tokens": 20, "stop_token_ids": [*range(99)]},
    "logprobs": {"temperature": 0.7, "seed": 9, "logprobs": 3},
    "json": {"temperature": 1.0, "seed": 10, "response_format": JSON, "max_tokens": 200},
}


class Filled(StepHook):
    """The KV of full pages as checkpoints are told of them, by tag."""

    def __init__(self, instance: EngineInstance) -> None:
        self._instance = instance
        self.pages: dict[bytes, bytes] = {}

    def filled(self, run: GenerationRun) -> None:
        sequence, pool = run.sequence, self._instance.worker.pool
        assert isinstance(pool, KvPool)
        full = sequence.computed_tokens // PAGE
        assert len(sequence.tags) >= full
        for tag, page in zip(sequence.tags[:full], sequence.pages, strict=False):
            self.pages[tag] = pool.tensor[page].numpy().tobytes()


Engine = tuple[EngineInstance, aiohttp.ClientSession]


@pytest.fixture
async def engines(tiny_model: Path) -> AsyncIterator[list[Engine]]:
    """Small ones: pages run short, and sequences are preempted."""
    small: dict[str, Any] = {
        "pages": 96,
        "max_model_len": 512,
        "max_batch_tokens": 48,
        "page_size_tokens": PAGE,
    }
    async with serving(tiny_model, **small) as calm, serving(tiny_model, **small) as other:
        yield [calm, other]


async def answer(client: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
    return {"choices": found["choices"], "usage": found["usage"]}


def bodies(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Streams that run beside each other."""
    return [
        {
            "prompt": [3 + at * step % 500 for at in range(20 + 9 * step)],
            "max_tokens": 60,
            "return_token_ids": True,
        }
        | asked
        for step in range(1, 9)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in {"greedy", "seeded"} else pytest.mark.nightly)
        for kind in REQUESTS
    ],
)
async def test_answers_with_drafts_are_those_without(engines: list[Engine], kind: str) -> None:
    (calm, calm_client), (other, client) = engines
    asked = bodies(REQUESTS[kind])
    expected = await asyncio.gather(*(answer(calm_client, body) for body in asked))
    guesses = Guesses([found["choices"][0]["token_ids"] for found in expected])
    histories = [[*body["prompt"], *ids] for body, ids in zip(asked, guesses.outputs, strict=True)]
    core = other.core
    core._drafts = guesses
    filled = Filled(other)
    core.hooks += [guesses, filled]

    found = await asyncio.gather(*(answer(client, body) for body in asked))

    core.hooks.remove(guesses)
    core.hooks.remove(filled)
    for one, same in zip(expected, found, strict=True):
        assert _told(one) == _told(same)
    assert guesses.accepted > 5
    assert guesses.proposed > guesses.accepted
    assert guesses.not_verified > 0, "the source learns the tokens of steps with prompts"
    await _idle(other)
    other.pages.check()
    other.core.scheduler.check()
    told = [
        (page, filled.pages[tag])
        for ids in histories
        for tag, page in zip(page_tags(calm.root(""), ids, PAGE), _pages(calm, ids), strict=True)
        if page is not None and tag in filled.pages
    ]
    assert told
    assert all(mine == theirs for mine, theirs in told), "KV of wrong drafts is in a checkpoint"
    pairs = [
        pair
        for ids in histories
        for pair in zip(_pages(calm, ids), _pages(other, ids), strict=True)
        if None not in pair
    ]
    assert pairs
    assert all(mine == theirs for mine, theirs in pairs)


def _told(found: dict[str, Any]) -> dict[str, Any]:
    """All of it, but what the prefix cache of an engine had."""
    return found | {"usage": found["usage"]["completion_tokens"]}


async def _idle(instance: EngineInstance) -> None:
    async with asyncio.timeout(30):
        while instance.core.runs:
            await asyncio.sleep(0.01)


def _pages(instance: EngineInstance, ids: Sequence[int]) -> list[bytes | None]:
    """The KV of each full page of a history, where it is still there."""
    pool, found = instance.worker.pool, list[bytes | None]()
    assert isinstance(pool, KvPool)
    for tag in page_tags(instance.root(""), list(ids), PAGE):
        held = instance.pages.match([tag])
        found.append(pool.tensor[held[0]].numpy().tobytes() if held else None)
        instance.pages.release(held)
    return found
