"""How a cluster's start can end: with a reason, or because somebody wanted it to; and how signals end it later."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrs.cluster.guard import members
from tests.cluster.launches import END_S, Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(*arguments: str) -> Launch:
        launches.append(Launch(tmp_path, "--nodes", "1", *arguments))
        return launches[-1]

    yield start
    for one in launches:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def started(launch: Callable[[], Launch]) -> Launch:
    return launch()


def test_a_model_that_cannot_be_loaded_ends_the_start_with_the_reason(tmp_path: Path, launch: Callable[..., Launch]) -> None:
    """Starting it again would end the same way, so it is not tried again, and nothing but the reason is said."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')

    failing = launch("--model", str(model))

    assert failing.process.wait(END_S) == 2
    assert re.search(rf"^instance [pd]0: {model}/tokenizer\.json: No such file", failing.said, re.MULTILINE), failing.said
    assert "Traceback" not in failing.said
    assert "raylet" not in failing.said
    failing.assert_nothing_left()


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("generating a tiny random model", signal.SIGINT),
        ("starting Ray", signal.SIGINT),
        ("instances", signal.SIGINT),
        ("instances", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_start_that_is_under_way(started: Launch, stage: str, number: signal.Signals) -> None:
    """Whoever presses Ctrl-C while the cluster starts does not wait for it to be up first."""
    started.wait_until_said(stage)

    started.signal_group(number)

    assert started.process.wait(END_S) != 0
    assert "is up" not in started.said
    assert "Traceback" not in started.said
    started.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_running_cluster_ends_clean_by_signal(started: Launch, number: signal.Signals) -> None:
    """Ray takes some signals for itself when it starts; they are still ours. A second one changes nothing."""
    started.wait_until_said("kvrs is up")

    started.signal_group(number)
    started.wait_until_said("ending")
    started.signal_group(number)

    assert started.process.wait(END_S) == 0
    assert started.said.endswith("ending\n"), started.said
    started.assert_nothing_left()


def test_a_cluster_whose_ray_died_says_so_and_ends(started: Launch) -> None:
    """Instances end with their raylet and nobody would bring them back: better an end than a proxy that refuses for ever."""
    started.wait_until_said("kvrs is up")

    os.kill(raylet_of(started.run_directory), signal.SIGKILL)

    assert started.process.wait(END_S) == 2
    assert "Ray's raylet ended with status -9" in started.said.splitlines()[-1]
    started.assert_nothing_left()


def raylet_of(run_directory: Path) -> int:
    for pid in members(run_directory):
        if Path(f"/proc/{pid}/comm").read_text() == "raylet\n":
            return pid
    raise AssertionError("no raylet")
