"""`kvrs_lab.load.pace` and the report's sentence on it."""

from typing import Any

import pytest

from kvrs.profiles.catalog import decode_table
from kvrs_lab.load.pace import decode_factors, prompt_factors
from kvrs_lab.report.pace import pace_of, pace_sentence

PROFILE = "opt-66b-a100-distserve-tp2"


def stream(stage: str, decode: str) -> dict[str, Any]:
    return {"stage": stage, "decode": decode, "prompt_tokens": 100, "output_tokens": 20}


def test_a_reported_step_is_compared_with_the_profiles_for_as_many_streams() -> None:
    """Streams that do not decode are in no step, and an instance without streams makes none."""
    table = decode_table(PROFILE)
    state = {
        "streams": [stream("decode", "d0"), stream("decode", "d0"), stream("prefill", "d0")],
        "instances": [
            {"id": "d0", "load": {"step_s": 2 * table.seconds_for(2, 240), "slowness": 1.5}},
            {"id": "d1", "load": {"step_s": 9.0}},
            {"id": "d2", "load": None},
        ],
    }

    assert [*decode_factors(state, table)] == pytest.approx([2.0])
    assert [*prompt_factors(state)] == [1.5]


@pytest.mark.parametrize(
    ("decodes", "prompts", "said"),
    [
        (
            [1.0, 1.02, 9.0],
            [],
            f"kept the pace of {PROFILE}: steps took 1.02 times the profile's (at most 9.00).",
        ),
        (
            [1.0],
            [2.4],
            "times the profile's (at most 1.00), those with prompts 2.40. Predictions are of the",
        ),
        ([2.4], [1.0], f"did not keep the pace of {PROFILE}: steps took 2.40 times"),
    ],
)
def test_a_report_says_whether_steps_took_the_profiles_time(
    decodes: list[float], prompts: list[float], said: str
) -> None:
    """On a slower machine predictions are off for that reason."""
    sentence = pace_sentence({"pace": pace_of(PROFILE, decodes, prompts)})

    assert sentence is not None
    assert said in sentence


def test_a_pace_that_no_instance_reported_is_not_mentioned() -> None:
    """A replay in front of other servers has no profile to keep."""
    assert pace_sentence({}) is None
    assert pace_sentence({"pace": pace_of(PROFILE, [], [])}) is None
