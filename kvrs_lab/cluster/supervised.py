"""Supervised processes, each restarted when it ends.

Instances, DistServe servers, agents and stage hosts have a line to their supervisor: one of a pair
of connected sockets. Such a process ends at once when the line is closed, and the line closes when
the process ends.

    to a process:  "start N"; then "learn" (read the file again)
    from it:       "ready" when requests are taken; "fault TEXT" before an end that every start of
                   the same configuration would have; "exit STATUS" of the process that caused the
                   end, without a number if unknown
"""

import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from kvrs.config.file import Config
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import ExitReport
from kvrs_engine.engine.nursery import MAX_MESSAGE_BYTES, AdoptedChild, Nursery, spawn
from kvrs_lab.cluster.exits import LOOK_INTERVAL_S as KILLS_INTERVAL_S
from kvrs_lab.cluster.exits import Ended, KernelKills, classify
from kvrs_lab.cluster.processes import (
    Kind,
    LaunchError,
    Process,
    Progress,
    has_spare,
    instances_in,
)
from kvrs_lab.cluster.run_directory import RunDirectory

# Limit of starts, in all, that end during the start without a reported reason.
STARTS = 3
LOOK_INTERVAL_S = 0.05
# Pauses after starts of an instance or agent that did not serve.
PAUSES_S = (0.5,)
_SAY_INTERVAL_S = 10.0
_JOIN_S = 5.0

Made = subprocess.Popen[bytes] | AdoptedChild
# Makes a process with its end of the line; raises OSError, KvrsError.
Make = Callable[[socket.socket], Made]
# Called at the end of a process that has served: the number of its start, and its status as of
# `subprocess`; None: unknown.
TellEnd = Callable[[int, int | None], object]


@dataclass(slots=True)
class ProcessStatus:
    """State of one process."""

    starts: int = 0
    served: int = 0  # Number of the last start that served.
    fault: str | None = None  # Reason of a failure to serve.
    down_s: float | None = None  # Time from the last end until a successor served.

    @property
    def has_served(self) -> bool:
        return self.served > 0


class Supervised(ABC):
    """One process and its successors, in a thread from `start` to `close`."""

    def __init__(self, name: str, pauses_s: Sequence[float], starts: int = 0) -> None:
        """Create a supervisor. `pauses_s` are the pauses after failed starts in turn. `starts` is
        the number of earlier starts.
        """
        self.status = ProcessStatus(starts)
        self._pauses_s = pauses_s
        self._ended_s: float | None = None  # Time of the end of the last process that served.
        self._closing = threading.Event()
        self._lock = threading.Lock()  # Guards against a start after the end has begun.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end, after `close` or after the first process has a fault."""
        if self._thread.ident is not None:  # A signal may come before the thread is started.
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0  # Failed starts in turn.
        while not self._closing.is_set():
            try:
                failure, is_made = self._run_one(), True
            except (OSError, KvrsError) as error:
                failure, is_made = f"cannot be started: {error}", False
            if failure is None:
                failures, self._ended_s = 0, time.monotonic()
            elif not self._closing.is_set():
                failures += 1
                self.status.fault = self._fault(failure, failures)
                # A successor of the first process would have the same fault.
                if is_made and self.status.fault is not None and not self.status.has_served:
                    break
                self._closing.wait(self._pauses_s[min(failures, len(self._pauses_s)) - 1])

    @abstractmethod
    def _run_one(self) -> str | None:
        """Run a process until its end; return why it did not serve, or None. Raises OSError,
        KvrsError: no process can be made.
        """

    def _fault(self, failure: str, failures: int) -> str | None:
        """The fault to report for a failure, the last of `failures` in turn."""
        return failure or None

    def _note_served(self) -> None:
        if self._ended_s is not None:
            self.status.down_s = time.monotonic() - self._ended_s
        self.status.served, self.status.fault = self.status.starts, None


class WithLine(Supervised):
    """A process with a line; a spare successor is made and loaded beforehand."""

    def __init__(
        self,
        name: str,
        make: Make,
        *,
        with_spare: bool = False,
        starts: int = 0,
        tell_end: TellEnd | None = None,
    ) -> None:
        super().__init__(name, PAUSES_S, starts)
        self._make, self._with_spare, self._tell_end = make, with_spare, tell_end
        self._spare: tuple[socket.socket, Made] | None = None
        # The current process with its line, or the last process.
        self._line: socket.socket | None = None
        self._process: Made | None = None

    def learn(self) -> None:
        """Make the process read its file again."""
        self._tell("learn")

    def close(self) -> None:
        """End the process at once, without a successor."""
        self._closing.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _tell(self, word: str) -> None:
        with self._lock, suppress(OSError):
            if self._line is not None:
                self._line.send(word.encode())

    def _run(self) -> None:
        super()._run()
        if self._spare is not None:
            line, process = self._spare
            line.close()
            process.kill()
            _wait(process)

    def _run_one(self) -> str | None:
        (line, process), self._spare = self._spare or self._made(), None
        told = None
        with line:
            with self._lock:
                self._line, self._process = line, process
                if self._closing.is_set():
                    process.kill()
            if (failure := self._serve(line)) is None:
                if self._with_spare and not self._closing.is_set():
                    with suppress(OSError, KvrsError):
                        self._spare = self._made()
                for message in _messages(line):
                    word, _, status_text = message.partition(" ")
                    told = status_text if word == "exit" else told
            with self._lock:
                self._line = None
        status = _wait(process)
        if failure is None and self._tell_end is not None and not self._closing.is_set():
            if told is not None:
                status = int(told) if told else None
            self._tell_end(self.status.starts, status)
        return failure

    def _made(self) -> tuple[socket.socket, Made]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ExitStack() as undo:
            undo.enter_context(ours)
            process = self._make(theirs)
            undo.pop_all()
        return ours, process

    def _serve(self, line: socket.socket) -> str | None:
        """Start the process; return why it does not serve, or None."""
        self.status.starts += 1
        with suppress(OSError):
            line.send(f"start {self.status.starts}".encode())
        word, _, fault = next(_messages(line), "").partition(" ")
        if word == "ready":
            self._note_served()
            return None
        return fault if word == "fault" else ""


def _wait(process: Made) -> int | None:
    """Wait for the end of a process; return its status; None: unknown."""
    if isinstance(process, AdoptedChild):
        process.wait()
        process.close()
        return process.status
    return process.wait()


def _messages(line: socket.socket) -> Iterator[str]:
    """Yield the messages of a process until its end."""
    is_reset = False
    while True:
        try:
            message = line.recv(MAX_MESSAGE_BYTES).decode()
        except OSError:
            if is_reset:
                return
            is_reset = True  # Unread messages reset the line first.
            continue
        if not message:
            return
        yield message


class MachineSupervisor:
    """The processes of one machine, from `start` to `stop`: instances, DistServe servers and
    agents.
    """

    def __init__(
        self, run: RunDirectory, environment: Mapping[str, str], ended: Ended | None = None
    ) -> None:
        """Create a supervisor; `ended` is called from other threads."""
        self._run, self._environment, self._ended = run, environment, ended
        self._kills, self._stopping = KernelKills(), threading.Event()
        self._supervised: dict[InstanceId, WithLine] = {}
        self._logs = ExitStack()
        self._nursery: Nursery | None = None  # Forks all processes with an engine.

    def start(self, processes: Iterable[Process], config: Config, starts: int = 0) -> None:
        """Start the processes, after `learn`. `starts` is the number of earlier starts of each."""
        threading.Thread(target=self._look_at_kills, name="kills", daemon=True).start()
        command = ["kvrs_lab.cluster.hosted", "--config", str(self._run.config_path())]
        log = self._logs.enter_context(self._run.open_log("nursery"))
        self._nursery = Nursery(command, self._environment, log)
        for process in processes:
            log = self._logs.enter_context(self._run.open_log(process.name))
            own = [*command, "--name", process.name]
            make: Make = partial(spawn, own, self._environment, log)
            if process.kind in (Kind.INSTANCE, Kind.STAGE):
                make = partial(self._nursery.fork, name=process.name, output=log)
            self._supervised[process.name] = WithLine(
                process.name,
                make,
                with_spare=has_spare(config, process),
                starts=starts,
                tell_end=partial(self._tell_end, instances_in(config, process)),
            )
            self._supervised[process.name].start()

    def _look_at_kills(self) -> None:
        while not self._stopping.wait(KILLS_INTERVAL_S):
            self._kills.look()

    def _tell_end(self, instances: Iterable[InstanceId], start: int, status: int | None) -> None:
        if status is None or self._ended is None:
            return
        if (found := classify(status, kernel_killed=self._kills.lately())) is not None:
            for instance in instances:
                self._ended(instance, ExitReport(start, *found))

    def status(self) -> dict[InstanceId, ProcessStatus]:
        return {name: each.status for name, each in self._supervised.items()}

    def log_tail(self, name: InstanceId) -> str:
        return self._run.log_tail(name)

    def learn(self, config: Config) -> None:
        """Make all processes read this configuration."""
        self._run.write_config(self._run.own(config))
        for each in self._supervised.values():
            each.learn()

    def stop(self) -> None:
        """End all processes at once."""
        self._stopping.set()
        for each in self._supervised.values():
            each.close()
        if self._nursery is not None:
            self._nursery.close()
        for each in self._supervised.values():
            each.join(_JOIN_S)
        self._logs.close()


class StartWait:
    """The limit for processes to start, with progress messages at intervals."""

    def __init__(self, timeout_s: float, progress: Progress) -> None:
        self._timeout_s, self._progress = timeout_s, progress
        self._began_s = self._said_s = time.monotonic()
        self.limit = f"{timeout_s:.0f} s"

    def is_over(self, waiting: Iterable[str]) -> bool:
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_INTERVAL_S:
            self._said_s = now_s
            passed = f"{now_s - self._began_s:.0f} s of {self._timeout_s:.0f} s"
            self._progress(f"waiting for {', '.join(waiting)}: {passed}")
        return now_s - self._began_s > self._timeout_s


def wait_ready(
    processes: Mapping[InstanceId, Process],
    status: Callable[[], Mapping[InstanceId, ProcessStatus]],
    log_tail: Callable[[InstanceId], str],
    progress: Progress,
) -> None:
    """Wait until all processes have served.

    Raises:
        LaunchError: a process does not start.
    """
    waiting = dict(processes)
    wait = StartWait(max(process.start_timeout_s for process in processes.values()), progress)
    while waiting:
        for name, one in status().items():
            if (process := waiting.get(name)) is None:
                continue
            if one.has_served:
                del waiting[name]
                progress(f"{process.label} is up")
            elif one.fault is not None:
                lines = one.fault.splitlines()
                raise LaunchError("\n".join(f"{process.label}: {line}" for line in lines))
            elif one.starts > STARTS:
                raise LaunchError(
                    f"{process.label} ended {STARTS} times while it started\n{log_tail(name)}"
                )
        labels = [process.label for process in waiting.values()]
        if waiting and wait.is_over(labels):
            tail = log_tail(next(iter(waiting)))
            raise LaunchError(f"{', '.join(labels)} did not start within {wait.limit}\n{tail}")
        time.sleep(LOOK_INTERVAL_S)
