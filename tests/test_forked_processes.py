"""Modules that are forked by a nursery: seen from outside, as those that `python -m` runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvrs
from kvrs_testkit.forked import ForkedProcess

pytestmark = pytest.mark.process


def forked(directory: Path, module: str, *arguments: str, **environment: str) -> ForkedProcess:
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as errors:
        return ForkedProcess(
            module, *arguments, environment=os.environ | environment, stdout=out, stderr=errors
        )


@pytest.mark.parametrize(
    ("arguments", "status", "out", "error"),
    [
        (("kvrs", "--version"), 0, f"kvrs {kvrs.__version__}\n", ""),
        (("kvrs.engine", "--epoch", "x"), 2, "", "error: argument --epoch: invalid int value: 'x'"),
        (("kvrs.no_module",), 1, "", "No module named kvrs.no_module"),
    ],
    ids=["served", "refused", "failed"],
)
def test_output_and_status_are_those_of_the_module(
    tmp_path: Path, arguments: tuple[str, ...], status: int, out: str, error: str
) -> None:
    process = forked(tmp_path, *arguments)

    assert process.wait(60) == status
    assert (tmp_path / "out").read_text() == out
    assert error in (tmp_path / "err").read_text()
    assert process.poll() == status
    process.send_signal(signal.SIGTERM)  # To none.


def test_its_environment_is_the_given_one(tmp_path: Path) -> None:
    """Not that of the nursery, which began before."""
    process = forked(tmp_path, "kvrs", "config", "schema", KVRS_LOG_LEVEL="loud")

    assert process.wait(60) == 2
    assert "KVRS_LOG_LEVEL: got 'loud'" in (tmp_path / "err").read_text()


def test_it_is_a_child_that_a_signal_ends(tmp_path: Path) -> None:
    process = forked(tmp_path, "http.server", "--bind", "127.0.0.1", "0")
    while b"Serving" not in (tmp_path / "out").read_bytes():
        assert process.poll() is None

    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.terminate()

    assert process.wait(60) == -signal.SIGTERM


def test_it_is_the_module_that_this_python_would_run(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "kvrs", "proxy", "--port", "x"]
    spawned = subprocess.run(run, capture_output=True, check=False)

    process = forked(tmp_path, *run[2:])

    assert process.wait(60) == spawned.returncode
    assert (tmp_path / "err").read_bytes() == spawned.stderr
