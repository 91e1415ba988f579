"""Log lines: one event, one line, its facts as key=value."""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

LEVEL_ENV_NAME = "KVRS_LOG_LEVEL"  # Also for the processes that a process starts.
LEVELS = ("debug", "info", "warning", "error")

# What every record has; the rest came with `extra=` and is shown.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _KeyValueFormatter(logging.Formatter):
    def __init__(self, facts: Mapping[str, str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _USUAL}
        extra |= self._facts
        line = super().format(record)
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in extra.items())])


def _shown(value: Any) -> str:
    text = str(value)
    # A cause may quote what a peer sent: control characters must not forge lines of their own.
    return repr(text) if not text.isprintable() or " " in text else text


def log_to_stderr(**facts: str) -> None:
    """Log everything from the environment's level on; each line has these facts too."""
    log_to(sys.stderr, **facts)


def log_to(stream: TextIO, **facts: str) -> None:
    """Log everything from the environment's level on to a stream; without one from INFO on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_KeyValueFormatter(facts))
    level = os.environ.get(LEVEL_ENV_NAME, "").lower()
    logging.basicConfig(
        level=level.upper() if level in LEVELS else logging.INFO, handlers=[handler]
    )
