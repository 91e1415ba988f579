"""`kvrs incidents` describes the incidents of an event log, lists their failures and decisions with
the real costs, and decides everything again.

Placements of prompts at instances that had their beginning in the cache, read from an
event log.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvrs.core.books.prefills import ENOUGH_PREFILLS
from kvrs.core.event_log import Header, LogEntry, Rerun, read, rerun
from kvrs.core.incidents import (
    Incident,
    Incidents,
    Moment,
    OptionCost,
    RecordedDecision,
    off_words,
    sentence,
)
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.errors import ConfigError, LogError
from kvrs.process.logs import old_parts
from kvrs.tables import output, show


def placements(
    entries: Iterable[LogEntry], instance: str | None = None, from_utc: datetime | None = None
) -> dict[str, Any]:
    """Return the number of prompts that began at an instance with a cached part of them, and those
    that were placed there although another instance had a shorter queue; of the latter only those
    with `instance` as one of the two, and those from `from_utc` on.
    """
    starts = [
        (entry, each, each.plan.prefill or each.plan.decode)
        for entry in entries
        for each in entry.actions
        if isinstance(each, act.Start)
    ]
    return {
        "began_cached": sum(bool(each.cached.get(chosen)) for _, each, chosen in starts),
        "placed_by_prefix": [
            {
                "line": entry.line,
                "stream": each.stream,
                "instance": chosen,
                "cached_tokens": each.cached[chosen],
                "shortest_queue": other,
                "cached_there": tokens,
            }
            for entry, each, chosen in starts
            if chosen in each.cached
            for other, tokens in each.cached.items()
            if other != chosen
            and instance in (None, chosen, other)
            and (from_utc is None or _is_since(from_utc, entry))
        ],
    }


def _is_since(from_utc: datetime, entry: LogEntry) -> bool:
    at = Moment(entry.now_s, entry.wall_s).utc
    return at is not None and at >= from_utc


def incidents(entries: Iterable[LogEntry]) -> list[Incident]:
    found = Incidents()
    for entry in entries:
        found.note(entry.now_s, entry.wall_s, entry.event, entry.actions, entry.line)
    return [*found.entries]


def show_incidents(
    path: Path, instance: str | None = None, since: str | None = None, *, as_json: bool = False
) -> bool:
    """Print the incidents and placements of an event log, or those of an instance or since a time,
    and whether the policy decides the same again, given all events.

    Returns:
        False if a decision differs.

    Raises:
        LogError: the file cannot be read, or has an invalid line.
        ConfigError: `since` is no time, or no incident is of `instance`.
    """
    from_utc = None if since is None else _time_of(since)
    lines, notes = lines_of(path)
    with named(path):
        records = [*read(lines)]
        # The decisions of a log whose beginning is missing are shown, but not made again: earlier
        # events would be needed.
        is_whole = not any(isinstance(each, Header) and each.part > 1 for each in records[:1])
        again = rerun(lines) if is_whole else None
    if again is None:
        notes.append("not run again: the log begins in the middle")
    entries = [record for record in records if isinstance(record, LogEntry)]
    notes += _guesses(entries)
    happened = incidents(entries)
    if instance is not None:
        happened = _of(instance, happened)
    if from_utc is not None:
        happened = _since(from_utc, happened)
    facts = {
        "log": path.name,
        "notes": notes,
        "events": len(entries),
        "actions": sum(len(entry.actions) for entry in entries),
        "span_s": entries[-1].now_s - entries[0].now_s if entries else 0.0,
        "began_utc": _utc(Moment(0.0, entries[0].wall_s)) if entries else None,
        "same": None if again is None else again.difference is None,
    }
    others = placements(entries, instance, from_utc) | {
        "difference": _difference(again, as_json=as_json)
    }
    facts["began_cached"] = others.pop("began_cached")
    if as_json:
        found = {"incidents": [_plain(incident) for incident in happened]}
        show({"version": 2} | facts | others | found, as_json=True)
    else:
        said = [f"{incident.at}  {sentence(incident)}" for incident in happened]
        when = f"in {facts['span_s']:.0f} s"
        if from_utc is not None:
            when = f"since {from_utc:%Y-%m-%d %H:%M:%S} UTC"
        for line in said or [f"no incidents {when}"]:
            output().print(line, markup=False, highlight=False)
        tables = {"decisions": [*_decisions(happened)], "failures": [*_failures(happened)]}
        parts = {name: part for name, part in (tables | others).items() if part}
        show(parts | {"checked": facts}, as_json=False)
    return again is None or again.difference is None


def _time_of(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text.removesuffix(" UTC"))
    except ValueError:
        allowed = "a time in UTC, as '2026-11-30 03:57'"
        raise ConfigError(f"--since: got {text!r}; allowed: {allowed}") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _of(instance: str, happened: Iterable[Incident]) -> list[Incident]:
    found: dict[str, list[Incident]] = {}
    for each in happened:
        found.setdefault(each.subject or "", []).append(each)
    if instance not in found:
        names = ", ".join(sorted(filter(None, found))) or "none"
        raise ConfigError(f"INSTANCE: got {instance!r}; allowed: {names} (those with an incident)")
    return found[instance]


def _since(from_utc: datetime, happened: Sequence[Incident]) -> list[Incident]:
    times = [each.at.utc for each in happened]
    if None in times:
        raise ConfigError("--since: the log has no times of day; allowed: no --since")
    return [each for each, at in zip(happened, times, strict=True) if at and at >= from_utc]


def _difference(again: Rerun | None, *, as_json: bool) -> dict[str, Any] | None:
    if again is None or (found := again.difference) is None:
        return None
    return {
        "line": found.entry.line,
        "event": type(found.entry.event).__name__,
        "recorded": [each if as_json else str(each) for each in found.entry.actions],
        "again": [each if as_json else str(each) for each in found.again],
    }


def _decisions(happened: Iterable[Incident]) -> Iterator[dict[str, Any]]:
    """Yield a row for each decision, for people."""
    for incident in happened:
        for victim in incident.victims.values():
            for each in victim.decisions:
                yield {
                    "line": each.line,
                    "time": str(each.at),
                    "stream": victim.stream,
                    "decision": each.way,
                    "cause": each.cause,
                    "predicted, s": _interval(each, each.predicted_s) or each.predicted_s,
                    "real, s": getattr(each.settled, "real_s", None),
                    "off by": off_words(each.off),
                    "pause, s": None if each.settled is None else victim.pause_s,
                    "outcome": each.outcome(victim),
                    "options, s": ", ".join(shown_options(each)) or None,
                }


def _failures(happened: Iterable[Incident]) -> Iterator[dict[str, Any]]:
    for loss in (loss for incident in happened for loss in incident.losses):
        yield {
            "line": loss.line,
            "time": str(loss.at),
            "instance": loss.instance,
            "cause": loss.cause,
            "stream": loss.stream,
        }


def shown_options(decision: RecordedDecision) -> Iterator[str]:
    for cost in decision.costs:
        yield _cost(cost, _interval(decision, cost.predicted_s))
    if decision.agents_down:
        yield f"restore not weighed (down: {', '.join(decision.agents_down)})"


def _interval(decision: RecordedDecision, cost_s: float | None) -> str:
    interval = decision.interval(cost_s)
    return "" if interval is None else f"{interval[0]:.3g} - {interval[1]:.3g}"


def _cost(cost: OptionCost, interval: str) -> str:
    within = f" ({interval})" if interval else ""
    extra = f" (+{cost.extra_s:.3g} for others)" if cost.extra_s >= 0.0005 else ""
    why = f" (excluded: {cost.excluded})" if cost.excluded else ""
    return f"{cost.option.value} {cost.predicted_s:.4g}{within}{extra}{why}"


def _plain(incident: Incident) -> dict[str, Any]:
    return {
        "sentence": sentence(incident),
        **_times(incident.at),
        "subject": incident.subject,
        "kind": incident.kind.name.lower(),
        "up": incident.up and _times(incident.up),
        "longest_pause_s": incident.longest_pause_s,
        "fates": incident.fates,
        "losses": [_dated(each._asdict()) for each in incident.losses],
        "streams": [
            {
                "stream": victim.stream,
                "fate": victim.fate,
                "pause_s": victim.pause_s,
                "decisions": [
                    _dated(asdict(each))
                    | {
                        "option": each.option,
                        "way": each.way,
                        "cause": each.cause,
                        "outcome": each.outcome(victim),
                        "off": each.off,
                        "options": [
                            cost._asdict() | _ends(each.interval(cost.predicted_s))
                            for cost in each.costs
                        ],
                    }
                    for each in victim.decisions
                ],
            }
            for victim in incident.victims.values()
        ],
    }


def _ends(interval: tuple[float, float] | None) -> dict[str, float | None]:
    low_s, high_s = interval or (None, None)
    return {"low_s": low_s, "high_s": high_s}


def _dated(row: dict[str, Any]) -> dict[str, Any]:
    return _times(row.pop("at")) | row


def _times(at: Moment) -> dict[str, Any]:
    return {"at_s": at.now_s, "at_utc": _utc(at)}


def _utc(at: Moment) -> str | None:
    return None if at.utc is None else at.utc.isoformat(timespec="milliseconds")


def _guesses(entries: Iterable[LogEntry]) -> Iterator[str]:
    """Yield a note on the instances whose prefill times were estimated and not measured."""
    ups = [each.event for each in entries if isinstance(each.event, ev.InstanceUp)]
    guessed = {each.info.id for each in ups if _is_guess(each)}
    if guessed:
        yield (
            f"prefill times of {', '.join(sorted(guessed))} are a guess by the size of the model, "
            f"times a factor that is learned from {ENOUGH_PREFILLS} prefills on"
        )


def _is_guess(up: ev.InstanceUp) -> bool:
    return up.info.prefill.is_guess if up.prefill is None else up.prefill.is_guess


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Put the name of a log's file before the errors that this block raises."""
    try:
        yield
    except LogError as error:
        raise LogError(f"{path}: {error}") from error


def lines_of(path: Path) -> tuple[list[str], list[str]]:
    """Return the lines of a log, after the lines of those older files that it continues, and notes
    about these files.
    """
    lines, notes = _lines_of_file(path)
    part, own_lines = _part_of(path, lines), len(lines)
    numbered = re.fullmatch(r"(.+)\.([0-9]{1,15})\.gz", path.name)
    before = path if numbered is None else path.with_name(numbered[1])
    begin: list[str] = []  # Names of older files whose lines come first, newest first.
    for number, file in sorted(old_parts(before).items(), reverse=True):
        if numbered is not None and number >= int(numbered[2]):
            continue
        if part == 1:
            break
        earlier, more = _lines_of_file(file)
        if _part_of(file, earlier) != part - 1:
            break
        lines, notes, part = [*earlier, *lines], [*more, *notes], part - 1
        begin.append(file.name)
    if begin:
        files = begin[0] if len(begin) == 1 else f"{begin[-1]} to {begin[0]}"
        notes = [f"begins with {files}, {len(lines) - own_lines:,} lines", *notes]
    return lines, notes


def _part_of(path: Path, lines: list[str]) -> int:
    """Return the number in the header of a log's file, which counts the files of one log from 1; an
    empty file has 1.
    """
    with named(path):
        header = next(read(lines), None)
    return header.part if isinstance(header, Header) else 1


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
    # Left out, because a proxy that is killed while it writes leaves part of a line.
    cut = f"{path.name} ends within line {len(lines) + 1}, which is left out"
    return lines, [cut] if rest else []
