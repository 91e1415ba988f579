"""The tokens that end a stream: those of the configuration that the model can produce."""

import json
from pathlib import Path

import pytest

from kvrs.engine.tiny import write_tiny_model
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
