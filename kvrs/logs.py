"""Log lines: one event, one line, its facts as key=value."""

import logging
import sys
from collections.abc import Mapping
from typing import Any, TextIO

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
    """Log everything from INFO on; each line has these facts too."""
    log_to(sys.stderr, **facts)


def log_to(stream: TextIO, **facts: str) -> None:
    """Log everything from INFO on to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_KeyValueFormatter(facts))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
