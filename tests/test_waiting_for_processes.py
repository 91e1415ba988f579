"""How long an experiment waits for a process: without the time in which others have the CPUs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvrs.config.file import parse_config
from kvrs_testkit import processes
from kvrs_testkit.processes import Processes, ProcessFailedError, Spent, below, own_s, threads_of

BEFORE = {1: Spent(5.0, 3.0), 2: Spent(0.0, 0.0)}


@pytest.mark.parametrize(
    ("after", "counted_s"),
    [
        ({1: Spent(15.0, 3.0), 2: Spent(0.0, 0.0)}, 10.0),
        (BEFORE, 10.0),
        ({1: Spent(6.0, 12.0), 2: Spent(0.0, 0.0)}, 1.0),
        ({1: Spent(5.1, 3.9), 2: Spent(0.0, 0.0)}, 9.1),
        ({1: Spent(6.0, 11.0), 2: Spent(1.0, 8.0)}, 10.0 * 2 / 18),
        ({3: Spent(1.0, 9.0)}, 1.0),
        ({1: Spent(5.0, 13.0)}, 0.0),
    ],
    ids=["runs", "sleeps", "starved", "nearly-asleep", "two-starved", "new-thread", "not-run"],
)
def test_time_in_a_queue_for_the_cpus_does_not_count(
    after: dict[int, Spent], counted_s: float
) -> None:
    """Neither does a process that hangs gain time by the load of others, nor one that starts lose
    any.
    """
    assert own_s(10.0, BEFORE, after) == pytest.approx(counted_s)


def test_every_thread_is_seen() -> None:
    """With what it has run, which the kernel counts in nanoseconds."""
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun = threads_of(os.getpid())
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass
    after = threads_of(os.getpid())
    ends.set()

    own = threading.get_native_id()
    assert {own, *(thread.native_id for thread in threads)} <= set(after)
    assert after[own].running_s - begun[own].running_s > 0.01


@pytest.mark.process
def test_processes_below_a_process_are_found() -> None:
    """Also those that its children have started."""
    inner = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", command]) as outer:
        give_up_s = time.monotonic() + 60.0
        while len(found := list(below(outer.pid))) < 2:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        child, grandchild = found
        assert list(below(child)) == [grandchild]
        os.kill(grandchild, signal.SIGKILL)


class Sleeper(Processes):
    """A process that is never ready."""

    def wait_for(self, timeout_s: float) -> None:
        self._spawn("sleeper", "http.server", "0", "--bind", "127.0.0.1")
        self._wait("sleeper", lambda: False, timeout_s)


@pytest.mark.process
@pytest.mark.network
def test_a_wait_ends_by_the_time_that_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here every look counts as 40 s, and a queue of 3 looks as none."""
    looks: list[float] = []

    def counted(passed_s: float, *_: object) -> float:
        looks.append(passed_s)
        return 0.0 if len(looks) <= 3 else 40.0

    monkeypatch.setattr(processes, "own_s", counted)
    monkeypatch.setattr(processes, "_COUNT_S", 0.02)
    config = parse_config({"cluster": {"model": str(tmp_path)}})
    with (
        Sleeper(config) as sleeper,
        pytest.raises(ProcessFailedError, match="sleeper was not ready after 100 s of its own"),
    ):
        sleeper.wait_for(100.0)

    assert len(looks) == 6
