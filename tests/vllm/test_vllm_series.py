"""The series `decode vllm` of `experiments/kills` at full size: 100 streams for each option."""

from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.kills.vllm import kill_series
from experiments.kills.vllm_figures import faults_of
from kvrs_testkit.vllm_servers import VllmServers
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

AS_CLAIMED: dict[str, Any] = {
    "option": "migrate",
    "streams": 30,
    "hit": 20,
    "exact": 30,
    "recoveries": {"migrate": 20},
    "moved_tokens": 2000,
    "pulled_tokens": 2000,
    "bystanders_harmed": 0,
    "engines_ended": 0,
}


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({}, 0),
        ({"pulled_tokens": 1999}, 1),
        ({"option": "recompute", "recoveries": {"recompute": 20}}, 1),
        ({"option": "recompute", "recoveries": {"recompute": 20}, "pulled_tokens": 0}, 0),
        ({"recoveries": {"migrate": 19, "recompute": 1}}, 1),
        ({"exact": 29}, 1),
        ({"hit": 7, "recoveries": {"migrate": 7}}, 1),
        ({"bystanders_harmed": 1}, 1),
        ({"engines_ended": 1}, 1),
    ],
    ids=[
        "as-claimed",
        "not-all-pulled",
        "pulled-while-recomputing",
        "recomputed",
        "by-another-option",
        "inexact",
        "few-hit",
        "a-bystander-harmed",
        "an-engine-ended",
    ],
)
def test_an_option_is_proven_by_what_was_pulled(change: dict[str, Any], faults: int) -> None:
    """Migrated: the other server pulled all of it. Recomputed: the other server pulled nothing."""
    assert len(faults_of(AS_CLAIMED | change)) == faults


def test_a_series_names_the_directory_of_its_results() -> None:
    """A default would let a test overwrite the results that are kept in the repository."""
    assert signature(kill_series).parameters["results"].default is Parameter.empty


def test_every_stream_survives_every_death_by_either_option(
    vllm_servers: VllmServers, tmp_path: Path
) -> None:
    """Token for token, and with the text, finish and usage of the undisturbed run."""
    console = Console(record=True, width=130)

    faults = kill_series(vllm_servers, streams=100, seed=1, console=console, results=tmp_path)

    assert faults == []
