"""Ends of a cluster's start, with a reason or by a signal, and ends of a running cluster by
signals.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from kvrs.cluster.guard import members
from tests.cluster.launches import END_S, Launch

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]


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


def test_a_model_that_cannot_be_loaded_ends_the_start_with_the_reason(
    tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    """A restart would end in the same way, so there is none, and only the reason is printed."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')

    failing = launch("--model", str(model))

    assert failing.process.wait(END_S) == 2
    assert re.search(
        rf"^instance [pd]0: {model}/config\.json: model_type: got 'gpt2'; allowed: ",
        failing.output,
        re.MULTILINE,
    ), failing.output
    assert "Traceback" not in failing.output
    assert "raylet" not in failing.output
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
def test_a_signal_ends_a_start_that_is_under_way(
    started: Launch, stage: str, number: signal.Signals
) -> None:
    """Ctrl-C during the start does not wait for the cluster to be up."""
    started.wait_for_output(stage)

    started.signal_group(number)

    assert started.process.wait(END_S) != 0
    assert "is up" not in started.output
    assert "Traceback" not in started.output
    started.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_running_cluster_ends_clean_by_signal(started: Launch, number: signal.Signals) -> None:
    """Ray takes some signals for itself when it starts; the launcher takes them back. A second one
    changes nothing.
    """
    started.wait_for_output("kvrs is up")

    started.signal_group(number)
    started.wait_for_output("ending")
    started.signal_group(number)

    assert started.process.wait(END_S) == 0
    assert started.output.endswith("ending\n"), started.output
    started.assert_nothing_left()


def test_a_cluster_whose_ray_died_reports_it_and_ends(started: Launch) -> None:
    """Instances end with their raylet and would not be restarted: an end is better than a proxy
    that refuses for ever.
    """
    started.wait_for_output("kvrs is up")

    os.kill(raylet_of(started.run_directory), signal.SIGKILL)

    assert started.process.wait(END_S) == 2
    assert "Ray's raylet ended with status -9" in started.output.splitlines()[-1]
    started.assert_nothing_left()


def test_ray_listens_on_loopback_only_and_asks_for_its_token(started: Launch) -> None:
    """Ray runs whatever a caller sends it, as the user of the cluster."""
    started.wait_for_output("kvrs is up")
    processes = [psutil.Process(pid) for pid in members(started.run_directory)]
    servers = [each for each in processes if each.name() in ("gcs_server", "raylet")]

    listening = {
        (process.name(), connection.laddr.ip.removeprefix("::ffff:"))
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    modes = {each.name(): each.environ().get("RAY_AUTH_MODE") for each in servers}
    tokens = {each.environ().get("RAY_AUTH_TOKEN", "") for each in servers}

    assert listening
    assert [each for each in listening if not ip_address(each[1]).is_loopback] == []
    assert modes == {"gcs_server": "token", "raylet": "token"}
    assert [len(token) for token in tokens] == [64]


def raylet_of(run_directory: Path) -> int:
    for pid in members(run_directory):
        if Path(f"/proc/{pid}/comm").read_text() == "raylet\n":
            return pid
    raise AssertionError("no raylet")
