"""The tokens that end a stream: those of the configuration that the model can produce, and those
that a client names.
"""

import json
from pathlib import Path

import pytest

from kvrs_engine.engine.random_model import write_tiny_model
from tests.engine.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.network]


async def test_an_end_token_beyond_the_vocabulary_harms_no_request(tmp_path: Path) -> None:
    """Fine-tuned checkpoints come with end tokens that their weights do not have; no logit stands
    for such a token.
    """
    write_tiny_model(tmp_path / "model", seed=0)
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 151645]}))
    async with serving(tmp_path / "model") as (instance, client):
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "min_tokens": 4, "temperature": 0}
        answer = await (await client.post("/v1/completions", json=body)).json()

        assert instance.worker.eos_token_ids == {2}
        assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_min_tokens_yield_where_no_token_would_be_left(
    tiny_model: Path, temperature: float
) -> None:
    """All tokens may be end tokens; a stream must go on with some token, and the engine
    with the others.
    """
    async with serving(tiny_model) as (instance, client):
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "min_tokens": 4, "temperature": temperature}
        fields = {"stop_token_ids": [*range(instance.worker.vocab_size)], "return_token_ids": True}
        answer = await (await client.post("/v1/completions", json=body | fields)).json()
        other = await client.post("/v1/completions", json=body)

        (choice,) = answer["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (1, "stop")
        assert other.status == 200
        assert instance.failed() is None
