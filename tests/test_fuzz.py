"""A few hundred mutated inputs to every parser of bytes from outside."""

import pytest

from experiments.fuzz.run import fuzz
from experiments.fuzz.targets import TARGETS, Target

INPUTS = 300


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_every_input_is_taken_or_refused_by_name(target: Target) -> None:
    """Any other exception would end a task, or the process."""
    row = fuzz(target, 10 if target.name == "yaml" else INPUTS, seed=0, crashes=None)

    assert row["first_crashes"] == []
