"""A stream with a token that overflows leaves nothing that spoils another one."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.noted_prefill import note_prefill
from kvrs_testkit.turning_experts import BAD_ID, FIRST_IDS, write_turning_model
from tests.engine.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.network]

TOKENS = 6


async def test_a_stream_with_the_same_beginning_is_not_spoilt(tmp_path: Path) -> None:
    """The second chunk of the bad one holds the token, and begins in the middle of a page that both
    streams have.
    """
    write_turning_model(tmp_path)
    note_prefill(tmp_path)
    prompt = Random(3).choices(FIRST_IDS, k=60)
    bad = [*prompt[:33], BAD_ID, *prompt[34:]]
    body: dict[str, Any] = {"model": "any", "max_tokens": TOKENS, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True}

    async with serving(tmp_path, max_batch_tokens=20) as (instance, client):
        async with client.post("/v1/completions", json=body | {"prompt": bad}) as answer:
            refused = answer.status, await answer.json()
        async with client.post("/v1/completions", json=body | {"prompt": prompt}) as answer:
            status, found = answer.status, await answer.json()
        instance.pages.check()

    assert refused[0] == 500
    assert refused[1]["error"]["message"] == "logits at position 60: got nan; allowed: numbers"
    assert refused[1]["error"]["code"] == "not_a_number"
    assert status == 200
    assert found["choices"][0]["token_ids"] == alone(tmp_path, prompt)


def alone(model: Path, prompt: list[int]) -> list[int]:
    """By one process, without an instance."""
    worker, history, done = Worker(model, EngineSettings(pages=16)), [*prompt], 0
    while len(history) < len(prompt) + TOKENS:
        chunk = Chunk(history[done:], done, range(16), logits=1)
        done = len(history)
        history.append(int(worker.execute([chunk])[0].argmax()))
    return history[len(prompt) :]
