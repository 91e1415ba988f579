"""The processes of ranks as the process of their instance sees them, and the memory of their
units.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from kvrs.errors import RanksLostError
from kvrs.transfer.shared_memory.regions import Region
from kvrs_engine.elastic.units import Unit
from kvrs_engine.engine.nursery import Nursery
from kvrs_engine.engine.ranks.futex import Life
from kvrs_engine.engine.ranks.settings import rank_name
from kvrs_engine.engine.ranks.wire import Answer, Order, RankGoneError, Receiver, encode, send

_ORDER_TIMEOUT_S = 5.0  # Until a rank that takes no order has gone.
_STATUS_S = 0.5  # Until one that computes nothing any more has ended, and its status is known.
END_S = 1.0  # Until a rank that is told to end has ended.


@dataclass(frozen=True, slots=True)
class UnitAt:
    """Where a unit lies."""

    memory: Region
    offset: int
    stop: int


def give_back(units: Iterable[UnitAt], kept: Iterable[UnitAt]) -> None:
    """Give back the memory of units; what has none of those that are kept is closed."""
    memories: dict[int, Region] = {}
    for at in units:
        at.memory.drop(at.offset, at.stop)
        memories[id(at.memory)] = at.memory
    used = {id(at.memory) for at in kept}
    for key, memory in memories.items():
        if key not in used:
            memory.close()


@dataclass(frozen=True, slots=True)
class Answered:
    seat: "RankSeat"
    answer: Answer


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has died. Each is told at least once."""

    seat: "RankSeat"


@dataclass(frozen=True, slots=True, eq=False)
class RankOrdered:
    """A rank leaves on purpose, or comes back, by order of an operator."""

    rank: int
    leaves: bool
    refused: "Future[str | None]"  # Why; None: it is carried out.


class RankSeat:
    """One process of a rank, and the memory of its units, which outlives it."""

    def __init__(
        self, rank: int, nursery: Nursery, tell: Callable[[Answered | Ended], object]
    ) -> None:
        """Have it forked. `tell` is called from other threads.

        Raises:
            KvrsError: there is no memory, or no process can be forked.
        """
        self.rank, self._tell = rank, tell
        self.units: dict[Unit, UnitAt] = {}
        self.is_loaded = False
        self._is_ending = self._was_killed = False  # By itself or from outside; because it hung.
        self.has_died = False  # It computes nothing any more; its memory is perhaps still freed.
        self._sending = threading.Lock()
        self.lives = Region.anonymous("kvrs-life", Life.BYTES)
        with ExitStack() as undo:
            undo.callback(self.lives.close)
            self._life = Life(self.lives.memory, 0)
            self._life.prepare()
            self._pair, theirs = socket.socketpair()
            undo.enter_context(self._pair)
            timeout = struct.pack("@ll", int(_ORDER_TIMEOUT_S), 0)
            self._pair.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            self._answers = Receiver(self._pair, Answer)
            with theirs:
                self.process = nursery.fork(theirs, rank_name(rank))
            undo.pop_all()
        # A nursery that had to begin for it is there for the next one.
        self.began_s = time.monotonic()
        self._threads = [self._run(self._read)]

    @property
    def pid(self) -> int:
        return self.process.pid

    def order(self, message: Order, descriptors: Sequence[int] = ()) -> None:
        """Raises RanksLostError: it has ended, or takes no orders."""
        self.send(encode(message), descriptors)

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            with self._sending:
                send(self._pair, frame, descriptors)
        except RankGoneError as error:
            raise RanksLostError([self.rank], str(error)) from None

    def watch(self) -> None:
        """Tell its death at once from now on; it has begun its life."""
        self.is_loaded = True
        self._threads.append(self._run(self._await_end))

    def kill(self, *, with_device: bool = False) -> None:
        """End it, which hangs or is lost with its device; it computes nothing any more when this
        returns.
        """
        self._was_killed |= not (with_device or self._is_ending or self.process.poll())
        self.process.kill()
        if not self.has_died:
            self.process.wait()
            self.has_died = True

    def status(self) -> int | None:
        """How it has ended, as `exit_status`; None: it hung, or that is not known."""
        self.process.wait(_STATUS_S)
        return None if self._was_killed else self.process.status

    def close(self, patience_s: float = 0.0) -> None:
        """End it, and give its memory back."""
        with suppress(OSError):
            self._pair.shutdown(socket.SHUT_RDWR)
        self.process.wait(patience_s)
        self.process.close()
        for thread in self._threads:
            thread.join(END_S)
        self._pair.close()
        self.lives.close()
        self.release(list(self.units))

    def release(self, units: Sequence[Unit]) -> None:
        """Give back the memory of units that it does not have any more."""
        gone = [self.units.pop(unit) for unit in units]
        give_back(gone, self.units.values())

    def _run(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"rank-{self.rank}", daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        while True:
            try:
                answer = self._answers.receive()
            except RankGoneError:
                self._is_ending = True
                self._tell(Ended(self))
                return
            self._tell(Answered(self, answer))

    def _await_end(self) -> None:
        self._life.await_end()
        self._is_ending = self.has_died = True
        self._tell(Ended(self))


def status_of(seats: Iterable[RankSeat]) -> int | None:
    """How all of them have ended; None: differently, or that is not known of one."""
    found = {seat.status() for seat in seats}
    return found.pop() if len(found) == 1 else None
