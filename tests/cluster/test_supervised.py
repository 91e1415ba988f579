"""A process is followed by another one, whose number is higher."""

import contextlib
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs_lab.cluster import supervised
from kvrs_lab.cluster.hosted import Hosted
from kvrs_lab.cluster.supervised import WithLine
from tests.cluster import launches

pytestmark = [pytest.mark.xdist_group("clusters")]

WAIT_S = 60.0


class Process:
    """The end of a line at which a process would be, and its exit status."""

    def __init__(self, line: socket.socket, status: int | None = None) -> None:
        self.line, self._status = line.dup(), status
        self.thread: threading.Thread | None = None

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int | None:
        if self.thread is not None:
            self.thread.join(WAIT_S)
        self.line.close()
        return self._status


class Played:
    """Processes that do as they are told: one answer each to the number of its start, and then
    they end; the last one goes on.
    """

    def __init__(self, *answers: str | None) -> None:
        self._answers = list(answers)
        self.heard: list[str] = []

    def make(self, line: socket.socket) -> Any:
        if not self._answers:
            raise BlockingIOError("no process to spare")
        made, answer = Process(line), self._answers.pop(0)
        is_last = not self._answers
        made.thread = threading.Thread(target=self._play, args=(made.line, answer, is_last))
        made.thread.start()
        return made

    def _play(self, line: socket.socket, answer: str | None, is_last: bool) -> None:
        with line, contextlib.suppress(OSError):
            self.heard.append(line.recv(100).decode())
            if answer is not None:
                line.send(answer.encode())
            while is_last and (word := line.recv(100).decode()):
                self.heard.append(word)


until = partial(launches.until, within_s=WAIT_S)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "PAUSES_S", (0.01,))


def end(kept: WithLine) -> None:
    kept.close()
    kept.join(WAIT_S)
    assert not kept._thread.is_alive()


def test_a_first_process_that_cannot_serve_is_not_followed() -> None:
    """Another one would fail in the same way."""
    kept = WithLine("d0", Played("fault port: 80 is in use", "ready").make)

    kept.start()
    kept.join(WAIT_S)

    assert kept.status == supervised.ProcessStatus(1, 0, "port: 80 is in use")


@pytest.mark.parametrize("with_spare", [True, False], ids=["with a spare", "without"])
def test_a_later_process_that_cannot_serve_is_followed_by_another(with_spare: bool) -> None:
    """Also one that ends without a word. The number of a start only rises."""
    played = Played("ready", "fault no room", None, "ready")
    kept = WithLine("d0", played.make, with_spare=with_spare, starts=7)

    kept.start()
    until(lambda: len(played.heard) == 4 and kept.status.fault is None)
    kept.learn()
    until(lambda: len(played.heard) == 5)
    end(kept)

    assert played.heard == [*(f"start {n}" for n in range(8, 12)), "learn"]


def test_a_process_that_cannot_be_made_is_tried_again() -> None:
    """The machine may have no process to spare for a while."""
    played = Played()
    kept = WithLine("d0", played.make)

    kept.start()
    until(lambda: kept.status.fault is not None)
    played._answers.append("ready")
    until(lambda: kept.status.has_served)
    end(kept)

    assert kept.status.fault is None


def test_supervision_may_end_before_it_is_started() -> None:
    """A signal that ends the start of a cluster comes at any time."""
    kept = WithLine("d0", Played().make)

    kept.close()
    kept.join(WAIT_S)

    assert kept.status.starts == 0


def test_no_process_follows_after_the_end() -> None:
    played = Played("ready")
    kept = WithLine("d0", played.make)

    kept.start()
    until(lambda: kept.status.has_served)
    played._answers.append("ready")
    end(kept)

    assert played.heard == ["start 1"]


def test_a_process_that_is_made_while_the_end_begins_is_not_left() -> None:
    """It may take long to load, and hears nothing meanwhile."""
    making, may_go_on = threading.Event(), threading.Event()
    processes: list[Process] = []

    def make(line: socket.socket) -> Any:
        making.set()
        may_go_on.wait(WAIT_S)
        processes.append(Process(line))
        return processes[0]

    kept = WithLine("d0", make)
    kept.start()
    making.wait(WAIT_S)
    kept.close()
    may_go_on.set()
    kept.join(WAIT_S)

    assert not kept._thread.is_alive()


class Ends:
    """Records the ends of processes that are told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int | None]] = []

    def tell(self, start: int, status: int | None) -> None:
        self.told.append((start, status))


class Dying:
    """Processes that serve, say this on their lines, and end; the last one goes on."""

    def __init__(self, status: int | None, *words: tuple[str, ...]) -> None:
        self._status, self._words = status, [*words]

    def make(self, line: socket.socket) -> Any:
        line.send(b"ready")
        if not self._words:
            return Process(line)
        for word in self._words.pop(0):
            line.send(word.encode())
        line.shutdown(socket.SHUT_RDWR)
        return Process(line, self._status)


def ends_of(*words: tuple[str, ...], status: int | None = None) -> list[tuple[int, int | None]]:
    """The reported ends of processes that say these words."""
    ends = Ends()
    kept = WithLine("d0", Dying(status, *words).make, tell_end=ends.tell)
    kept.start()
    until(lambda: kept.status.starts > len(words))
    end(kept)
    return ends.told


def test_the_status_that_a_process_tells_is_the_one_of_the_end() -> None:
    """That of a rank that it ends with. Faults that it tells before its end are no statuses."""
    told = ends_of(("exit -9",), ("fault ranks have died", "exit -11"), ("exit",), status=1)

    assert told == [(1, -9), (2, -11), (3, None)]


def test_a_process_that_tells_no_status_has_its_own() -> None:
    told = ends_of((), ("fault no memory",), status=-6)

    assert told == [(1, -6), (2, -6)]


def test_words_that_a_process_did_not_hear_do_not_hide_its_status() -> None:
    """A socket that is closed with words in it is reset, and the status lies behind that."""
    ends, lines = Ends(), list[Process]()

    def make(line: socket.socket) -> Any:
        line.send(b"ready")
        lines.append(Process(line))
        return lines[-1]

    kept = WithLine("d0", make, tell_end=ends.tell)
    kept.start()
    until(lambda: kept.status.has_served)
    kept.learn()

    lines[0].line.send(b"exit -9")
    lines[0].line.close()
    until(lambda: ends.told)
    end(kept)

    assert ends.told[0] == (1, -9)


def test_an_end_that_was_ordered_with_the_cluster_is_not_told() -> None:
    ends = Ends()
    kept = WithLine("d0", Dying(None).make, tell_end=ends.tell)
    kept.start()
    until(lambda: kept.status.has_served)

    end(kept)

    assert ends.told == []


def test_a_file_is_parsed_again_if_it_has_changed(tmp_path: Path) -> None:
    """By a spare, which waits for its start, and by a process that serves."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("transfer: {lease_s: 7}")
    line, other = socket.socketpair()
    with line, other:
        hosted = Hosted(path, InstanceId("e0"), line)
        first = hosted.config()
        assert hosted.config() is first
        path.write_text("transfer: {lease_s: 8}")
        assert (first.transfer.lease_s, hosted.config().transfer.lease_s) == (7, 8)
        path.unlink()
        with pytest.raises(ConfigError, match="No such file"):
            hosted.config()
