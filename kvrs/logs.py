"""Log lines: one event, one line, its facts as key=value."""

import logging
import sys
from typing import Any, TextIO

# What every record has; the rest came with `extra=` and is shown.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _KeyValueFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _USUAL}
        line = super().format(record)
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in extra.items())])


def _shown(value: Any) -> str:
    text = str(value)
    # A cause may quote what a peer sent: control characters must not forge lines of their own.
    return repr(text) if not text.isprintable() or " " in text else text


def log_to_stderr() -> None:
    """Log everything from INFO on."""
    log_to(sys.stderr)


def log_to(stream: TextIO) -> None:
    """Log everything from INFO on to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_KeyValueFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
