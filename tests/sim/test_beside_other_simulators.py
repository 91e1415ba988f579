"""Inputs of the comparisons with other simulators, without these."""

from pathlib import Path

import pytest

from experiments.simulator import beside, splitwise
from experiments.simulator.beside import Asked, Differences
from kvrs.profiles import catalog
from kvrs_lab.sim.site import LATENCY_S


def measured(prompt: int, batch: int, prompt_ms: float, step_ms: float) -> dict[str, str]:
    return {
        "model": splitwise.MODEL,
        "hardware": splitwise.GPU,
        "tensor_parallel": str(splitwise.GPUS),
        "prompt_size": str(prompt),
        "batch_size": str(batch),
        "prompt_time": str(prompt_ms),
        "token_time": str(step_ms),
    }


ROWS = [
    measured(128, 1, 60.0, 40.0),
    measured(128, 1, 64.0, 44.0),
    measured(128, 1, 99.0, 41.0),
    measured(128, 2, 72.0, 42.28),
    measured(128, 4, 96.0, 45.0),
    measured(512, 1, 96.0, 45.0),
    {**measured(128, 1, 1.0, 1.0), "tensor_parallel": "2"},
]


@pytest.fixture
def pace(tmp_path: Path) -> str:
    return splitwise.profile_of(*splitwise.measurements(ROWS), tmp_path)


def test_splitwises_measurements_are_a_profile(pace: str) -> None:
    """Medians by tokens of a batch, with lines between and before them; a step has none of its
    contexts.
    """
    prefill, decode = catalog.prefill_table(pace), catalog.decode_table(pace)

    assert prefill.seconds_for(128) == pytest.approx(0.064)
    assert prefill.seconds_for(192) == pytest.approx(0.068)
    assert prefill.seconds_for(64) == pytest.approx(0.060)
    assert decode.seconds_for(256, 256 * 3000) == pytest.approx(0.04228)
    assert decode.seconds_for(28, 28 * 5) == pytest.approx(0.0400)
    assert catalog.kv_geometry(pace).bytes_per_token == 2 * 8192 * 80 * 2


def test_with_all_differences_off_a_request_takes_the_other_simulators_time(pace: str) -> None:
    """Prefill has the first token; then its bytes pass, and a step follows for each token."""
    found = beside.ours([Asked(0.5, 512, 4)], Differences(), pace, splitwise.LINK_BYTES_PER_S)

    hand_off_s = 512 * catalog.kv_geometry(pace).bytes_per_token / splitwise.LINK_BYTES_PER_S
    step_s = catalog.decode_table(pace).seconds_for(1, 512)
    assert found.ttft_s == pytest.approx([0.096])
    # A message each way, which theirs does not have.
    assert found.tpot_s == pytest.approx([step_s + (hand_off_s + 2 * LATENCY_S) / 4])


@pytest.mark.parametrize(
    ("differ", "more_ttft_s", "more_tpot_s"),
    [
        (Differences(hand_off=True), 0.0, 0.1),
        (Differences(network=True), 0.0002, 0.0),
        (Differences(first_token=True), 0.04, 0.0),
        (Differences(chunks=True), 0.05, 0.0),
    ],
)
def test_each_difference_shows_by_itself(
    pace: str, differ: Differences, more_ttft_s: float, more_tpot_s: float
) -> None:
    """A switch that changes nothing would hide a difference."""
    asked = [Asked(0.5, 1024, 4)]
    rate = splitwise.LINK_BYTES_PER_S

    off, on = (beside.ours(asked, each, pace, rate) for each in (Differences(), differ))

    assert on.ttft_s[0] - off.ttft_s[0] >= more_ttft_s
    assert on.tpot_s[0] - off.tpot_s[0] >= more_tpot_s or not more_tpot_s
