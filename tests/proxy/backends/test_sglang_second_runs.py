"""Chats of SGLang, which have no token ids: a second run is compared by the texts of its parts."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvrs_testkit.engine_streams import recordings
from kvrs_testkit.engine_streams.reading import Answer
from kvrs_testkit.engine_streams.scripts import TOOLS
from kvrs_testkit.engine_streams.vocabulary import save_tokenizer
from kvrs_testkit.scripted import Fault
from kvrs_testkit.sglang_cluster import Servers, Sglangs
from kvrs_testkit.sse import events_of

Builder = Callable[..., Awaitable[Sglangs]]
CALLS = recordings("sglang")["sglang-tools-hermes-thought-deepseek-r1"]
ASKED = {
    "messages": [{"role": "user", "content": "a"}],
    "temperature": 0,
    "stream": True,
    "tools": TOOLS,
}


async def built(sglangs: Builder, models: Path, **sections: Any) -> Sglangs:
    def prepare(servers: Servers) -> None:
        for each in servers.values():
            each.recording = CALLS

    save_tokenizer(models)  # The model's directory of the fixture.
    system = await sglangs(
        prepare=prepare,
        proxy={"self_test": True},
        policy={"recovery": {"wait_s": 0.3}},
        **sections,
    )
    system.shared.prompt_tokens = len(CALLS.prompt_ids)
    return system


async def answer(system: Sglangs, **fields: Any) -> tuple[Answer, list[str]]:
    """The message and the events of an answer."""
    url = f"{system.url}/v1/chat/completions"
    async with system.http.post(url, json=ASKED | fields) as got:
        assert got.status == 200, await got.read()
        events = [each[6:].decode() for each in events_of(await got.read()) if each]
    return Answer.of([each for each in events if '"choices"' in each]), events


@pytest.mark.parametrize("cut_at", [3, 20, len(CALLS.ids) - 2])
async def test_an_equal_server_says_the_known_parts_again(
    sglangs: Builder, tmp_path: Path, cut_at: int
) -> None:
    """The thought, the text and each call go on where they were, with the first call's own id. The
    recovery's row counts events, as there are no ids.
    """
    system = await built(sglangs, tmp_path)
    calm, _ = await answer(system)
    assert calm == CALLS.answer
    system.shared.faults = {cut_at: Fault.RESET}

    said, events = await answer(system)

    assert said == calm
    assert events[-1] == "[DONE]"
    (recovery,) = (await system.state())["recoveries"]
    assert recovery["option"] == "replay"
    assert recovery["produced_tokens"] > 0
    assert system.shared.violations == []


async def test_drawn_tokens_without_ids_end_with_an_error(sglangs: Builder, tmp_path: Path) -> None:
    """SGLang's requests share a generator, so no second run draws the same."""
    system = await built(sglangs, tmp_path)
    system.shared.faults = {20: Fault.RESET}

    _, events = await answer(system, temperature=0.7)

    assert json.loads(events[-1])["error"]["code"] == "inexact"


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_client_that_comes_back_gets_each_part_once(
    sglangs: Builder, tmp_path: Path, is_cut: bool
) -> None:
    """By its key: the record has the texts, and without ids the begun stream is a second run."""
    system = await built(sglangs, tmp_path)
    calm, _ = await answer(system)
    system.shared.pause_s = 0.02
    url, key = f"{system.url}/v1/chat/completions", {"Idempotency-Key": "k"}
    async with system.http.post(url, json=ASKED, headers=key) as got:
        begun = b""
        while begun.count(b"data: ") < 12:
            begun += await got.content.readany()
        got.close()
    system.shared.pause_s = 0.0
    if is_cut:
        system.shared.faults = {30: Fault.RESET}
    async with system.http.post(url, json=ASKED, headers=key) as got:
        assert got.status == 200
        lines = (await got.read()).decode().splitlines()

    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert Answer.of([each for each in events if '"choices"' in each]) == calm
