"""The guard ends the processes that a launcher left behind, and no others."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvrs_lab.cluster.guard import members, start_guard
from tests.cluster.launches import until

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("clusters")]

HOLD_A_FILE = (
    "import sys, time; f = open(sys.argv[1], 'a'); print('held', flush=True); time.sleep(600)"
)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def holder(run_directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process outside of our process tree with a log file of the run open."""
    command = [sys.executable, "-c", HOLD_A_FILE, str(run_directory / "x.log")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_process_that_writes_a_file_of_the_run_belongs_to_it(
    run_directory: Path, holder: subprocess.Popen[str]
) -> None:
    """Names, parents and groups of processes change; open files do not."""
    assert list(members(run_directory)) == [holder.pid]


def test_an_operator_who_looks_at_a_log_keeps_the_processes_that_show_it(
    run_directory: Path, holder: subprocess.Popen[str]
) -> None:
    """`tail -f` and pagers have a log of the run open to read it; an editor writes a hidden file
    beside it.
    """
    tail = ["tail", "-c", "+1", "-f", str(run_directory / "x.log")]
    editor = [sys.executable, "-c", HOLD_A_FILE, str(run_directory / ".x.log.swp")]
    (run_directory / "x.log").write_text("shown\n")
    with (
        subprocess.Popen(tail, stdout=subprocess.PIPE, text=True) as reader,
        subprocess.Popen(editor, stdout=subprocess.PIPE, text=True) as other,
    ):
        try:
            assert reader.stdout is not None
            assert other.stdout is not None
            assert (reader.stdout.readline(), other.stdout.readline()) == ("shown\n", "held\n")
            guard = start_guard(run_directory)
            assert guard.stdin is not None

            guard.stdin.close()

            assert guard.wait(30) == 0
            assert holder.wait(30) != 0
            assert (reader.poll(), other.poll()) == (None, None)
        finally:
            reader.kill()
            other.kill()


def test_a_launcher_that_vanishes_takes_its_processes_along(
    run_directory: Path, holder: subprocess.Popen[str]
) -> None:
    """The end of the pipe is all that the guard needs to know."""
    guard = start_guard(run_directory)
    assert guard.stdin is not None

    guard.stdin.close()

    assert guard.wait(30) == 0
    assert holder.wait(30) != 0
    assert not run_directory.exists()


def test_a_guard_apart_waits_for_the_end_as_well(
    run_directory: Path, holder: subprocess.Popen[str]
) -> None:
    """It is no child of the launcher, which Ray ends with all its children."""
    guard = start_guard(run_directory, apart=True)
    assert guard.stdin is not None
    with guard.stdin:
        assert guard.wait(30) == 0
        # The shell has ended; what it left may not have become the guard yet.
        apart = until(lambda: _guard_of(run_directory))
        reads = Path(f"/proc/{apart.pid}/fd/0").readlink()

    assert str(reads).startswith("pipe:")
    assert apart.ppid() != os.getpid()
    assert holder.wait(30) != 0
    assert apart.wait(30) in (0, None)
    assert not run_directory.exists()


def _guard_of(run_directory: Path) -> psutil.Process | None:
    wanted = ["-m", "kvrs_lab.cluster.guard", str(run_directory)]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[1:] == wanted:
                return process
    return None


def test_the_guard_spares_other_processes_and_the_launcher_that_waits_for_it(
    run_directory: Path, holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The test is the launcher here: it has a file of the run open, too, and has to outlive the
    guard.
    """
    stranger_file = tmp_path / "stranger.log"
    with (
        (run_directory / "launcher.log").open("w"),
        subprocess.Popen(
            [sys.executable, "-c", HOLD_A_FILE, str(stranger_file)], stdout=subprocess.PIPE
        ) as stranger,
    ):
        guard = start_guard(run_directory)
        assert guard.stdin is not None

        guard.stdin.close()

        assert guard.wait(30) == 0
        assert holder.wait(30) != 0
        assert stranger.poll() is None
        stranger.kill()


def test_the_guard_removes_what_killed_agents_left_for_their_successors(
    run_directory: Path, holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Segments are files, which no death removes; those of other runs beside them stay."""
    segments, others = tmp_path / "shm" / "run", tmp_path / "shm" / "other"
    for directory in (segments, others):
        (directory / "kvrs-ab12-n0").mkdir(parents=True)
        (directory / "kvrs-ab12-n0" / "slab").write_bytes(bytes(4096))
    guard = start_guard(run_directory, segments)
    assert guard.stdin is not None

    guard.stdin.close()

    assert guard.wait(30) == 0
    assert holder.wait(30) != 0
    assert list((tmp_path / "shm").iterdir()) == [others]
    assert len(list(others.rglob("slab"))) == 1
