"""Member processes of one system, and the member changes in their logs."""

import contextlib
import re
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Self

START_TIMEOUT_S = PATIENCE_S = 60.0
_LOOK_S = 0.02
_LINE = re.compile(r"^(\S+ \S+) \w+ \S+ member changed member=(\S+) status=(\S+) epoch=(\d+)")


@dataclass(frozen=True, slots=True)
class Noticed:
    at_s: float  # Wall clock, which all processes of this machine share.
    by: str
    member: str
    status: str
    epoch: int


class Members(ABC):
    """Processes under `names`; ended with the block."""

    def __init__(self, count: int) -> None:
        self.names = [f"n{number}" for number in range(count)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._read: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        self.directory = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrs-gossip-"))
        )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self._stack.close()

    @abstractmethod
    def begun(self, name: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """A process that writes there."""

    def start(self, name: str) -> None:
        with self._log(name).open("ab") as log:
            self._running[name] = self.begun(name, log)

    def wait_ready(self) -> None:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not all(b"ready" in self._log(name).read_bytes().splitlines() for name in self.names):
            for name, process in self._running.items():
                if process.poll() is not None or time.monotonic() > give_up_s:
                    raise RuntimeError(
                        f"{name} did not "
                        f"start\n{self._log(name).read_text(errors='replace')[-2000:]}"
                    )
            time.sleep(0.05)

    def signal(self, name: str, number: signal.Signals) -> float:
        """When it was sent."""
        at_s = time.time()
        self._running[name].send_signal(number)
        if number is signal.SIGKILL:
            self._running[name].wait()
        return at_s

    def noticed(self) -> Iterator[Noticed]:
        """Member changes in all logs since the last call."""
        for name in self.names:
            with self._log(name).open("rb") as log:
                log.seek(self._read.get(name, 0))
                *lines, rest = log.read().split(b"\n")
                self._read[name] = log.tell() - len(rest)
            for line in lines:
                if (found := _LINE.match(line.decode(errors="replace"))) is not None:
                    when, member, status, epoch = found.groups()
                    at_s = datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    yield Noticed(at_s, name, member, status, int(epoch))

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


class Watch:
    """The state of every member at every other, from their logs."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.held: dict[tuple[str, str], Noticed] = {}
        self.deaths: list[Noticed] = []

    def look(self) -> list[Noticed]:
        new = sorted(self._members.noticed(), key=lambda each: each.at_s)
        for each in new:
            self.held[each.by, each.member] = each
        self.deaths += [each for each in new if each.status == "dead"]
        return new

    def settle(self, names: list[str]) -> None:
        """Wait until all hold all alive, also a process that was just started."""
        give_up_s = time.monotonic() + PATIENCE_S
        while any(
            self._status(one, other) != "alive" for one in names for other in names if one != other
        ):
            if time.monotonic() > give_up_s:
                raise TimeoutError("they do not all know each other")
            self.look()
            time.sleep(_LOOK_S)

    def _status(self, one: str, other: str) -> str | None:
        held = self.held.get((one, other))
        return None if held is None else held.status

    def forget(self, name: str) -> None:
        """Drop the states of a killed member."""
        self.held = {key: held for key, held in self.held.items() if key[0] != name}
