"""A process is followed by another one, whose number is higher."""

import contextlib
import socket
import threading
from functools import partial

import pytest

from kvrs.cluster import keeper
from kvrs.cluster.keeper import Keeper
from tests.cluster import launches

pytestmark = [pytest.mark.xdist_group("clusters")]

WAIT_S = 60.0


class Played:
    """Processes that do as they are told: one answer each to the number of its start, and then
    they end; the last one goes on.
    """

    def __init__(self, *answers: str | None) -> None:
        self._answers = list(answers)
        self.heard: list[str] = []
        self.threads: list[threading.Thread] = []

    def make(self) -> socket.socket:
        if not self._answers:
            raise BlockingIOError("no process to spare")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answer = self._answers.pop(0)
        play = threading.Thread(target=self._play, args=(theirs, answer, not self._answers))
        self.threads.append(play)
        play.start()
        return ours

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
    monkeypatch.setattr(keeper, "PAUSE_S", 0.01)


def ended(kept: Keeper, played: Played) -> None:
    kept.close()
    kept.join(WAIT_S)
    assert not kept._thread.is_alive()
    for each in played.threads:
        each.join(WAIT_S)


def test_a_first_process_that_cannot_serve_is_not_followed() -> None:
    """Another one would fail in the same way."""
    played = Played("fault port: 80 is in use", "ready")
    kept = Keeper("d0", played.make, with_spare=False)

    kept.start()
    kept.join(WAIT_S)

    assert (kept.fault, kept.has_served, kept.starts) == ("port: 80 is in use", False, 1)


@pytest.mark.parametrize("with_spare", [True, False], ids=["with a spare", "without"])
def test_a_later_process_that_cannot_serve_is_followed_by_another(with_spare: bool) -> None:
    """Also one that ends without a word. The number of a start only rises."""
    played = Played("ready", "fault no room", None, "ready")
    kept = Keeper("d0", played.make, with_spare=with_spare, starts=7)

    kept.start()
    until(lambda: len(played.heard) == 4 and kept.fault is None)
    kept.stop()
    kept.learn()
    until(lambda: len(played.heard) == 6)
    ended(kept, played)

    assert played.heard == [*(f"start {n}" for n in range(8, 12)), "stop", "learn"]


def test_a_process_that_cannot_be_made_is_tried_again() -> None:
    """The machine may have no process to spare for a while."""
    played = Played()
    kept = Keeper("d0", played.make, with_spare=False)

    kept.start()
    until(lambda: kept.fault is not None)
    played._answers.append("ready")
    until(lambda: kept.has_served)
    ended(kept, played)

    assert kept.fault is None


def test_a_keeper_may_end_before_it_is_started() -> None:
    """A signal that ends the start of a cluster comes at any time."""
    kept = Keeper("d0", Played().make, with_spare=False)

    kept.close()
    kept.join(WAIT_S)

    assert kept.starts == 0


def test_no_process_follows_after_the_end() -> None:
    played = Played("ready")
    kept = Keeper("d0", played.make, with_spare=False)

    kept.start()
    until(lambda: kept.has_served)
    played._answers.append("ready")
    ended(kept, played)

    assert played.heard == ["start 1"]


class Ends:
    """Records the ends of processes that a keeper reports."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int | None]] = []

    def tell(self, start: int, status: int | None) -> None:
        self.told.append((start, status))


class Dying:
    """Processes that serve, say this on their lines, and end; the last one goes on."""

    def __init__(self, *words: tuple[str, ...]) -> None:
        self._words = [*words]
        self._last: socket.socket | None = None

    def make(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.send(b"ready")
        if not self._words:
            self._last = theirs
            return ours
        for word in self._words.pop(0):
            theirs.send(word.encode())
        theirs.close()
        return ours

    def end(self) -> None:
        assert self._last is not None
        self._last.close()


def ends_of(*words: tuple[str, ...], status: int | None = None) -> list[tuple[int, int | None]]:
    """The reported ends of processes that say these words."""
    dying, ends = Dying(*words), Ends()
    kept = Keeper("d0", dying.make, with_spare=False, ended=ends.tell, status=lambda: status)
    kept.start()
    until(lambda: kept.starts > len(words))
    kept.close()
    dying.end()
    kept.join(WAIT_S)
    return ends.told


def test_the_status_that_is_told_first_is_the_one_of_the_end() -> None:
    """A process tells that of the rank that it ends with, its nursery its own after it. Faults that
    it tells before its end are no statuses.
    """
    told = ends_of(("exit -9",), ("fault ranks have died", "exit -11", "exit 1"), ("exit",))

    assert told == [(1, -9), (2, -11), (3, None)]


def test_a_process_of_its_own_has_the_status_of_its_end() -> None:
    told = ends_of((), ("fault no memory",), status=-6)

    assert told == [(1, -6), (2, -6)]


def test_words_that_a_process_did_not_hear_do_not_hide_its_status() -> None:
    """A socket that is closed with words in it is reset, and the status lies behind that."""
    ends = Ends()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = Keeper("d0", lambda: ours, with_spare=False, ended=ends.tell)
    theirs.send(b"ready")
    kept.start()
    until(lambda: kept.has_served)
    kept.learn()

    theirs.send(b"exit -9")
    theirs.close()
    until(lambda: ends.told)
    kept.close()
    kept.join(WAIT_S)

    assert ends.told[0] == (1, -9)


def test_what_a_keeper_ends_itself_is_not_told() -> None:
    """The whole cluster ends then."""
    dying, ends = Dying(), Ends()
    kept = Keeper("d0", dying.make, with_spare=False, ended=ends.tell)
    kept.start()
    until(lambda: kept.has_served)

    kept.close()
    dying.end()
    kept.join(WAIT_S)

    assert ends.told == []
