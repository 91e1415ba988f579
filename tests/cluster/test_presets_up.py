"""`kvrs lab up --preset NAME`, without any other setting: streams are exact through a kill."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.presets import SystemPreset
from tests.cluster.launches import END_S, Launch, ask, token_ids, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

SEEDS = [None, 7, None, 8]
PROMPT = [(11 * at * at + 5) % 500 + 2 for at in range(50)]
TOKENS = 600
RANKS = {SystemPreset.RAIDSERVE: 3, SystemPreset.ANCHORTP: 3}


@pytest.fixture
def preset(request: pytest.FixtureRequest) -> SystemPreset:
    return SystemPreset(request.param)


@pytest.fixture
def launch(preset: SystemPreset, tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path, "--preset", preset.value, forked=True)
    try:
        launch.wait_for_output("Ctrl-C ends it")
        yield launch
    finally:
        launch.process.send_signal(signal.SIGINT)
        launch.process.wait(END_S)


def complete(launch: Launch, seed: int | None) -> list[int]:
    return token_ids(launch.urls[0], PROMPT, TOKENS, seed)


def state(launch: Launch) -> dict[str, Any]:
    found: dict[str, Any] = ask("GET", f"{launch.urls[1]}/kvrs/v1/state")
    return found


def row_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = (row for row in found["instances"] if row["id"] == name)
    return row  # type: ignore[no-any-return]


def busy(launch: Launch, preset: SystemPreset) -> dict[str, Any] | None:
    """An instance that decodes a stream, with its ranks where the preset has such."""
    found = state(launch)
    decoding = (each["decode"] for each in found["streams"] if each["output_tokens"] > 20)
    row = row_of(found, name) if (name := next(decoding, None)) is not None else None
    return row if row is not None and len(row["ranks"]) >= RANKS.get(preset, 0) else None


def victim(preset: SystemPreset, row: dict[str, Any]) -> int:
    """The process that the system of the preset is made to lose."""
    match preset:
        case SystemPreset.RAIDSERVE | SystemPreset.ANCHORTP:
            pid = row["ranks"][1]["pid"]
        case SystemPreset.KEVLARFLOW:
            pid = row["stages"][1]["host_pid"]
        case _:
            pid = row["pid"]
    return int(pid)


@pytest.mark.parametrize("preset", list(SystemPreset), indirect=True)
def test_streams_are_exact_through_a_kill(preset: SystemPreset, launch: Launch) -> None:
    """A rank is killed where instances have ranks, the host of a stage where they have such, else
    an instance. What is lost comes back, and an instance that goes on keeps its process.
    """
    assert f"{preset.value}: {preset.summary}" in launch.output
    by_seed = {seed: complete(launch, seed) for seed in {*SEEDS}}

    with ThreadPoolExecutor(len(SEEDS)) as clients:
        answers = clients.map(lambda seed: complete(launch, seed), SEEDS)
        hit = until(lambda: busy(launch, preset))
        os.kill(pid := victim(preset, hit), signal.SIGKILL)
        got = list(answers)

    assert got == [by_seed[seed] for seed in SEEDS]

    def back() -> dict[str, Any] | None:
        row = row_of(state(launch), hit["id"])
        if row["health"] != "up" or row["state"] not in (None, "full"):
            return None
        is_whole = len(row["ranks"]) == len(hit["ranks"])
        return row if is_whole and victim(preset, row) != pid else None

    outcomes = {each["outcome"] for each in state(launch)["recoveries"]}
    assert outcomes == {"resumed"} or (hit["ranks"] and not outcomes)
    after = until(back)
    assert (after["pid"] == hit["pid"]) == (hit["ranks"] != [])
