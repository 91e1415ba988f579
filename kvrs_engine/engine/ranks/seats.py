"""A rank's process and the memory of its units, as objects of the instance's process."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from kvrs.errors import RanksLostError
from kvrs.transfer.shared_memory import Region
from kvrs_engine.elastic.units import Unit
from kvrs_engine.engine.nursery import Nursery
from kvrs_engine.engine.ranks.futex import Life
from kvrs_engine.engine.ranks.settings import rank_name
from kvrs_engine.engine.ranks.wire import Answer, Order, RankGoneError, Receiver, encode, send

_ORDER_TIMEOUT_S = 5.0  # A rank that takes no order for this time counts as lost.
_STATUS_S = 0.5  # Time limit for the exit status of a dead rank.
END_S = 1.0  # Time limit for the end of a rank that was told to end.


@dataclass(frozen=True, slots=True)
class UnitAt:
    """The place of a unit in memory."""

    memory: Region
    offset: int
    stop: int


def give_back(units: Iterable[UnitAt], kept: Iterable[UnitAt]) -> None:
    """Free the memory of units, and close memories without any unit in `kept`."""
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
    """A rank's process has died. Each death is reported at least once."""

    seat: "RankSeat"


@dataclass(frozen=True, slots=True, eq=False)
class RankOrdered:
    """An operator's order that a rank leave on purpose or come back."""

    rank: int
    leaves: bool
    refused: "Future[str | None]"  # The reason of a refusal; None: carried out.


class RankSeat:
    """One process of a rank, and the memory of its units, which outlives it."""

    def __init__(
        self, rank: int, nursery: Nursery, tell: Callable[[Answered | Ended], object]
    ) -> None:
        """Fork the process. `tell` is called from other threads.

        Raises:
            KvrsError: there is no memory, or no process can be forked.
        """
        self.rank, self._tell = rank, tell
        self.units: dict[Unit, UnitAt] = {}
        self.is_loaded = False
        self._is_ending = False  # The process is ending by itself or by a kill from outside.
        self._was_killed = False  # This object has killed the process because it hung.
        self.has_died = False  # The process computes no more; the kernel may still free memory.
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
        # The time excludes the start of the nursery, which is needed only once.
        self.began_s = time.monotonic()
        self._threads = [self._run(self._read)]

    @property
    def pid(self) -> int:
        return self.process.pid

    def order(self, message: Order, descriptors: Sequence[int] = ()) -> None:
        """Send an order; raises RanksLostError if the rank has ended or takes no orders."""
        self.send(encode(message), descriptors)

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            with self._sending:
                send(self._pair, frame, descriptors)
        except RankGoneError as error:
            raise RanksLostError([self.rank], str(error)) from None

    def watch(self) -> None:
        """Report the rank's death at once from now on, by its mutex, which the rank holds now."""
        self.is_loaded = True
        self._threads.append(self._run(self._await_end))

    def kill(self, *, with_device: bool = False) -> None:
        """Kill a rank that hangs or is lost with its device, and wait until it computes no more."""
        self._was_killed |= not (with_device or self._is_ending or self.process.poll())
        self.process.kill()
        if not self.has_died:
            self.process.wait()
            self.has_died = True

    def status(self) -> int | None:
        """Return the status of the end, as `exit_status`; None: the rank hung, or not known."""
        self.process.wait(_STATUS_S)
        return None if self._was_killed else self.process.status

    def close(self, patience_s: float = 0.0) -> None:
        """End the process, and free the memory of its units."""
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
        """Free the memory of units that the rank no longer has."""
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
    """Return the common exit status; None: the statuses differ, or one is not known."""
    found = {seat.status() for seat in seats}
    return found.pop() if len(found) == 1 else None
