"""Exit statuses show why a process ended."""

import signal
from pathlib import Path

import pytest

from kvrs_lab.cluster import exits
from kvrs_lab.cluster.exits import KernelKills, classify

EXTERNAL = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
OWN = [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS]


@pytest.mark.parametrize("number", EXTERNAL, ids=lambda number: number.name)
def test_signals_that_others_send_come_from_outside(number: signal.Signals) -> None:
    assert classify(-number, kernel_killed=False) == (number.name, True)


@pytest.mark.parametrize("number", OWN, ids=lambda number: number.name)
def test_signals_of_a_fault_may_be_caused_by_a_request(number: signal.Signals) -> None:
    """Whatever the kernel did to other processes."""
    assert classify(-number, kernel_killed=False) == (number.name, False)
    assert classify(-number, kernel_killed=None) == (number.name, False)


def test_a_process_that_the_kernel_ended_for_memory_was_not_ended_from_outside() -> None:
    """A request may have taken the memory. Its SIGKILL looks like any other."""
    assert classify(-signal.SIGKILL, kernel_killed=True) == ("out of memory", False)
    assert classify(-signal.SIGTERM, kernel_killed=True) == ("SIGTERM", True)


def test_nothing_is_said_of_a_kill_where_those_of_the_kernel_are_not_counted() -> None:
    assert classify(-signal.SIGKILL, kernel_killed=None) is None


@pytest.mark.parametrize("status", [1, 2, 137, 255])
def test_an_exception_may_be_caused_by_a_request(status: int) -> None:
    assert classify(status, kernel_killed=False) == (f"exit status {status}", False)


def test_a_process_that_has_drained_was_told_to() -> None:
    assert classify(0, kernel_killed=None) == ("exit status 0", True)


def test_a_signal_without_a_name_is_no_order() -> None:
    assert classify(-40, kernel_killed=False) == ("signal 40", False)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_only_kills_of_the_kernel_just_before_an_end_explain_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of version 2 of cgroups, of which there may be none."""
    clock, events = Clock(), tmp_path / "memory.events"
    monkeypatch.setattr(exits, "time", clock)
    events.write_text("low 0\noom 3\noom_kill 2\n")
    kills = KernelKills([tmp_path / "absent", events])

    before = kills.lately()
    events.write_text("low 0\noom 4\noom_kill 3\n")
    just_now = kills.lately()
    clock.now_s += 60.0
    long_ago = kills.lately()
    events.write_text("low 0\n")
    unknown = kills.lately()

    assert (before, just_now, long_ago, unknown) == (False, True, False, None)


def test_kills_that_no_file_counts_are_not_known(tmp_path: Path) -> None:
    assert KernelKills([tmp_path / "absent"]).lately() is None


def test_this_machine_counts_kills_of_its_kernel() -> None:
    """All supported ones do."""
    assert KernelKills().lately() is not None
