"""Nurseries: processes that are forked for others."""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from kvrs.errors import KvrsError
from kvrs_engine.engine import nursery as nurseries
from kvrs_engine.engine.nursery import AdoptedChild, Nursery

pytestmark = pytest.mark.process

_GET_CHILD_SUBREAPER = 37  # Of prctl(2).


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    found = Nursery(["tests.engine.forked_echo"])
    yield found
    found.close()


def adopted(
    nursery: Nursery, name: str = "echo", output: IO[str] | None = None
) -> tuple[AdoptedChild, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ExitStack() as undo:
        undo.enter_context(ours)
        child = nursery.fork(theirs, name, output)
        undo.pop_all()
    return child, ours


def is_running(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_ended(*pids: int) -> None:
    give_up_s = time.monotonic() + 60.0
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < give_up_s, left
        time.sleep(0.01)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_forked_process_is_a_child_of_the_one_that_needs_it(nursery: Nursery) -> None:
    """So it is killed with it, and its end is seen. Other orphans are not adopted."""
    child, line = adopted(nursery)

    with line:
        assert int(line.recv(100)) == os.getpid()
        assert parent_of(child.pid) == os.getpid()
        assert not child.poll()
        assert not child.wait(0.0)
    assert child.wait()
    child.close()
    adopts = ctypes.c_int(1)
    ctypes.CDLL(None).prctl(_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    assert adopts.value == 0


def test_a_child_is_killed_and_buried(nursery: Nursery) -> None:
    child, line = adopted(nursery)

    with line:
        child.kill()

    assert child.wait()
    assert not Path(f"/proc/{child.pid}").exists()
    child.close()
    child.close()


def test_a_nursery_that_has_ended_is_made_again_and_its_children_stay(nursery: Nursery) -> None:
    first, line = adopted(nursery)
    os.kill(_nursery_beside(first), signal.SIGKILL)

    second, other = adopted(nursery)

    with line, other:
        assert not first.poll()
        assert int(other.recv(100)) == os.getpid()
    for child in (first, second):
        assert child.wait()
        child.close()


def test_a_nursery_that_hangs_is_made_again(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended: its late answer would be taken for that to the next request."""
    limit_s, begin = nurseries._FORK_S, Nursery._begin

    def begin_patiently(again: Nursery) -> socket.socket:
        monkeypatch.setattr(nurseries, "_FORK_S", limit_s)
        return begin(again)

    first, line = adopted(nursery)
    stopped = _nursery_beside(first)
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(nurseries, "_FORK_S", 0.2)
    monkeypatch.setattr(Nursery, "_begin", begin_patiently)

    second, other = adopted(nursery)

    with line, other:
        assert not Path(f"/proc/{stopped}").exists()
        assert int(other.recv(100)) == os.getpid()
    for child in (first, second):
        assert child.wait()
        child.close()


def test_a_child_may_be_buried_while_another_thread_waits_for_it(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment: what it waits with is not the handle that is given back."""
    child, line = adopted(nursery)
    poll = select.poll

    def bury_first() -> "select.poll":
        monkeypatch.setattr(select, "poll", poll)
        child.close()
        return poll()

    monkeypatch.setattr(select, "poll", bury_first)

    with line:
        assert child.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, None])
def test_a_child_knows_how_it_has_ended(nursery: Nursery, number: signal.Signals | None) -> None:
    child, line = adopted(nursery)

    with line:
        before = child.status
        if number is None:
            line.send(b"end")
        else:
            os.kill(child.pid, number)
        assert child.wait()

    assert (before, child.status) == (None, 0 if number is None else -number)
    child.close()


def test_children_have_their_names_and_outputs(nursery: Nursery, tmp_path: Path) -> None:
    """So each can be found by name, and writes a log of its own."""
    for name in ("p0", "d0"):
        with (tmp_path / name).open("w") as output:
            child, line = adopted(nursery, name, output)
        with line:
            assert int(line.recv(100)) == os.getpid()
            assert Path(f"/proc/{child.pid}/comm").read_text() == f"{name}\n"
            line.send(b"end")
        assert child.wait()
        child.close()

    assert [(tmp_path / name).read_text() for name in ("p0", "d0")] == ["p0\n", "d0\n"]


def test_a_process_may_become_the_parent_of_its_own_nursery() -> None:
    """The nursery and what it has forked end with that process, even by SIGKILL; its children do
    not need the nursery, which is made again.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        host = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.forked_echo", "--host", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        nurseries, children = zip(
            *(map(int, ours.recv(100).split()) for _ in range(3)), strict=True
        )

        assert nurseries[0] == nurseries[1] != nurseries[2]
        assert not is_running(nurseries[0])
        assert [parent_of(pid) for pid in (nurseries[2], *children)] == 4 * [host.pid]
        host.kill()
        host.wait()

        until_ended(nurseries[2], *children)


def test_children_are_forked_for_several_threads_at_once(nursery: Nursery) -> None:
    """By one nursery, or several; none stops adopting for the others."""
    others = [Nursery(["tests.engine.forked_echo"]) for _ in range(3)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(adopted, [nursery, nursery, nursery, *others]))

    for child, line in found:
        with line:
            assert int(line.recv(100)) == os.getpid()
        assert child.wait()
        child.close()
    for other in others:
        other.close()


def test_a_nursery_that_is_closed_meanwhile_forks_none(nursery: Nursery) -> None:
    """A cluster may end while it starts: no other nursery is made, and the thread ends."""
    with ThreadPoolExecutor(1) as thread:
        first, line = adopted(nursery)
        os.kill(_nursery_beside(first), signal.SIGSTOP)
        forking = thread.submit(adopted, nursery)
        time.sleep(0.1)

        nursery.close()

        with pytest.raises(KvrsError, match="no process is forked any more"):
            forking.result(60.0)
    line.close()
    first.close()


def _nursery_beside(child: AdoptedChild) -> int:
    (made,) = (
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and int(entry.name) not in (child.pid, os.getpid())
        and b"tests.engine.forked_echo\0--parent\0" + str(os.getpid()).encode() in _command(entry)
    )
    return made


def _command(entry: Path) -> bytes:
    try:
        return entry.joinpath("cmdline").read_bytes()
    except OSError:
        return b""
