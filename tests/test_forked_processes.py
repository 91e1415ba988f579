"""Modules that are forked by a nursery: seen from outside, as those that `python -m` runs."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

import kvrs
from kvrs_testkit.forked import ForkedProcess, ForkingPopen, _place, starts_forked

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
        (
            ("kvrs_engine.engine", "--epoch", "x"),
            2,
            "",
            "error: argument --epoch: invalid int value: 'x'",
        ),
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


class AnyModule(ForkingPopen):
    def _module_in(self, command: Any) -> str:
        return str(command[2])


def run_of(pid: int) -> bytes:
    """The command line of a process that waits, which a forked one has from its nursery."""
    while not (run := Path(f"/proc/{pid}/cmdline").read_bytes()):
        time.sleep(0.01)  # It has just begun.
    return run


def test_it_reads_and_writes_where_it_is_told(tmp_path: Path) -> None:
    """Pipes, and files in the directory that is its own."""
    (tmp_path / "own.json").write_text("[1]")
    command = [sys.executable, "-m", "json.tool", "--compact"]

    piped = AnyModule(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    answer, _ = piped.communicate('{"a": [2, 3]}', timeout=60)
    placed = AnyModule([*command, "own.json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    own, _ = placed.communicate(timeout=60)

    assert (answer, own) == ('{"a":[2,3]}\n', "[1]\n")
    assert (piped.returncode, placed.returncode) == (0, 0)


@pytest.mark.parametrize("options", [{"process_group": 0}, {"start_new_session": True}, {}])
def test_it_leads_a_group_where_it_is_asked_to(options: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with AnyModule(command, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # It runs.
        is_leader = os.getpgid(process.pid) == process.pid
        process.kill()

    assert is_leader == bool(options)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("blocked", "status"), [([], -signal.SIGUSR1), ([signal.SIGUSR1], 0)])
def test_signals_are_blocked_that_its_starter_blocks(
    blocked: list[signal.Signals], status: int
) -> None:
    """From its first moment: a supervisor starts its workers so."""
    own = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        process = AnyModule([sys.executable, "-m", "json.tool"], stdin=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, own)
    process.send_signal(signal.SIGUSR1)

    process.communicate(b"[]", timeout=60)

    assert process.returncode == status


def test_it_has_descriptors_under_their_numbers(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    missing, line = tmp_path / "none.yaml", theirs.fileno()
    command = [sys.executable, "-m", "kvrs_lab.cluster.hosted", "--config", str(missing)]
    command += ["--name", "d0", "--line", str(line)]

    with ours, starts_forked():
        hosted = subprocess.Popen(command, pass_fds=[line], stderr=subprocess.DEVNULL)
        theirs.close()
        told = ours.recv(1 << 16).decode()

    assert told.startswith("fault ")
    assert str(missing) in told
    assert hosted.wait(60) == 1


def test_descriptors_may_have_come_under_numbers_of_each_other() -> None:
    with TemporaryFile() as one, TemporaryFile() as other:
        one.write(b"one")
        one.flush()

        _place([one.fileno(), other.fileno()], [other.fileno(), one.fileno()])

        assert os.pread(other.fileno(), 9, 0) == b"one"
        assert os.pread(one.fileno(), 9, 0) == b""


def test_descriptors_may_have_to_go_where_the_next_one_would_be() -> None:
    with TemporaryFile() as file:
        file.write(b"one")
        file.flush()
        came = os.dup(file.fileno())
        free = os.dup(came)
        os.close(free)

        _place([came], [free])

        assert os.pread(free, 9, 0) == b"one"
        os.close(free)


def test_only_modules_of_kvrs_are_forked_and_only_meanwhile() -> None:
    real = subprocess.Popen
    with starts_forked():
        for module, name in (
            ("json.tool", "json.tool"),
            ("kvrs_lab.cluster.guard", "kvrs_testkit.forked"),
        ):
            run = [sys.executable, "-m", module]
            with subprocess.Popen(run, stdin=subprocess.PIPE) as waiting:
                assert name.encode() in run_of(waiting.pid)
                waiting.kill()
        shown = subprocess.run(
            [sys.executable, "-m", "kvrs", "--version"], capture_output=True, check=True
        )

    assert shown.stdout.decode() == f"kvrs {kvrs.__version__}\n"
    assert subprocess.Popen is real
