"""Drafts that a request proposes itself, as those of self-tests do."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.protocol.instance import MOST_DRAFTS
from kvrs_testkit.turning_experts import BAD_ID, write_turning_model
from tests.engine.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.network]

PROMPT = [(7 * at * at + 3) % 500 + 2 for at in range(33)]
TOKENS, CUT = 12, 5


async def ids(
    client: aiohttp.ClientSession, output: list[int], heat: float, drafts: list[int], attempt: int
) -> list[int]:
    """The tokens behind the prompt and this output."""
    params = {"stream": f"s{heat}", "attempt": attempt, "prompt_tokens": len(PROMPT)}
    body: dict[str, Any] = {"prompt": [*PROMPT, *output], "max_tokens": TOKENS, "temperature": heat}
    body |= {"seed": 4, "ignore_eos": True, "return_token_ids": True}
    body["kvrs"] = params | ({"drafts": drafts} if drafts else {})
    async with client.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: list[int] = (await answer.json())["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("source", ["draft", "off"])
@pytest.mark.parametrize("heat", [0.0, 1.0])
async def test_drafts_of_a_request_are_verified_while_its_source_is_silent(
    tiny_model: Path, source: str, heat: float
) -> None:
    """A wrong one ends its step; the next step takes those that lie behind it."""
    speculation = {"source": source, "draft": str(tiny_model)}
    async with serving(tiny_model, speculation=speculation) as (instance, client):
        whole = await ids(client, [], heat, [], attempt=1)
        drafts = whole[CUT:]
        drafts[3] = (drafts[3] + 1) % 500
        rest = await ids(client, whole[:CUT], heat, drafts, attempt=2)
        report = instance.load().speculation

        assert whole[CUT:] == rest
        if source == "off":
            assert report is None
        else:
            assert report is not None
            assert not report.active
            # The first token needs no draft. Of five, two are right; of the last two, both.
            assert (report.steps, report.proposed, report.accepted) == (2, 7, 4)


@pytest.mark.parametrize(
    ("drafts", "named"),
    [([1, 512], "512"), ([1] * (MOST_DRAFTS + 1), "64"), ([-1], "drafts"), (["a"], "drafts")],
)
async def test_drafts_that_cannot_be_any_are_refused(
    tiny_model: Path, drafts: list[Any], named: str
) -> None:
    """The engine serves on."""
    async with serving(tiny_model) as (_, client):
        params = {"stream": "s", "attempt": 1, "prompt_tokens": 3, "drafts": drafts}
        body = {"prompt": [1, 2, 3], "max_tokens": 3, "kvrs": params}
        async with client.post("/v1/completions", json=body) as answer:
            assert answer.status == 400
            message = (await answer.json())["error"]["message"]
        assert "drafts" in message
        assert named in message
        assert len(await ids(client, [], 0.0, [], attempt=1)) == TOKENS


@pytest.mark.parametrize("heat", [0.0, 1.0])
async def test_a_draft_behind_which_nothing_is_a_number_spoils_no_token(
    tmp_path: Path, heat: float
) -> None:
    """Rows of a chunk weigh what comes behind them by zero, and so do later steps what is left in
    the page; zero times what is no number is none.
    """
    write_turning_model(tmp_path / "model")
    speculation = {"source": "draft", "draft": str(tmp_path / "model")}
    async with serving(tmp_path / "model", speculation=speculation) as (instance, client):
        whole = await ids(client, [], heat, [], attempt=1)
        for right in range(3):
            drafts = [*whole[CUT + 1 :][:right], *[BAD_ID] * 5]
            rest = await ids(client, whole[:CUT], heat, [0, *drafts], attempt=2 + right)
            assert rest == whole[CUT:]
        report = instance.load().speculation
    assert report is not None
    assert report.proposed > report.accepted
