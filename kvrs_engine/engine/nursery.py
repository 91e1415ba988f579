"""Nurseries: processes that have imported what others need, and fork them in milliseconds.

A nursery computes nothing and has one thread: locks of others would be copied as they are, and a
child of a process with OpenMP threads hangs. What it forks are children of the process that needs
them. They are killed when that one ends, and do not need the nursery.

    to a nursery:  the name of a process, its socket, and perhaps the file of its output
    from it:       "ready", once it has imported all; the id of each process
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from kvrs.errors import KvrsError

MAX_MESSAGE_BYTES = 1 << 16
_TASKS = Path("/proc/self/task")
_LOOK_S = 0.0002
_FORK_S = 120.0  # Until a nursery that has to import everything first has forked.
_SET_DEATH_SIGNAL, _SET_NAME, _SET_CHILD_SUBREAPER = 1, 15, 36  # Of prctl(2).
_library = ctypes.CDLL(None)

Child = Callable[[socket.socket, str], NoReturn]  # With its name.


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[str] | None,
    theirs: socket.socket,
) -> subprocess.Popen[bytes]:
    """Start a Python module, which is given the descriptor of its line as well."""
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--line", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        # One thread: several engines share the cores, and a nursery is forked.
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,  # Ctrl-C at a terminal is for the process that needs it.
    )


class _Adopting:
    """Orphans are adopted while a thread waits for a fork, and only then: what is orphaned at
    another time is no child that this process knows of.
    """

    def __init__(self) -> None:
        self._threads, self._counting = 0, threading.Lock()

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, *_: object) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._counting:
            self._threads += change
            _library.prctl(_SET_CHILD_SUBREAPER, int(self._threads > 0), 0, 0, 0)


_adopting = _Adopting()


class Nursery:
    """The side of the process that needs others. A nursery that has ended is made again when one is
    needed, which takes as long as to import everything. Any thread may use it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[str] | None = None,
    ) -> None:
        """`command`: a Python module that calls `tend` with `--parent` and `--line`."""
        self._command = command
        self._environment, self._output = environment or {}, output
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | AdoptedChild | None = None
        self._is_ready = self._is_closed = False
        self._forking, self._closing = threading.Lock(), threading.Lock()

    def fork(
        self, theirs: socket.socket, name: str, output: IO[str] | None = None
    ) -> "AdoptedChild":
        """Have a process forked that gets this descriptor: a child of this process. `output`:
        where it writes, in place of the nursery's.

        Raises:
            KvrsError: none was forked.
        """
        files = [theirs.fileno(), *([] if output is None else [output.fileno()])]
        with self._forking:
            line = self._line
            for _ in range(2):  # The first nursery may have ended, or end with the request.
                line = line or self._begin()
                with suppress(OSError):
                    line.settimeout(_FORK_S)
                    self._is_ready = self._is_ready or bool(line.recv(MAX_MESSAGE_BYTES))
                    with _adopting:
                        socket.send_fds(line, [name.encode()], files)
                        if answer := line.recv(MAX_MESSAGE_BYTES):
                            return AdoptedChild(int(answer))
                line = None
        raise KvrsError("no process could be forked")

    def begin_here(self, child: Child, *others: socket.socket) -> None:
        """Fork the nursery from this process, which has imported everything and has one thread yet;
        the nursery does not have these other sockets.
        """
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with theirs:
            if (pid := _fork()) == 0:
                try:
                    for each in (self._line, *others):
                        each.close()
                    gc.enable()
                    tend(parent, theirs, child)
                finally:
                    os._exit(0)
            self._process = AdoptedChild(pid)

    def close(self) -> None:
        """End it; its children stay. Another thread that waits for a child waits no more."""
        with self._closing:
            self._is_closed = True
            self._end()

    def _begin(self) -> socket.socket:
        with self._closing:
            if self._is_closed:
                raise KvrsError("no process is forked any more")
            self._end()  # What it may still answer would be taken for the next child.
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [*self._command, "--parent", str(os.getpid())]
                self._process = spawn(command, self._environment, self._output, theirs)
            self._is_ready = False
            return self._line

    def _end(self) -> None:
        if isinstance(self._process, AdoptedChild):
            self._process.close()
        elif self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._line is not None:
            self._line.close()


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


def exit_status(found: os.waitid_result) -> int:
    """The status of a process that has ended, as `subprocess` has it: below 0 minus a signal."""
    status = int(found.si_status)
    return status if found.si_code == os.CLD_EXITED else -status


def tend(parent: int, line: socket.socket, child: Child) -> None:
    """Fork for each message, until the line is closed; the socket that comes with it goes to
    `child`, in a process that `parent` adopts and that is killed when it ends, even while it is
    stopped.
    """
    gc.freeze()  # Processes share the memory of what is there; a collection would write to it.
    die_with_parent(parent)
    line.send(b"ready")
    while True:
        name, fds, _, _ = socket.recv_fds(line, MAX_MESSAGE_BYTES, 2)
        if not name:
            return
        with socket.socket(fileno=fds[0]) as theirs:
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
                _library.prctl(_SET_NAME, name, 0, 0, 0)  # As `ps` and `top` show it.
                for output in fds[1:]:
                    for own_output in (sys.stdout, sys.stderr):
                        os.dup2(output, own_output.fileno())
                    os.close(output)
                child(theirs, name.decode())
            os.waitpid(between, 0)
        for output in fds[1:]:
            os.close(output)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent ends.

    Raises:
        KvrsError: it has ended already.
    """
    _library.prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise KvrsError("the parent of this process has ended")


def _fork() -> int:
    assert len(list(_TASKS.iterdir())) == 1, "a fork would copy locks of other threads"
    return os.fork()
