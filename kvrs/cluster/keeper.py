"""One process kept alive: another one follows it whenever it ends.

A process has a line to its keeper, one of a pair of connected sockets. It ends at once when the
line is closed, and the line closes when it ends.

    to a process:  "start N"; then "stop" (drain and end), "learn" (read the file again)
    from it:       "ready", once it takes requests; "fault TEXT", before it ends, where a start of
                   the same configuration would end likewise; "exit STATUS", of the process whose
                   end ends it, without a number where that is not known. A nursery sends it for a
                   process that it has forked, when that has ended.
"""

import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from kvrs.engine.forking import Nursery
from kvrs.ids import InstanceId

_MAX_MESSAGE_BYTES = 1 << 16
# After a start that did not get as far as serving.
PAUSE_S = 0.5

Make = Callable[[], socket.socket]  # Makes a process; raises OSError.
# Told of the end of one that has served: the number of its start, and its status as of
# `subprocess`; None: not known.
Ended = Callable[[int, int | None], object]


def nursery_of(
    config_path: Path, instance: InstanceId, environment: Mapping[str, str], log: IO[str]
) -> Nursery:
    """One that forks processes of an instance."""
    command = ["kvrs.engine.nursery", "--config", str(config_path), "--instance", instance]
    return Nursery(command, environment, log)


def forked(nursery: Nursery) -> socket.socket:
    """The line of a new process of a nursery."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        nursery.fork(theirs)
    return ours


class Spawner:
    """Starts a process of its own each time; `spawn` is given the descriptor of its line."""

    def __init__(self, spawn: Callable[[int], subprocess.Popen[bytes]]) -> None:
        self._spawn = spawn
        self._last: subprocess.Popen[bytes] | None = None

    def make(self) -> socket.socket:
        if self._last is not None:
            self._last.wait()  # Its line has closed.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._last = self._spawn(theirs.fileno())
        return ours

    def status(self) -> int | None:
        """The exit status of the last process, whose line has closed."""
        return None if self._last is None else self._last.wait()

    def close(self) -> None:
        """After the end of its keeper: end what is left."""
        if self._last is not None:
            self._last.kill()
            self._last.wait()


class Keeper:
    """Has one process serve, and another one follow it, in a thread from `start` to `close`; with a
    spare, that one is made and loaded beforehand.
    """

    def __init__(
        self,
        name: str,
        make: Make,
        *,
        with_spare: bool,
        starts: int = 0,
        ended: Ended | None = None,
        status: Callable[[], int | None] | None = None,
    ) -> None:
        """`starts`: how many there have been before. `status`: of a process that has ended, where
        its line does not tell it.
        """
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._make = make
        self._with_spare = with_spare
        self._ended, self._status = ended, status
        self._serving: socket.socket | None = None
        self._lock = threading.Lock()  # Of `_serving`, which is closed by the thread alone.
        self._closing = threading.Event()
        self.starts = starts
        self.has_served = False
        self.fault: str | None = None  # Why the last process does not serve.

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """After `close`, or where a first process cannot serve as it is configured."""
        if self._thread.ident is not None:  # A signal may come before it is started.
            self._thread.join(timeout_s)

    def _run(self) -> None:
        spare: socket.socket | None = None
        while not self._closing.is_set():
            try:
                line, spare = spare or self._make(), None
            except OSError as error:
                self.fault = f"it cannot be started: {error}"
                self._closing.wait(PAUSE_S)
                continue
            with line:
                self._hold(line)
                if served := self._start(line):
                    if self._with_spare and not self._closing.is_set():
                        with suppress(OSError):
                            spare = self._make()
                    told = _hear_exit(line)
                self._hold(None)
            if served:
                self._tell_end(told)
                continue
            if self.fault is not None and not self.has_served:
                break
            self._closing.wait(PAUSE_S)
        if spare is not None:
            spare.close()

    def _tell_end(self, told: str | None) -> None:
        if self._ended is None or self._closing.is_set():
            return
        if told is None:
            status = None if self._status is None else self._status()
        else:
            status = int(told) if told else None
        self._ended(self.starts, status)

    def stop(self) -> None:
        """Have the process drain and end; another one follows it."""
        self._tell("stop")

    def learn(self) -> None:
        """Have the process read its file again."""
        self._tell("learn")

    def close(self) -> None:
        """End the process at once; none follows it."""
        self._closing.set()
        with self._lock, suppress(OSError):
            if self._serving is not None:
                self._serving.shutdown(socket.SHUT_RDWR)

    def _tell(self, word: str) -> None:
        with self._lock, suppress(OSError):
            if self._serving is not None:
                self._serving.send(word.encode())

    def _hold(self, line: socket.socket | None) -> None:
        with self._lock:
            self._serving = line

    def _start(self, line: socket.socket) -> bool:
        """Start the process; False: it does not serve."""
        self.starts += 1
        if self._closing.is_set():
            return False
        with suppress(OSError):
            line.send(f"start {self.starts}".encode())
        word, _, fault = _hear(line).partition(" ")
        self.fault = fault if word == "fault" else None
        if word == "ready":
            self.has_served = True
        return word == "ready"


def _hear(line: socket.socket) -> str:
    """The next message; "" when the process has ended."""
    try:
        return line.recv(_MAX_MESSAGE_BYTES).decode()
    except OSError:
        return ""


def _hear_exit(line: socket.socket) -> str | None:
    """The status that is told before the process has ended, which is awaited: the first one, "" for
    one that is not known; None: none is told.
    """
    told: str | None = None
    resets = 0
    while True:
        try:
            message = line.recv(_MAX_MESSAGE_BYTES).decode()
        except OSError:
            # Words that it did not hear make a reset of its end, before what it said.
            resets += 1
            if resets > 1:
                return told
            continue
        if not message:
            return told
        word, _, status = message.partition(" ")
        if word == "exit" and told is None:
            told = status
