"""Nurseries: processes that have imported the needed modules, and fork children in milliseconds.

A nursery has a single thread and computes nothing: a fork would copy locks that other threads hold,
and a child of a process with OpenMP threads hangs. The forked processes are children of the
requesting process, are killed when it ends, and do not need the nursery.

    to a nursery:    the name of a process, its socket, and perhaps the file for its output
    from a nursery:  "ready" after the imports; then the id of each process
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
_FORK_S = 120.0  # Time limit for a fork, including the nursery's imports.
_SET_DEATH_SIGNAL, _SET_NAME, _SET_CHILD_SUBREAPER = 1, 15, 36  # Options of prctl(2).
_library = ctypes.CDLL(None)

Child = Callable[[socket.socket, str], NoReturn]  # Called with the socket and the name.


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[str] | None,
    theirs: socket.socket,
) -> subprocess.Popen[bytes]:
    """Start a Python module with the descriptor of its socket as an additional argument."""
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--line", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        # One thread, because several engines share the cores, and a nursery must have no others.
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,  # Ctrl-C at a terminal is for the process that needs it.
    )


class _Adopting:
    """Makes this process adopt orphans while a thread waits for a fork; at other times an adopted
    orphan would be an unknown child.
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
    """The client of a nursery process. A nursery that has ended is started again when needed, which
    repeats the imports. Any thread may use it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[str] | None = None,
    ) -> None:
        """`command` is a Python module that takes `--parent` and `--line` and calls `tend`."""
        self._command = command
        self._environment, self._output = environment or {}, output
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | AdoptedChild | None = None
        self._is_ready = self._is_closed = False
        self._forking, self._closing = threading.Lock(), threading.Lock()

    def fork(
        self, theirs: socket.socket, name: str, output: IO[str] | None = None
    ) -> "AdoptedChild":
        """Fork a child of this process, which gets the socket `theirs`. `output` replaces the
        nursery's output.

        Raises:
            KvrsError: no process was forked.
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
        """Fork the nursery from this process, which must have imported the modules and have a
        single thread. The nursery closes the `others`.
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
        """End the nursery, but not its children; other threads stop waiting for a fork."""
        with self._closing:
            self._is_closed = True
            self._end()

    def _begin(self) -> socket.socket:
        with self._closing:
            if self._is_closed:
                raise KvrsError("no process is forked any more")
            self._end()  # A late answer would be taken for the next child.
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
    """A child of this process that a nursery has forked. Any thread may use it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.has_ended = False
        self.status: int | None = None  # Result of `exit_status`; None: running, or not known.
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
        """Wait until the process has ended; return whether it has. None: no time limit."""
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
        """Kill the process without waiting for its end."""
        with self._one, suppress(ProcessLookupError):
            if not self.has_ended:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process if it runs, and close its handle; other threads stop waiting."""
        self.kill()
        self.wait()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def exit_status(found: os.waitid_result) -> int:
    """Return the exit status as in `subprocess`: negative for a signal."""
    status = int(found.si_status)
    return status if found.si_code == os.CLD_EXITED else -status


def tend(parent: int, line: socket.socket, child: Child) -> None:
    """Run a nursery: for each message on `line`, fork a process that calls `child` with the socket
    of the message. `parent` adopts the process, which is killed when `parent` ends.
    """
    gc.freeze()  # Keep existing objects in shared memory: a garbage collection would write to them.
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
                _library.prctl(_SET_NAME, name, 0, 0, 0)  # `ps` and `top` show this name.
                for output in fds[1:]:
                    for own_output in (sys.stdout, sys.stderr):
                        os.dup2(output, own_output.fileno())
                    os.close(output)
                child(theirs, name.decode())
            os.waitpid(between, 0)
        for output in fds[1:]:
            os.close(output)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends.

    Raises:
        KvrsError: the parent has ended already.
    """
    _library.prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise KvrsError("the parent of this process has ended")


def _fork() -> int:
    assert len(list(_TASKS.iterdir())) == 1, "a fork would copy locks of other threads"
    return os.fork()
