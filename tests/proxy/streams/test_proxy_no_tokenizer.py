"""Streams of plain engines at a proxy that has no tokenizer."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.errors import ConfigError
from kvrs_testkit.scripted import Cut, Fault, Scripted
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder


def plain(instances: dict[str, Scripted]) -> None:
    for instance in instances.values():
        instance.capabilities = []


def said(body: bytes) -> tuple[str, list[int], str]:
    """Text, ids and finish reason of a stream."""
    events = [msgspec.json.decode(event[6:]) for event in events_of(body)[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(
        choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        for choice in choices
    )
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    return text, ids, choices[-1]["finish_reason"]


@pytest.fixture(params=["no model", "no tokenizer", "slow tokenizer"])
def bare_model(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """`cluster.model` of a proxy that cannot turn ids into text."""
    if request.param == "no model":
        return None
    if request.param == "slow tokenizer":
        (tmp_path / "tokenizer.model").write_bytes(b"\n\x05 of SentencePiece")
    return str(tmp_path)


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "a", "logprobs": 1},
        {"messages": [{"role": "user", "content": "a"}]},
    ],
    ids=["completion", "chat"],
)
async def test_without_a_tokenizer_a_cut_stream_goes_on_with_the_text_of_its_engines(
    build: ProxyClusterBuilder, bare_model: str | None, asked: dict[str, Any]
) -> None:
    """The stream is marked, or refused on arrival; it is never ended by a cut."""
    refusing = await build(pairs=1, model=bare_model, proxy={"inexact": "refuse"}, prepare=plain)
    system = await build(model=bare_model, prepare=plain)
    asked = {"temperature": 0, "stream": True, "return_token_ids": True, "max_tokens": 9} | asked
    _, whole = await system.complete(**asked)
    system.script.cuts["cut"] = Cut(Fault.RESET, 3)

    assert (await refusing.complete(**asked))[0] == 400
    async with system.http.post(
        f"{system.url}/v1/{'chat/' if 'messages' in asked else ''}completions",
        json=asked | {"user": "cut"},
    ) as response:
        cut = await response.read()
        assert response.headers["x-kvrs-exact"] == "no"

    assert "cut" not in system.script.cuts
    assert cut.endswith(b"data: [DONE]\n\n")
    assert said(cut) == said(whole)


async def test_without_a_tokenizer_stop_strings_after_a_cut_still_count(
    build: ProxyClusterBuilder,
) -> None:
    """A plain engine that counts from the cut is not told of them."""
    system = await build(prepare=plain)
    asked = {"prompt": "play stops.", "stop": ["STOP"], "temperature": 0, "stream": True}
    asked |= {"max_tokens": 60, "return_token_ids": True}
    text, _, reason = said((await system.complete(**asked))[1])
    system.script.cuts["cut"] = Cut(Fault.RESET, 1)

    _, cut = await system.complete(**asked, user="cut")

    assert reason == "stop"
    assert (said(cut)[0], said(cut)[2]) == (text, reason)


async def test_without_a_tokenizer_a_stream_that_lacks_only_its_end_gets_it(
    build: ProxyClusterBuilder,
) -> None:
    """All its ids are there, so no engine is asked for more."""
    system = await build(prepare=plain)
    system.script.separate_finish = True
    asked = {"prompt": "a", "temperature": 0, "stream": True, "max_tokens": 5}
    asked |= {"return_token_ids": True}
    whole = said((await system.complete(**asked))[1])
    system.script.finish_faults = [Fault.RESET]

    _, cut = await system.complete(**asked)

    assert cut.endswith(b"data: [DONE]\n\n")
    assert said(cut) == whole


async def test_a_missing_tokenizer_is_named_when_the_proxy_starts(
    build: ProxyClusterBuilder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at the first failure; and what mends it is said."""
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05 of SentencePiece")

    await build(pairs=1, model=str(tmp_path))

    (found,) = [record for record in caplog.records if "tokenizer.json" in record.message]
    assert vars(found)["model"] == tmp_path
    assert "tokenizer.model" in vars(found)["remedy"]


async def test_a_broken_tokenizer_refuses_the_start(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """It would otherwise be found by the first stream that is cut."""
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        await build(pairs=1, model=str(tmp_path))
