"""Measurement of DistServe's stages before they take requests: a prompt of a few lengths, and a
decoding step, each with the part of it that the engine takes beside the model.

The measurement sends jobs to the engine, as the server does, so the module needs no DistServe.
"""

import asyncio
import itertools
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from distserve_patches.jobs import Job, Stage, StageState
from kvrs.errors import KvrsError
from kvrs.profiles.tables import PrefillTable
from kvrs_engine.engine.warm_up import WARM_UP_REPEATS, warm_up_lengths

log = logging.getLogger(__name__)

WARM_UP_STEPS = 16
_TABLE_STEP_TOKENS = 64
# Ids of warm-up requests, negative unlike those of streams.
_WARM_UP_IDS = itertools.count(-1, -1)


class MeasuredEngine(Protocol):
    """The part of the engine that is measured."""

    def begin(self, job: Job) -> None: ...

    def abort(self, job: Job) -> None: ...

    def stage(self, which: Stage) -> StageState: ...

    async def model_s(self, which: Stage) -> float:
        """Return the seconds that the stage's steps so far have spent in the model."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The measured times of a stage."""

    table: PrefillTable
    engine_step_s: float  # Part of a step beside the model: schedulers, Ray, the event loop.


async def measure_stages(engine: MeasuredEngine, max_model_len: int) -> dict[Stage, StageTimes]:
    """Measure prompts through the context stage and steps of the decoding stage."""
    pages = engine.stage(Stage.CONTEXT).pages
    longest = min(max_model_len - WARM_UP_STEPS, pages.pages * pages.page_size_tokens)
    prompts = {
        at: await _prefill_s(engine, tokens) for at, tokens in warm_up_lengths(longest).items()
    }
    step = await _step_s(engine)
    log.info("measured", extra={"prefill": prompts, "step": step})
    context = PrefillTable.from_points(
        "measured at start through the context stage",
        "this instance",
        {at: prompt.taken_s for at, prompt in prompts.items()},
    )
    # Known tokens without KV are read one per step.
    steps = [step.taken_s, _TABLE_STEP_TOKENS * step.taken_s]
    decoding = PrefillTable(
        "measured at start, one decoding step a token", "this instance", _TABLE_STEP_TOKENS, steps
    )
    return {
        Stage.CONTEXT: StageTimes(context, prompts[0].beside_s),
        Stage.DECODING: StageTimes(decoding, step.beside_s),
    }


class _Taken(NamedTuple):
    taken_s: float
    beside_s: float  # The part of it beside the model.


def _median(taken_s: Sequence[float], model_s: Sequence[float]) -> _Taken:
    beside_s = [taken - model for taken, model in zip(taken_s, model_s, strict=True)]
    return _Taken(statistics.median(taken_s), max(0.0, statistics.median(beside_s)))


async def _prefill_s(engine: MeasuredEngine, tokens: int) -> _Taken:
    taken_s, model_s = [], []
    for _ in range(WARM_UP_REPEATS):
        before_s, started_s = await engine.model_s(Stage.CONTEXT), time.perf_counter()
        trial = await _try(engine, tokens=tokens, produced=1)
        taken_s.append(trial.at_s[0] - started_s)
        model_s.append(await engine.model_s(Stage.CONTEXT) - before_s)
    return _median(taken_s, model_s)


async def _step_s(engine: MeasuredEngine) -> _Taken:
    gaps_s, model_s = [], []
    for _ in range(WARM_UP_REPEATS):
        before_s = await engine.model_s(Stage.DECODING)
        trial = await _try(engine, tokens=1, produced=WARM_UP_STEPS)
        # The context stage makes token 0.
        steps = WARM_UP_STEPS - 1
        model_s.append((await engine.model_s(Stage.DECODING) - before_s) / steps)
        # The first gap includes the hand-over of blocks.
        gaps = (after - before for before, after in itertools.pairwise(trial.at_s[1:]))
        gaps_s.append(statistics.median(gaps))
    return _median(gaps_s, model_s)


@dataclass(eq=False)
class _Trial:
    """The sink of a job for measurements."""

    tokens_left: int
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    at_s: list[float] = field(default_factory=list)  # Time of each token.

    def prefilled(self) -> None:
        """Do nothing: the first token implies the event."""

    def token(self, token_id: int) -> bool:
        self.at_s.append(time.perf_counter())
        self.tokens_left -= 1
        if not self.tokens_left and not self.done.done():
            self.done.set_result(None)
        return self.tokens_left > 0

    def failed(self, stage: Stage, cause: str) -> None:
        if not self.done.done():
            self.done.set_exception(
                KvrsError(f"the {stage} stage died while it was measured: {cause}")
            )


async def _try(engine: MeasuredEngine, *, tokens: int, produced: int) -> _Trial:
    trial = _Trial(produced)
    job = Job(
        next(_WARM_UP_IDS),
        [1 + index % 8 for index in range(tokens)],
        produced,
        produced == 1,
        trial,
    )
    engine.begin(job)
    try:
        await trial.done
    finally:
        engine.abort(job)
    return trial
