"""The times of an engine's steps that it reports."""

import pytest

from kvrs.profiles.tables import PrefillTable
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_engine.scheduling.step_times import ENOUGH, MOST, StepTimes

# 10 ms for each step, and 1 ms for each token.
TABLE = PrefillTable("test", "made up", 100, [0.01, 0.11, 0.21])
DECODE = Chunk([7], 99, [0], logits=1)


def prompt(tokens: int, first: int = 0) -> Chunk:
    return Chunk([7] * tokens, first, [0], logits=1)


def noted(*steps: tuple[list[Chunk], float]) -> StepTimes:
    times = StepTimes(TABLE)
    for chunks, took_s in steps:
        times.note(chunks, took_s)
    return times


def test_a_step_without_prompts_takes_the_median() -> None:
    """A process that was stopped, or that has just started, has single steps that are longer."""
    times = noted(*[([DECODE] * 3, took_s) for took_s in (9.0, 0.02, 0.03, 0.04, 7.0)])

    assert times.step_s == 0.04
    assert times.slowness is None


def test_steps_of_another_load_count_after_a_second() -> None:
    """More streams make each step longer."""
    times = noted(*[([DECODE], 0.02)] * 50, *[([DECODE] * 9, 0.05)] * 16)

    assert times.step_s == 0.05


def test_slowness_is_the_time_of_all_prompts_over_that_of_the_table() -> None:
    """One overhead of a step for all of them, behind what they have computed; decodes are part of
    the time, and have no part in the table's.
    """
    chunks = [prompt(50), DECODE, prompt(40, first=60)]

    times = noted(*[(chunks, 0.25)] * ENOUGH)

    assert times.slowness == pytest.approx(0.25 / (0.01 + 0.05 + 0.04))
    assert times.step_s == 0.0


def test_short_prompts_say_nothing_of_the_table() -> None:
    """Most of such a step is decodes, which the table does not have."""
    times = noted(*[([prompt(9), *[DECODE] * 50], 0.1)] * 20)

    assert (times.step_s, times.slowness) == (0.0, None)


def test_a_step_that_verifies_drafts_is_one_of_decoding() -> None:
    drafted = Chunk([7, 8, 9], 99, [0], logits=3, drafts=2)

    assert noted(*[([drafted], 0.03)] * ENOUGH).step_s == 0.03


def test_few_steps_are_not_reported() -> None:
    """The first ones after a start are slow."""
    fewer = ENOUGH - 1

    times = noted(*[([DECODE], 2.0)] * fewer, *[([prompt(100)], 2.0)] * fewer)

    assert (times.step_s, times.slowness) == (0.0, None)


@pytest.mark.parametrize(("took_s", "expected"), [(1e9, MOST), (1e-9, 1 / MOST)])
def test_slowness_is_bounded(took_s: float, expected: float) -> None:
    assert noted(*[([prompt(100)], took_s)] * ENOUGH).slowness == expected


def test_what_fewer_ranks_take_is_no_slowness() -> None:
    """It is reported as the factor of the prefill table."""
    times = StepTimes(TABLE)
    times.prefill_factor = 2.0

    for _ in range(ENOUGH):
        times.note([prompt(100)], 0.22)

    assert times.slowness == pytest.approx(1.0)
