"""Writes down what the policy was told and what it asked for, off the event loop; `kvrs.policy.event_log` has the form."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from kvrs.errors import ConfigError
from kvrs.policy.actions import Action
from kvrs.policy.event_log import event_line
from kvrs.policy.events import Event

log = logging.getLogger(__name__)

_WRITE_INTERVAL_S = 0.5  # So much is lost when the process is killed.
_MOST_PENDING = 200_000  # A disk that takes none of them for so long takes none at all.

_Record = tuple[float, Event, Sequence[Action]]


class EventLog:
    """Part 1 begins with the proxy. A part that has grown to `limit_bytes` is put aside, in place of the part before it."""

    def __init__(self, path: Path, limit_bytes: int, header: Callable[[int], str]) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._header = header
        self._part = 0
        self._size_bytes = 0
        self._file: TextIO | None = None  # Once open, only the writer's.
        self._given_up = False
        self._pending: list[_Record] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="event-log")

    def open(self) -> None:
        """Raises ConfigError when the file cannot be written."""
        try:
            self._begin_part()
        except OSError as error:
            raise ConfigError([f"proxy.event_log: {self._path}: {error.strerror}; allowed: a file that can be written"]) from None

    def note(self, now_s: float, event: Event, actions: Sequence[Action]) -> None:
        if self._given_up:
            return
        self._pending.append((now_s, event, actions))
        if len(self._pending) > _MOST_PENDING:
            self._give_up("the disk does not keep up")

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(_WRITE_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._given_up:
            # Shielded: who is cancelled would take what the writer has not begun with it.
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writer, self._write, pending))

    async def close(self) -> None:
        await self.flush()
        self._writer.shutdown()
        if self._file is not None:
            with suppress(OSError):  # Said already.
                self._file.close()

    def _write(self, records: list[_Record]) -> None:
        try:
            for now_s, event, actions in records:
                if self._size_bytes >= self._limit_bytes:
                    self._begin_part()
                self._write_line(event_line(now_s, event, actions))
            assert self._file is not None
            self._file.flush()
        except OSError as error:
            # With a hole in it the log could not be run again.
            self._give_up(str(error.strerror))

    def _begin_part(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._path.is_file():
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._file = self._path.open("x", encoding="utf-8")
        self._part += 1
        self._size_bytes = 0
        self._write_line(self._header(self._part))
        self._file.flush()

    def _write_line(self, line: str) -> None:
        assert self._file is not None
        self._size_bytes += self._file.write(line + "\n")

    def _give_up(self, cause: str) -> None:
        log.error("the event log ends here", extra={"path": str(self._path), "cause": cause})
        self._given_up = True
        self._pending = []
