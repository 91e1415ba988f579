"""A program that runs to its end or to its time limit, with what it cost."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.record import ROOT

TELL_S = 60.0
_END_S = 60.0
_ENDING = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended, and its costs; the CPU time is that of all processes it has awaited."""

    how: str
    status: int | None  # None: it was ended.
    wall_s: float
    cpu_s: float


def run(words: Sequence[str], log: Path, limit_s: float, tell: Callable[[float], None]) -> Ran:
    """Run the command to its end or its time limit; `tell` gets the seconds so far, once a minute.

    All its output goes to the log.
    """
    cpu_s = _cpu_s()
    begun_s = told_s = time.monotonic()
    status: int | None = None
    with log.open("wb") as output:
        # A signal that came before `process` is known would leave it running.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_as_in_front,
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            while (status := process.poll()) is None:
                time.sleep(0.2)
                now_s = time.monotonic()
                if now_s - begun_s > limit_s:
                    _end(process)
                    break
                if now_s - told_s > TELL_S:
                    told_s = now_s
                    tell(now_s - begun_s)
        except BaseException:
            _end(process)
            raise
    wall_s = time.monotonic() - begun_s
    return Ran(_how(status, wall_s, limit_s), status, wall_s, _cpu_s() - cpu_s)


def _how(status: int | None, wall_s: float, limit_s: float) -> str:
    if status is None:
        return f"ended: not done after {limit_s / 60:.1f} min"
    took = f"{wall_s / 60:.1f} min"
    return f"exit status {status} after {took}" if status else f"done in {took}"


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _as_in_front() -> None:
    """Let this process end by signals, which a shell that started it in the background ignores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it like Ctrl-C, so that clusters are taken down; then by force, with the rest of its
    session.
    """
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
