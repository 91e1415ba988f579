"""Writer that gathers log lines with the same message and writes them together."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvrs.process.logs import ROWS, Row

_TOGETHER_S = 0.2  # Seconds for which rows are gathered before they are written together.
_MOST_TOGETHER = 256


class RowLog:
    """Writer of log lines with the same message in batches, since writing a line takes as long as
    the work that it reports. A killed process loses the lines of the last moment.
    """

    def __init__(self, log: logging.Logger, message: str, wall_clock: Callable[[], float]) -> None:
        self._log = log
        self._message = message
        self._wall_clock = wall_clock
        self._rows: list[Row] = []

    def add(self, facts: Mapping[str, Any]) -> None:
        if not self._rows:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self.write)
        self._rows.append((self._wall_clock(), facts))
        if len(self._rows) == _MOST_TOGETHER:
            self.write()

    def write(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._log.info(self._message, extra={ROWS: rows})
