"""Measurement of the stages of an engine whose times are given."""

import asyncio
from types import SimpleNamespace

import pytest

from distserve_patches import measuring
from distserve_patches.jobs import Job, Stage, StageState
from distserve_patches.measuring import measure_stages
from kvrs_engine.scheduling.pages import PageManager

MODEL_S = {Stage.CONTEXT: 0.001, Stage.DECODING: 0.02}  # Of a token, and of a step.
ENGINE_S = {Stage.CONTEXT: 0.003, Stage.DECODING: 0.005}  # Of a step.
HAND_OVER_S = 0.5


class TimedEngine:
    """Computes jobs one at a time, on a clock that only its steps move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._model_s = dict.fromkeys(Stage, 0.0)

    def begin(self, job: Job) -> None:
        asyncio.get_running_loop().call_soon(self._run, job)

    def abort(self, job: Job) -> None:
        pass

    def stage(self, which: Stage) -> StageState:
        return StageState(which, PageManager(64, 16))

    async def model_s(self, which: Stage) -> float:
        return self._model_s[which]

    def _run(self, job: Job) -> None:
        self._step(Stage.CONTEXT, len(job.history))
        wants_more = job.sink.token(0)
        if wants_more:
            self.now_s += HAND_OVER_S
        while wants_more:
            self._step(Stage.DECODING, 1)
            wants_more = job.sink.token(0)

    def _step(self, stage: Stage, tokens: int) -> None:
        model_s = MODEL_S[stage] * tokens
        self.now_s += model_s + ENGINE_S[stage]
        self._model_s[stage] += model_s


async def test_the_part_of_a_step_beside_the_model_is_measured_of_each_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table of the model alone lacks it. The tables that are measured have whole steps."""
    engine = TimedEngine()
    clock = SimpleNamespace(perf_counter=lambda: engine.now_s)
    monkeypatch.setattr(measuring, "time", clock)

    times = await measure_stages(engine, max_model_len=528)

    context, decoding = times[Stage.CONTEXT], times[Stage.DECODING]
    assert context.engine_step_s == pytest.approx(ENGINE_S[Stage.CONTEXT])
    assert decoding.engine_step_s == pytest.approx(ENGINE_S[Stage.DECODING])
    assert context.table.seconds_for(256) == pytest.approx(0.256 + 0.003)
    assert decoding.table.seconds_for(64) == pytest.approx(64 * 0.025)
