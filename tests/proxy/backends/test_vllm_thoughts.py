"""Streams of reasoning models: where they are cut decides how they go on."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvrs_testkit.engine_streams import Recording, recordings
from kvrs_testkit.engine_streams.reading import Answer
from kvrs_testkit.engine_streams.vocabulary import save_tokenizer
from kvrs_testkit.scripted import Fault
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import Builder, Servers, Vllms

THOUGHT = recordings("vllm")["vllm-thought-qwen3"]
ASKED = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "stream": True}


async def built(
    vllms: Builder, models: Path, recording: Recording = THOUGHT, **sections: Any
) -> Vllms:
    """A proxy with the tokenizer of the recordings, before servers that play one of them."""

    def prepare(servers: Servers) -> None:
        for each in servers.values():
            each.recording = recording

    save_tokenizer(models)
    proxy = {"self_test": True} | sections.pop("proxy", {})
    cluster = {"model": str(models)}
    policy = {"recovery": {"wait_s": 0.3}, "name": "always_recompute"}
    system = await vllms(prepare=prepare, proxy=proxy, cluster=cluster, policy=policy, **sections)
    system.shared.prompt_tokens = len(recording.prompt_ids)
    return system


async def answer(system: Vllms, **fields: Any) -> tuple[Answer, list[str], dict[str, str]]:
    """The message, the events and the heads of an answer."""
    url = f"{system.url}/v1/chat/completions"
    async with system.http.post(url, json=ASKED | fields) as got:
        assert got.status == 200, await got.read()
        events = [each[6:].decode() for each in events_of(await got.read()) if each]
    said = Answer.of([each for each in events if '"choices"' in each])
    return said, events, dict(got.headers)


CONTENT_AT = next(
    covered - 1
    for covered, data in zip(THOUGHT.covered, THOUGHT.data, strict=True)
    if '"content":"' in data and '"content":""' not in data
)


@pytest.mark.parametrize(
    ("cut_at", "option"),
    [(2, "replay"), (CONTENT_AT - 1, "replay"), (CONTENT_AT + 2, "recompute")],
    ids=["in the thought", "before the answer", "in the answer"],
)
async def test_a_thought_is_generated_again_and_an_answer_goes_on_from_its_ids(
    vllms: Builder, tmp_path: Path, cut_at: int, option: str
) -> None:
    """Nothing of the thought is told as the answer, and nothing twice."""
    system = await built(vllms, tmp_path)
    calm, _, _ = await answer(system)
    assert (calm.reasoning, calm.content) == (THOUGHT.reasoning, THOUGHT.content)
    system.shared.faults = {cut_at: Fault.RESET}

    said, events, _ = await answer(system)

    assert said == calm
    assert events[-1] == "[DONE]"
    assert [row["option"] for row in (await system.state())["recoveries"]] == [option]
    assert system.shared.violations == []


async def test_heads_warn_once_a_server_is_known_to_parse_thoughts(
    vllms: Builder, tmp_path: Path
) -> None:
    """The first stream shows it, and cannot have been marked."""
    system = await built(vllms, tmp_path)

    heads = [(await answer(system))[2] for _ in range(2)]

    marks = [head.get("X-Kvrs-Inexact") for head in heads]
    assert marks == [None, "reasoning"]


async def test_what_may_hold_a_thought_is_refused_where_that_is_wanted(
    vllms: Builder, tmp_path: Path
) -> None:
    """`proxy.inexact: refuse` means all that only a second run continues."""
    system = await built(vllms, tmp_path, proxy={"inexact": "refuse"})

    await answer(system)
    status, body = await system.ask(ASKED)

    assert status == 400
    assert json.loads(body)["error"]["param"] == "reasoning"


async def test_without_an_equal_server_a_cut_thought_ends_with_an_error(
    vllms: Builder, tmp_path: Path
) -> None:
    """The head had promised exact tokens, and no other server is tested."""
    system = await built(vllms, tmp_path, proxy={"self_test": False})
    system.shared.faults = {2: Fault.RESET}

    said, events, _ = await answer(system)

    assert json.loads(events[-1])["error"]["code"] == "inexact"
    assert not said.content
    assert THOUGHT.reasoning.startswith(said.reasoning)


@pytest.mark.parametrize(
    "name", [name for name in recordings("vllm") if name.startswith("vllm-thought")]
)
async def test_marks_that_a_parser_takes_or_shows_change_nothing(
    vllms: Builder, tmp_path: Path, name: str
) -> None:
    """Some read the answer's end too, or show the begin of the thought as content: the complete
    answer before has shown that, and the cut one is generated again.
    """
    recording = recordings("vllm")[name]
    system = await built(vllms, tmp_path, recording)
    calm, _, _ = await answer(system)
    assert (calm.content, calm.reasoning) == (recording.content, recording.reasoning)

    for cut_at in range(1, len(recording.ids), 4):
        system.shared.faults = {cut_at: Fault.RESET}
        said, events, _ = await answer(system)
        assert (said, events[-1]) == (calm, "[DONE]"), cut_at
