"""Lines of the log: words and facts, or an object each."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.config.sections import LogLevel
from kvrs.errors import ConfigError
from kvrs.process.logs import LEVEL_ENV_NAME, LEVELS, log_to
from kvrs.process.row_log import RowLog

log = logging.getLogger("kvrs.tests")


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.StringIO]]:
    """Begins a log in a process that has none yet."""
    monkeypatch.delenv(LEVEL_ENV_NAME, raising=False)
    level = logging.root.level

    def made(*arguments: Any, **options: Any) -> io.StringIO:
        monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own are there again.
        stream = io.StringIO()
        log_to(stream, *arguments, **options)
        return stream

    yield made
    logging.root.setLevel(level)


def test_a_line_of_json_has_time_level_message_and_facts(
    begin: Callable[..., io.StringIO],
) -> None:
    """Collectors of logs read the names; a fact never takes the place of one of them."""
    stream = begin(as_json=True, worker="proxy-0.1")

    log.warning("instance lost", extra={"instance": "d0", "cause": 'reset "by" peer\n', "time": 7})

    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "kvrs.tests",
        "message": "instance lost",
        "worker": "proxy-0.1",
        "instance": "d0",
        "cause": 'reset "by" peer\n',
    }


def test_a_traceback_stays_within_its_line(begin: Callable[..., io.StringIO]) -> None:
    """A collector reads line by line."""
    stream = begin(as_json=True)

    try:
        raise ValueError("seven")
    except ValueError:
        log.exception("a bug")

    (text,) = stream.getvalue().splitlines()
    assert "ValueError: seven" in json.loads(text)["exception"]
    assert datetime.fromisoformat(json.loads(text)["time"]).tzinfo is not None


def test_a_line_of_the_console_has_facts_behind_words(begin: Callable[..., io.StringIO]) -> None:
    """A cause that quotes a peer forges no line."""
    stream = begin()

    log.info("lost", extra={"cause": "a b\nc", "instance": "d0"})

    assert stream.getvalue().endswith("INFO kvrs.tests lost cause='a b\\nc' instance=d0\n")


@pytest.mark.parametrize("as_json", [True, False])
async def test_rows_are_lines_with_times_of_their_own(
    begin: Callable[..., io.StringIO], as_json: bool
) -> None:
    """One write gives the lines of rows that were logged one by one when they happened."""
    times = [1_700_000_000.25, 1_700_000_060.5]

    stream = begin(as_json=as_json, worker="w")
    rows = RowLog(log, "request", iter(times).__next__)
    for at in times:
        rows.add({"status": 200 + at % 1, "text": "a\nb"})
    assert stream.getvalue() == ""
    rows.write()
    together = stream.getvalue()
    stream = begin(as_json=as_json, worker="w")
    for at in times:
        record = log.makeRecord(
            log.name, logging.INFO, "", 0, "request", (), None, extra={"status": 200 + at % 1}
        )
        record.created, record.text = at, "a\nb"
        log.handle(record)

    assert together == stream.getvalue()
    assert len(together.splitlines()) == 2


@pytest.mark.parametrize(("env", "shown"), [(None, False), ("debug", True), ("error", False)])
def test_the_level_of_the_environment_comes_first(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[..., io.StringIO], env: str | None, shown: bool
) -> None:
    """`kvrs --log-level debug` is asked for once, the file for good."""
    if env is not None:
        monkeypatch.setenv(LEVEL_ENV_NAME, env)
    stream = begin("warning")

    log.info("hello")

    assert ("hello" in stream.getvalue()) is shown


def test_a_level_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[..., io.StringIO]
) -> None:
    """The process starts all the same, at the level of the file."""
    monkeypatch.setenv(LEVEL_ENV_NAME, "verbose")

    shown = begin("info").getvalue()

    assert "unknown log level variable=KVRS_LOG_LEVEL got=verbose" in shown
    assert "allowed='debug, info, warning, error'" in shown


def test_levels_of_the_file_and_of_the_environment_are_the_same() -> None:
    """One of them without a level of the other would be taken for a mistake."""
    assert tuple(LogLevel) == LEVELS


def test_a_format_that_does_not_exist_is_named() -> None:
    """A typo would otherwise be found by the collector."""
    with pytest.raises(ConfigError, match=r"logs\.format: got 'xml'.*console"):
        parse_config({"logs": {"format": "xml"}})
