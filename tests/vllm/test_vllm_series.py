"""`experiments/vllm_kill_series` as it is meant to be run: 100 streams for each option."""

from typing import Any

import pytest
from rich.console import Console

from experiments.vllm_kill_series.run import faults_of, kill_series
from experiments.vllm_servers import VllmServers

BORNE_OUT: dict[str, Any] = {
    "option": "migrate",
    "streams": 30,
    "hit": 20,
    "exact": 30,
    "recoveries": {"migrate": 20},
    "moved_tokens": 2000,
    "pulled_tokens": 2000,
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
    ],
    ids=["borne-out", "not-all-pulled", "pulled-while-recomputing", "recomputed", "by-another-option", "inexact", "few-hit"],
)
def test_what_counts(change: dict[str, Any], faults: int) -> None:
    """A stream is migrated only where the other server pulled all of it, and recomputed only where it pulled nothing."""
    assert len(faults_of(BORNE_OUT | change)) == faults


def test_every_stream_survives_every_death_by_either_option(vllm_servers: VllmServers) -> None:
    """Token for token, and with the text, finish and usage of the undisturbed run."""
    faults = kill_series(vllm_servers, streams=100, seed=1, console=Console(record=True, width=130))

    assert faults == []
