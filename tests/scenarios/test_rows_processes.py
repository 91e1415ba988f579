"""Every row of the table that clusters of real processes can express."""

import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from experiments.two_pairs import PACE
from kvrs.core.event_log import LogEntry, read
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.demo import run_load
from kvrs_lab.load.passes import Run
from kvrs_lab.traces.records import ReplayRequest
from kvrs_testkit.forked import starts_forked
from kvrs_testkit.scenarios import Found, Scenario, check
from tests.scenarios.rows import ROWS

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("systems"),
    pytest.mark.nightly,
]

RETURN_S = 180.0


def in_processes(row: Scenario, log: Path, model: str) -> Found:
    """The row's load with its faults, compared token by token with the same load without."""
    config = row.config(port=0, admin_port=0, event_log=str(log))
    engine = config.cluster.engine.model_copy(update={"pace": PACE})
    cluster_settings = config.cluster.model_copy(update={"engine": engine, "model": model})
    load, console = row.load, Console(quiet=True)
    requests = [
        ReplayRequest(load.at_s(number), tuple(prompt), load.tokens)
        for number, prompt in enumerate(load.prompts(0))
    ]

    config = config.model_copy(update={"cluster": cluster_settings})
    with starts_forked(), Cluster(config, lambda line: None) as cluster:
        faulted = run_load(cluster, requests, row.parsed, 0, console, "with faults")
        over_s = time.monotonic()
        cluster.wait_all_up(RETURN_S)
        clean = run_load(cluster, requests, [], 0, console, "without")
    entries = [
        (entry.event, entry.actions)
        for entry in read(log.read_text().splitlines())
        if isinstance(entry, LogEntry) and entry.now_s < over_s
    ]
    assert tokens(faulted) == tokens(clean)
    never_due = [each.label for each in faulted.never_due]
    pauses_s = [each["gap_s"] for each in faulted.recoveries if each["gap_s"] is not None]
    found = Found(Counter(), entries, never_due, pauses_s)
    for record in faulted.records:
        found.ended["complete" if record.error is None else record.error.message] += 1
    return found


def tokens(run: Run) -> list[list[int]]:
    return [record.token_ids for record in run.records]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in ROWS if not row.not_real]
)
def test_row_holds_in_processes(row: Scenario, tmp_path: Path, tiny_llama: str) -> None:
    """Each row states its own rule."""
    check(row, in_processes(row, tmp_path / "events.jsonl", tiny_llama))
