"""One instance kept alive by processes that a nursery forks."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from kvrs.config.file import ENV_NAME
from kvrs.engine.forking import Nursery
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId

_MAX_MESSAGE_BYTES = 1 << 16
# After a start that did not get as far as serving.
_PAUSE_S = 0.5


def nursery_of(config_path: Path, instance: InstanceId, ring: list[bytes], log: IO[str]) -> Nursery:
    """One that forks processes of an instance."""
    command = ["kvrs.engine.nursery", "--config", str(config_path), "--instance", instance]
    return Nursery(command, {ENV_NAME: b"\n".join(ring).decode()}, log)


def forked(nursery: Nursery) -> socket.socket:
    """The line of a new process; it closes when the process ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        nursery.fork(theirs)
    return ours


class Keeper:
    """Has one process of an instance serve, and another one follow it; with a spare, that one is
    made and loaded beforehand.
    """

    def __init__(
        self,
        make: Callable[[], socket.socket],
        next_start: Callable[[], int],
        ready: Callable[[], object],
        with_spare: bool,
    ) -> None:
        self._make, self._next_start, self._ready = make, next_start, ready
        self._with_spare = with_spare
        self._serving: socket.socket | None = None
        self._has_served = False

    def run(self) -> NoReturn:
        """Raises ConfigError: the first process cannot serve as it is configured."""
        spare: socket.socket | None = None
        while True:
            with spare or self._make() as line:
                spare = None
                self._serving = line
                if served := self._start(line):
                    self._has_served = True
                    if self._with_spare:
                        spare = self._make()
                    _hear(line)  # Its end.
            if not served:
                time.sleep(_PAUSE_S)

    def stop(self) -> None:
        """Have the process drain and end."""
        if (line := self._serving) is not None:
            with suppress(OSError):
                line.send(b"stop")

    def _start(self, line: socket.socket) -> bool:
        """Whether it serves."""
        with suppress(OSError):
            line.send(f"start {self._next_start()}".encode())
        word, _, fault = _hear(line).partition(" ")
        if word == "fault" and not self._has_served:
            raise ConfigError(fault.splitlines())
        if word != "ready":
            return False
        self._ready()
        return True


def _hear(line: socket.socket) -> str:
    """The next message; "" when the process has ended."""
    try:
        return line.recv(_MAX_MESSAGE_BYTES).decode()
    except ConnectionError:
        return ""
