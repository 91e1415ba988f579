"""Nurseries: processes that have imported what others need, and fork them in milliseconds.

A nursery computes nothing and has one thread: locks of others would be copied as they are, and a
child of a process with OpenMP threads hangs.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

from kvrs.errors import KvrsError

_MAX_MESSAGE_BYTES = 1 << 16
_TASKS = Path("/proc/self/task")
_LOOK_S = 0.0002
_FORK_S = 120.0  # Until a nursery that has to import everything first has forked.
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # Of prctl(2).
_library = ctypes.CDLL(None)

Child = Callable[[socket.socket], NoReturn]


class Nursery:
    """The side of the process that needs others. A nursery that has ended is made again when one is
    needed, which takes as long as to import everything.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[str] | None = None,
    ) -> None:
        """`command`: of a Python module, which is also given `--line` with a descriptor."""
        self._command, self._environment, self._output = command, environment, output
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, theirs: socket.socket) -> None:
        """Have a process forked that gets this descriptor, by `tend`."""
        if not self._send(theirs):
            self._begin()
            self._send(theirs)

    def adopt(self, theirs: socket.socket) -> "AdoptedChild":
        """The same, by `tend_for`: a child of this process.

        Raises:
            KvrsError: none was forked.
        """
        with _adopting_orphans():
            for _ in range(2):  # The first nursery may end with the request.
                self.fork(theirs)
                assert self._line is not None
                with suppress(OSError):
                    self._line.settimeout(_FORK_S)
                    if answer := self._line.recv(_MAX_MESSAGE_BYTES):
                        return AdoptedChild(int(answer))
                self.close()  # What it may still answer would be taken for the next child.
        raise KvrsError("no process could be forked")

    def close(self) -> None:
        """End it; its children stay."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _send(self, theirs: socket.socket) -> bool:
        if self._line is not None:
            with suppress(OSError):
                socket.send_fds(self._line, [b"fork"], [theirs.fileno()])
                return True
        return False

    def _begin(self) -> None:
        self.close()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command, "--line", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # One thread in all: it is forked.
                env=os.environ | self._environment | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                process_group=0,  # Ctrl-C at a terminal is for the process that needs it.
            )


class AdoptedChild:
    """A child of this process that another one has forked for it. Any thread may use it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.has_ended = False
        self.status: int | None = None  # As `exit_status`; None: it runs, or that is not known.
        self._handle = os.pidfd_open(pid)
        self._one = threading.Lock()

    def poll(self) -> bool:
        """Return whether the process has ended."""
        with self._one:
            if not self.has_ended:
                try:
                    found = os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOHANG)
                    self.has_ended = found is not None
                    self.status = None if found is None else exit_status(found)
                except ChildProcessError:  # Buried by a signal handler of this process.
                    self.has_ended = True
        return self.has_ended

    def wait(self, patience_s: float | None = None) -> bool:
        """Wait until the process has ended, at most for so long; None: without a limit."""
        if self.poll():
            return True
        with self._one:
            if self.has_ended:
                return True
            handle = os.dup(self._handle)  # Another thread may close it meanwhile.
        try:
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            ended.poll(None if patience_s is None else 1000 * patience_s)
        finally:
            os.close(handle)
        return self.poll()

    def kill(self) -> None:
        """Let it end; `wait` says when it has."""
        with self._one, suppress(ProcessLookupError):
            if not self.has_ended:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """End it, if it has not, and give its handle back; other threads do not wait any more."""
        self.kill()
        self.wait()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def tend(line: socket.socket, child: Child) -> None:
    """Fork for each message, until the line is closed; the descriptor that comes with it goes to
    `child`. Children are the nursery's, and outlive it. When one ends, "exit STATUS" is sent on its
    line, which is closed then: the nursery alone can learn the status.
    """
    gc.freeze()  # Processes share the memory of what is there; a collection would write to it.
    lines: dict[int, socket.socket] = {}  # Of children that run, by their handles.
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    while True:
        for handle, _ in waiting.poll():
            if handle in lines:
                waiting.unregister(handle)
                _tell_end(handle, lines.pop(handle))
            elif (theirs := _request(line)) is None:
                return
            elif (pid := _fork()) == 0:
                # Open here, they would hide the ends of others.
                for other, its_line in lines.items():
                    os.close(other)
                    its_line.close()
                line.close()
                child(theirs)
            else:
                started = os.pidfd_open(pid)
                lines[started] = theirs
                waiting.register(started, select.POLLIN)


def _tell_end(handle: int, line: socket.socket) -> None:
    found = os.waitid(os.P_PIDFD, handle, os.WEXITED)
    os.close(handle)
    assert found is not None, "it has ended"
    with line, suppress(OSError):  # The other end may be closed.
        line.send(f"exit {exit_status(found)}".encode(), socket.MSG_DONTWAIT)


def exit_status(found: os.waitid_result) -> int:
    """The status of a process that has ended, as `subprocess` has it: below 0 minus a signal."""
    status = int(found.si_status)
    return status if found.si_code == os.CLD_EXITED else -status


def tend_for(parent: int, line: socket.socket, child: Child) -> None:
    """The same, of children that `parent` adopts, and that are killed when it ends, even while they
    are stopped.
    """
    die_with_parent(parent)
    for theirs in _requests(line):
        between = _fork()
        if between == 0:
            own = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            while os.getppid() == own:
                time.sleep(_LOOK_S)
            die_with_parent(parent)
            line.send(str(os.getpid()).encode())
            line.close()
            child(theirs)
        os.waitpid(between, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent ends.

    Raises:
        KvrsError: it has ended already.
    """
    _library.prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise KvrsError("the parent of this process has ended")


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Only meanwhile: what is orphaned at another time is no child that this process knows of."""
    _library.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _library.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _requests(line: socket.socket) -> Iterator[socket.socket]:
    gc.freeze()  # Processes share the memory of what is there; a collection would write to it.
    while (theirs := _request(line)) is not None:
        with theirs:
            yield theirs


def _request(line: socket.socket) -> socket.socket | None:
    """The line of a process that is to be forked; None: no more are."""
    message, fds, _, _ = socket.recv_fds(line, _MAX_MESSAGE_BYTES, 1)
    return socket.socket(fileno=fds[0]) if message else None


def _fork() -> int:
    assert len(list(_TASKS.iterdir())) == 1, "a fork would copy locks of other threads"
    return os.fork()
