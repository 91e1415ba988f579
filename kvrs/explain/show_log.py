"""`kvrs explain --log`: losses and decisions of an event log, for people or as JSON, and whether
the policy, given the same events, asks for the same again.
"""

import gzip
import re
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrs.errors import LogError
from kvrs.explain.incidents import (
    Loss,
    RecordedDecision,
    chosen_of,
    incidents,
    others_of,
    waited_of,
    way_of,
)
from kvrs.logs import old_parts
from kvrs.policy.event_log import Header, LogEntry, Rerun, read, rerun
from kvrs.policy.model.actions import GiveUp
from kvrs.tables import folded, output


def explain_log(path: Path, *, as_json: bool = False, console: Console | None = None) -> bool:
    """Print each loss and each decision of an event log, and whether the policy, given the same
    events, asks for the same again.

    Returns:
        False if it does not.

    Raises:
        LogError: the file cannot be read, or one of its lines is none.
    """
    console = console or output()
    lines, notes = lines_of(path)
    try:
        records = [*read(lines)]
        # From its middle on a log can be shown, but not run again: earlier events are missing.
        whole = bool(records) and isinstance(records[0], Header) and records[0].part == 1
        again = rerun(lines) if whole or not records else None
    except LogError as error:
        raise LogError(f"{path}: {error}") from error
    entries = [record for record in records if isinstance(record, LogEntry)]
    happened = incidents(entries)
    if as_json:
        console.print_json(
            msgspec.json.encode(_log_as_json(path, entries, happened, again, notes)).decode()
        )
    else:
        _show_log(path, entries, happened, again, notes, console)
    return again is None or again.difference is None


def lines_of(path: Path) -> tuple[list[str], list[str]]:
    """The lines of the log, with those of the file before it where it continues that, and notes on
    them.
    """
    lines, notes = _lines_of_file(path)
    try:
        header = next(read(lines), None)
    except LogError as error:
        raise LogError(f"{path}: {error}") from None
    numbered = re.fullmatch(r"(.+)\.([0-9]{1,15})\.gz", path.name)
    before = path if numbered is None else path.with_name(numbered[1])
    older = [
        found
        for number, found in sorted(old_parts(before).items(), reverse=True)
        if numbered is None or number < int(numbered[2])
    ]
    begin: list[str] = []  # Of the older parts, the newest first.
    own_lines = len(lines)
    for file in older:
        if not isinstance(header, Header) or header.part == 1:
            break
        part, more = _lines_of_file(file)
        try:
            earlier = next(read(part), None)
        except LogError as error:
            raise LogError(f"{file}: {error}") from None
        if not isinstance(earlier, Header) or earlier.part != header.part - 1:
            break
        lines, header = [*part, *lines], earlier
        begin.append(file.name)
        notes = [*more, *notes]
    if begin:
        files = begin[0] if len(begin) == 1 else f"{begin[-1]} to {begin[0]}"
        notes = [f"begins with {files}, {len(lines) - own_lines:,} lines", *notes]
    return lines, notes


def _lines_of_file(path: Path) -> tuple[list[str], list[str]]:
    try:
        whole = path.read_bytes()
        text = (gzip.decompress(whole) if path.suffix == ".gz" else whole).decode()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise LogError(f"{path}: {error}") from None
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LogError(f"{path}: not text: {error.reason} at byte {error.start}") from None
    *lines, rest = text.split("\n")
    # A proxy that is killed while it writes leaves part of a line.
    return lines, [
        f"{path.name} ends within line {len(lines) + 1}, which is left out"
    ] if rest else []


def _show_log(
    path: Path,
    entries: list[LogEntry],
    happened: list[Loss | RecordedDecision],
    again: Rerun | None,
    notes: list[str],
    console: Console,
) -> None:
    for note in notes:
        console.print(note, style="yellow", markup=False)
    span_s = entries[-1].now_s - entries[0].now_s if entries else 0.0
    actions = sum(len(entry.actions) for entry in entries)
    console.print(
        f"{path.name}: {len(entries):,} events in {span_s:,.3f} s, {actions:,} actions",
        markup=False,
    )
    table = Table(
        "at s",
        "line",
        "what",
        "predicted s",
        "corrected s",
        "others wait s",
        "real s",
        "regret s",
        "why, and the others",
    )
    for column in table.columns[3:8]:
        column.justify = "right"
    began_s = entries[0].now_s if entries else 0.0
    began_wall_s = entries[0].wall_s if entries else None
    if began_wall_s is not None:
        began = datetime.fromtimestamp(began_wall_s, UTC)
        console.print(f"begins at {began:%Y-%m-%d %H:%M:%S} UTC", markup=False)
    for each in happened:
        table.add_row(f"{each.at_s - began_s:.3f}", str(each.line), *map(escape, _log_row(each)))
    console.print(folded(table) if happened else "nothing was lost")
    console.print(_verdict(again), markup=False)


def _log_row(each: Loss | RecordedDecision) -> tuple[str, ...]:
    """What, predicted, corrected, what others wait for it, real, regret, and why."""
    if isinstance(each, Loss):
        what = (
            f"{each.instance} lost"
            if each.stream is None
            else f"{each.stream} failed at {each.instance}"
        )
        return what, "", "", "", "", "", each.cause
    action, settled = each.action, each.settled
    if isinstance(action, GiveUp):
        return (
            f"{action.stream} given up: {action.reason.value}",
            "",
            "",
            "",
            "",
            "",
            action.message,
        )
    chosen, waited_s = chosen_of(each), waited_of(each)
    real = ("", "") if settled is None else (f"{settled.real_s:.3f}", f"{settled.regret_s:+.3f}")
    raw = f"{chosen.raw_s:.3f}" if chosen is not None else ""
    others = ", ".join(
        f"{option.value} {total_s:.3f}" for option, total_s in others_of(each).items()
    )
    return (
        f"{action.stream}#{action.attempt}: {way_of(each)}",
        raw,
        f"{action.predicted_s:.3f}",
        "" if waited_s is None else f"{waited_s:.3f}",
        *real,
        others,
    )


def _verdict(again: Rerun | None) -> str:
    if again is None:
        return "not run again: the log begins in the middle"
    if again.difference is None:
        return "run again: the policy asks for the same"
    entry = again.difference.entry
    return (
        f"run again: line {entry.line} differs, on {type(entry.event).__name__}\n"
        f"  recorded: {list(entry.actions)}\n"
        f"  again:    {list(again.difference.again)}"
    )


def _log_as_json(
    path: Path,
    entries: list[LogEntry],
    happened: list[Loss | RecordedDecision],
    again: Rerun | None,
    notes: list[str],
) -> dict[str, Any]:
    """Times as in the log, seconds and pages throughout."""
    difference = again.difference if again is not None else None
    return {
        "version": 1,
        "log": path.name,
        "notes": notes,
        "events": len(entries),
        "actions": sum(len(entry.actions) for entry in entries),
        "same": None if again is None else difference is None,
        "difference": None
        if difference is None
        else {"line": difference.entry.line, "again": difference.again},
        "began_wall_s": entries[0].wall_s if entries else None,
        "losses": [each for each in happened if isinstance(each, Loss)],
        "decisions": [each for each in happened if isinstance(each, RecordedDecision)],
    }
