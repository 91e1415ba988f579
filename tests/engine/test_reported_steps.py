"""The times of steps that a real engine reports."""

from pathlib import Path

import pytest

from kvrs.protocol.instance import LoadReport
from kvrs_engine.scheduling.step_times import MOST
from tests.engine.peers import SMALL, peer_engines

# Of its table, prompts of 200 tokens take more than half of a step.
PROFILE = "opt-66b-a100-distserve-tp2"

pytestmark = [pytest.mark.engine, pytest.mark.network]


async def test_an_engine_reports_what_its_steps_take(tiny_model: Path) -> None:
    """Nothing before it has computed; then a time of each kind of step."""
    async with peer_engines([tiny_model], pace=PROFILE) as (engine,):
        declared, reports = engine.instance.info(), list[LoadReport]()
        for at in range(4):
            reports.append(engine.instance.load())
            prompt = [3 + at + position * 7 % 400 for position in range(200)]
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            kvrs = {"stream": f"s{at}", "attempt": 1, "prompt_tokens": 200}
            await engine.answer(body | {"kvrs": kvrs})
        reports.append(engine.instance.load())

    assert (reports[0].step_s, reports[0].slowness) == (0.0, None)
    assert all(each.step_s > 0 for each in reports[1:])
    assert reports[-1].slowness is not None
    assert 1 / MOST <= reports[-1].slowness <= MOST
    assert declared.step_tokens >= SMALL["page_size_tokens"]
