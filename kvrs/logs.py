"""Log lines: one event, one line, its facts as key=value or, with the message, as a JSON object."""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
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
        line = super().format(record)
        facts = {**_facts_of(record), **self._facts}
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in facts.items())])


class _JsonFormatter(logging.Formatter):
    def __init__(self, facts: Mapping[str, str]) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(_facts_of(record) | {**self._facts, **line}, default=str)


def _facts_of(record: logging.LogRecord) -> dict[str, Any]:
    # Ray marks every record of its process with attributes that begin so.
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _USUAL and not name.startswith("_")
    }


def _shown(value: Any) -> str:
    text = str(value)
    # A cause may quote what a peer sent: control characters must not forge lines of their own.
    return repr(text) if not text.isprintable() or " " in text else text


def log_to_stderr(level: str = "info", *, as_json: bool = False, **facts: str) -> None:
    """Log to stderr as `log_to` does."""
    log_to(sys.stderr, level, as_json=as_json, **facts)


def log_to(stream: TextIO, level: str = "info", *, as_json: bool = False, **facts: str) -> None:
    """Log everything from a level on to a stream; each line has these facts too. The level of the
    environment comes before the one given.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter(facts) if as_json else _KeyValueFormatter(facts))
    asked = os.environ.get(LEVEL_ENV_NAME, "").lower()
    level = asked if asked in LEVELS else level
    logging.basicConfig(level=level.upper(), handlers=[handler])


def old_parts(path: Path) -> dict[int, Path]:
    """The older files of an event log, `<name>.<number>.gz`, by their numbers."""
    numbered = re.compile(re.escape(path.name) + r"\.([0-9]{1,15})\.gz")
    return {
        int(found[1]): each
        for each in path.parent.iterdir()
        if (found := numbered.fullmatch(each.name)) is not None
    }
