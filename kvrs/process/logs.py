"""Log lines: a line per event, with its facts as key=value pairs or as a JSON object."""

import json
import logging
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

# Environment variable with the log level, which child processes inherit.
LEVEL_ENV_NAME = "KVRS_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")

# Attribute of a log record that holds several rows, each of which becomes a line (`row_log.py`).
ROWS = "rows"
_encode = json.JSONEncoder(default=str).encode

# Attributes that every record has; all others were given by `extra=`, and are shown as facts.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# One line of a record with several rows: Unix time, and facts.
Row = tuple[float, Mapping[str, Any]]


class _Formatter(logging.Formatter, ABC):
    """Formats a record; a record with `rows` becomes a line for each row."""

    def __init__(self, facts: Mapping[str, str]) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        if (rows := getattr(record, ROWS, None)) is not None:
            return "\n".join(self.line(record, at, facts) for at, facts in rows)
        return self.line(record, record.created, _facts_of(record))

    @abstractmethod
    def line(self, record: logging.LogRecord, at: float, facts: Mapping[str, Any]) -> str: ...


class _KeyValueFormatter(_Formatter):
    def line(self, record: logging.LogRecord, at: float, facts: Mapping[str, Any]) -> str:
        seconds, ms = divmod(int(at * 1000), 1000)
        time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
        words = f"{time_text},{ms:03d} {record.levelname} {record.name} {record.getMessage()}"
        all_facts = {**facts, **self._facts}
        line = " ".join([words, *(f"{name}={_shown(value)}" for name, value in all_facts.items())])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(_Formatter):
    def line(self, record: logging.LogRecord, at: float, facts: Mapping[str, Any]) -> str:
        line = {
            **facts,
            **self._facts,
            "time": utc_text(at),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


def utc_text(at: float) -> str:
    """Return a Unix time as ISO 8601 has it, in UTC with milliseconds."""
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _facts_of(record: logging.LogRecord) -> dict[str, Any]:
    # Attributes with this prefix are left out: Ray adds them to every record of its processes.
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _USUAL and not name.startswith("_")
    }


def _shown(value: Any) -> str:
    text = str(value)
    # Control characters are quoted: the cause of an error may hold a peer's bytes, which must not
    # forge log lines.
    return repr(text) if not text.isprintable() or " " in text else text


def log_to_stderr(level: str = "info", *, as_json: bool = False, **facts: str) -> None:
    """Log to stderr as `log_to` does."""
    log_to(sys.stderr, level, as_json=as_json, **facts)


def log_to(stream: TextIO, level: str = "info", *, as_json: bool = False, **facts: str) -> None:
    """Log all messages of at least `level` to a stream, with `facts` on each line. A level in the
    environment takes precedence.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter(facts) if as_json else _KeyValueFormatter(facts))
    asked = os.environ.get(LEVEL_ENV_NAME, "").lower()
    level = asked if asked in LEVELS else level
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if asked and asked not in LEVELS:
        facts_of_it = {"variable": LEVEL_ENV_NAME, "got": asked, "allowed": ", ".join(LEVELS)}
        logging.getLogger(__name__).warning("unknown log level", extra=facts_of_it)


def old_parts(path: Path) -> dict[int, Path]:
    """Return the older files of the event log at `path`, named `<name>.<number>.gz`, by number."""
    numbered = re.compile(re.escape(path.name) + r"\.([0-9]{1,15})\.gz")
    return {
        int(found[1]): each
        for each in path.parent.iterdir()
        if (found := numbered.fullmatch(each.name)) is not None
    }
