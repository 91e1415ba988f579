"""Log of the policy's events and actions, written off the event loop."""

import asyncio
import fcntl
import gzip
import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from kvrs.core.event_log import event_line
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.errors import ConfigError
from kvrs.process.logs import old_parts

log = logging.getLogger(__name__)

# Interval of writes; a killed process loses the events since the last write.
_WRITE_INTERVAL_S = 0.5
# Number of waiting lines above which the disk counts as dead, and the log ends.
_MOST_PENDING = 200_000

EVENT_LOG_BYTES = 1 << 30  # Most bytes of a proxy's log, with its older parts.
_PARTS = 16  # Least number of parts that fit into the log's size.
_MOST_PART_BYTES = 32 << 20  # Most bytes of a part, which compresses in about half a second.
COMPRESS_LEVEL = 1

_Record = tuple[float, float, ev.Event, Sequence[act.Action]]


def part_bytes(max_bytes: int) -> int:
    """Return the most bytes of a part, for a log of at most `max_bytes`."""
    return min(max_bytes // _PARTS, _MOST_PART_BYTES)


class EventLog:
    """A file of JSON lines, in parts; part 1 begins with the proxy.

    A full part is compressed to `<name>.<number>.gz`, with a number above all present ones,
    including those of an earlier proxy; the oldest are removed when all exceed `max_bytes`. The
    lock on `<name>.lock` is held from `open` to the process's end, so that no other proxy touches
    the log.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        header: Callable[[int], str],
    ) -> None:
        self._path = path
        self._part_bytes = part_bytes(max_bytes)
        self._most_old_bytes = max_bytes - self._part_bytes
        self._header = header
        self._part = 0
        self._size_bytes = 0
        self._lock: TextIO | None = None
        # Open file of the current part, used only by the writer's thread.
        self._file: TextIO | None = None
        self._given_up = False
        self._pending: list[_Record] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="event-log")

    def open(self) -> None:
        """Lock the log and begin part 1; events noted before are written to it.

        Raises:
            ConfigError: another process writes this log, or the log cannot be written.
        """
        try:
            self._lock = self._path.with_name(f"{self._path.name}.lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin_part()
        except BlockingIOError:
            raise ConfigError(
                f"proxy.event_log: {self._path} is written by another proxy that runs; "
                "allowed: a file of its own for each"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"proxy.event_log: {self._path}: {error.strerror}; allowed: a file "
                f"that can be written"
            ) from None

    def note(
        self, now_s: float, wall_s: float, event: ev.Event, actions: Sequence[act.Action]
    ) -> None:
        if self._given_up:
            return
        self._pending.append((now_s, wall_s, event, actions))
        if len(self._pending) > _MOST_PENDING:
            self._give_up("the disk does not keep up")

    async def run(self) -> None:
        """Write noted events until cancelled."""
        while True:
            await asyncio.sleep(_WRITE_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and self._file is not None and not self._given_up:
            # Shield the future: its cancellation would drop work that the writer has not begun.
            await asyncio.shield(
                asyncio.get_running_loop().run_in_executor(self._writer, self._write, pending)
            )

    async def close(self) -> None:
        await self.flush()
        self._writer.shutdown()
        if self._file is not None:
            with suppress(OSError):  # The error was logged by the writer already.
                self._file.close()
        if self._lock is not None:
            self._lock.close()

    def _write(self, records: list[_Record]) -> None:
        try:
            for now_s, wall_s, event, actions in records:
                if self._size_bytes >= self._part_bytes:
                    self._begin_part()
                self._write_line(event_line(now_s, event, actions, wall_s))
            assert self._file is not None
            self._file.flush()
        except OSError as error:
            # A log with a gap cannot be rerun, so the log ends here.
            self._give_up(str(error.strerror))

    def _begin_part(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._path.is_file():
            self._keep_old_part()
        self._file = self._path.open("x", encoding="utf-8")
        self._part += 1
        self._size_bytes = 0
        self._write_line(self._header(self._part))
        self._file.flush()

    def _keep_old_part(self) -> None:
        old = old_parts(self._path)
        made = self._path.with_name(f"{self._path.name}.{max(old, default=0) + 1}.gz")
        unfinished = made.with_suffix(".tmp")
        with (
            self._path.open("rb") as read,
            gzip.open(unfinished, "wb", compresslevel=COMPRESS_LEVEL) as written,
        ):
            shutil.copyfileobj(read, written, 1 << 20)
        unfinished.replace(made)
        self._path.unlink()
        kept_bytes = made.stat().st_size
        for _, path in sorted(old.items(), reverse=True):
            kept_bytes += path.stat().st_size
            if kept_bytes > self._most_old_bytes:
                path.unlink()

    def _write_line(self, line: str) -> None:
        assert self._file is not None
        self._size_bytes += self._file.write(line + "\n")

    def _give_up(self, cause: str) -> None:
        log.error("the event log ends here", extra={"path": str(self._path), "cause": cause})
        self._given_up = True
        self._pending = []
