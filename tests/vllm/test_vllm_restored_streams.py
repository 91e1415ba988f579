"""The series `decode vllm --option restore` of `experiments/kills`, with one kill."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.kills.vllm import kill_series
from experiments.kills.vllm_figures import faults_of
from kvrs_testkit.processes import below
from kvrs_testkit.vllm_servers import PYTHON_ENV, VllmServers, connector_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

AS_CLAIMED: dict[str, Any] = {
    "option": "restore",
    "damage": None,
    "streams": 30,
    "hit": 20,
    "exact": 30,
    "recoveries": {"restore": 20},
    "unprotected": {},
    "full_blocks_tokens": 3200,
    "loaded_tokens": 3200,
    "loaded_streams": 20,
    "loaded_streams_exact": 20,
    "bystanders_harmed": 0,
    "engines_ended": 0,
    "off_reasons": {},
}

SPLIT = {"option": "split", "recoveries": {"split": 5, "restore": 15}}


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({}, 0),
        ({"loaded_tokens": 1920}, 0),
        ({"loaded_tokens": 1888}, 1),
        ({"damage": "flip"}, 1),
        ({"damage": "flip", "loaded_tokens": 1600}, 0),
        ({"damage": "negate"}, 2),
        ({"damage": "negate", "exact": 10, "loaded_streams_exact": 0}, 0),
        ({"recoveries": {"restore": 19, "recompute": 1}}, 1),
        ({"recoveries": {"restore": 19, "recompute": 1}, "unprotected": {"its agent died": 1}}, 0),
        ({"recoveries": {"restore": 18}, "unprotected": {"its agent died": 2}}, 1),
        ({"bystanders_harmed": 1}, 1),
        ({"engines_ended": 1}, 1),
        ({"off_reasons": {"KeyError": 2}}, 1),
        (SPLIT, 0),
        (SPLIT | {"recoveries": {"split": 4, "restore": 16}}, 1),
        (SPLIT | {"loaded_tokens": 1888}, 1),
        (SPLIT | {"loaded_tokens": 3232}, 1),
    ],
    ids=[
        "as-claimed",
        "two-blocks-behind",
        "more-blocks-behind",
        "damage-not-found",
        "damage-found",
        "loaded-but-not-used",
        "used",
        "by-another-option",
        "one-had-no-page",
        "two-had-no-page",
        "a-bystander-harmed",
        "an-engine-ended",
        "a-connector-off",
        "split-or-restored",
        "restored-instead",
        "less-than-the-back",
        "more-than-the-back",
    ],
)
def test_a_restore_is_proven_by_what_was_loaded(change: dict[str, Any], faults: int) -> None:
    """Nearly all blocks were loaded and used, and what was not hit was not disturbed."""
    assert len(faults_of(AS_CLAIMED | change)) == faults


@pytest.mark.skipif(PYTHON_ENV not in os.environ, reason=f"{PYTHON_ENV} names no interpreter")
def test_streams_of_a_killed_server_are_restored_through_the_proxy(tmp_path: Path) -> None:
    """Token for token, with text, finish and usage, out of the pages that an agent has; streams of
    the other server get nothing but their tokens.
    """
    console = Console(record=True, width=180)
    with VllmServers(connector_config(tmp_path), os.environ[PYTHON_ENV]) as servers:
        servers.start_all()

        faults = kill_series(servers, 24, 1, console, tmp_path, ("restore",), kills=1)
        servers.wait_ready(*servers.names)  # The one that was killed is started again.

        parts = [pid for name in servers.names for pid in below(servers.pid(name))]
    assert faults == []
    assert len(parts) >= 4, "an engine and a worker of each server"
    ended_s = time.monotonic() + 20.0
    while alive := [pid for pid in parts if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < ended_s, f"processes {alive} are left"
        time.sleep(0.05)
