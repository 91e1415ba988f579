"""`kvrs incidents` shows the losses and decisions of an event log with their real costs, and
decides them again. Faulty requests are no incidents.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvrs.cli.placements import placements
from kvrs.core.books.prefill_scale import ENOUGH_PREFILLS
from kvrs.core.event_log import Header, LogEntry, read, rerun
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.rules.base import best_by_option
from kvrs.errors import LogError
from kvrs.ids import InstanceId, StreamId
from kvrs.process.logs import old_parts
from kvrs.tables import show

# Function that turns a time of the log into fields of the output.
Moments = Callable[[float], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Loss:
    line: int
    at_s: float
    instance: InstanceId  # Id of the instance or agent that was lost, or whose attempt broke.
    cause: str
    # The stream, if only its attempt broke; None: the instance or agent is lost.
    stream: StreamId | None
    is_refusal: bool = False  # True if the instance refused the attempt (HTTP 4xx).


@dataclass(slots=True)
class RecordedDecision:
    line: int
    at_s: float
    action: act.Recovered | act.GiveUp
    plan: act.Plan | None  # The new plan; None: the stream was given up, or stayed at its instance.
    # Result of the decision; None: no token came before the attempt or the log ended.
    settled: act.Settled | None = None
    after_refusal: bool = False  # True if the attempt before this decision was refused.

    @property
    def option(self) -> str:
        return "given up" if isinstance(self.action, act.GiveUp) else self.action.option.value

    @property
    def cause(self) -> str:
        return self.action.message if isinstance(self.action, act.GiveUp) else self.action.cause

    @property
    def way(self) -> str:
        """The recovery in words: its option, source and target."""
        action, plan = self.action, self.plan
        if isinstance(action, act.GiveUp):
            return Option.ABORT.value
        if plan is None:
            return f"{action.option.value} at {action.failed}"
        if plan.prefill is not None:
            return f"{action.option.value} at {plan.prefill}, to {plan.decode}"
        runs = ", ".join(map(_run, plan.runs))
        return f"{action.option.value} to {plan.decode}" + (f" from {runs}" if runs else "")

    @property
    def chosen(self) -> Estimate | None:
        """The estimate that was chosen; None: the stream was given up."""
        action, plan = self.action, self.plan
        if isinstance(action, act.GiveUp):
            return None
        wanted = action.option, action.failed if plan is None else plan.decode, action.predicted_s
        estimates = ((e, (e.option, e.target, e.next_token_s)) for e in action.estimates)
        return next((estimate for estimate, found in estimates if found == wanted), None)

    @property
    def others_wait_s(self) -> float | None:
        """Seconds that the chosen estimate adds for the wait of the event's other victims; None: it
        adds none.
        """
        if isinstance(self.action, act.GiveUp) or not self.action.others or self.chosen is None:
            return None
        return self.chosen.wait_of_others_s(self.action.others)

    @property
    def options(self) -> dict[str, float]:
        """Lowest predicted cost of each option in seconds, over all targets; the cheapest option is
        first.
        """
        estimates = () if isinstance(self.action, act.GiveUp) else self.action.estimates
        best = sorted(best_by_option(estimates), key=lambda each: each.total_s)
        return {each.option.value: each.total_s for each in best}


def _run(run: act.PageRange) -> str:
    return f"{run.holder} [{run.first_page}, {run.first_page + run.pages})"


def incidents(entries: Iterable[LogEntry]) -> list[Loss | RecordedDecision]:
    """Return the losses and decisions of a log in order of time, without those that a faulty
    request caused.
    """
    happened: list[Loss | RecordedDecision] = []
    open_: dict[tuple[StreamId, int], RecordedDecision] = {}
    refused: set[StreamId] = set()  # Streams whose last failure was a refusal by an instance.
    rejected: set[StreamId] = set()  # Streams that were given up because their requests are faulty.
    for entry in entries:
        if (loss := _loss(entry)) is not None:
            happened.append(loss)
            if loss.stream is not None:
                (refused.add if loss.is_refusal else refused.discard)(loss.stream)
        if isinstance(entry.event, ev.InstanceLost):
            refused.difference_update(entry.event.produced_tokens)
        plans = {
            (each.stream, each.attempt): each.plan
            for each in entry.actions
            if isinstance(each, act.Start)
        }
        for action in entry.actions:
            match action:
                case act.Recovered(stream=stream, attempt=attempt):
                    open_[stream, attempt] = decision = RecordedDecision(
                        entry.line,
                        entry.now_s,
                        action,
                        plans.get((stream, attempt)),
                        after_refusal=stream in refused,
                    )
                    happened.append(decision)
                case act.GiveUp():
                    if action.reason is act.Reason.REFUSED:
                        rejected.add(action.stream)
                    happened.append(RecordedDecision(entry.line, entry.now_s, action, None))
                case act.Settled(stream=stream, attempt=attempt) if (stream, attempt) in open_:
                    open_.pop((stream, attempt)).settled = action
                case _:
                    pass
    return [each for each in happened if not _is_about_a_request(each, rejected)]


def _is_about_a_request(each: Loss | RecordedDecision, rejected: set[StreamId]) -> bool:
    """Return whether a faulty request caused the loss or decision, so that no instance is
    to blame.
    """
    if isinstance(each, Loss):
        return each.is_refusal and each.stream in rejected
    is_over = isinstance(each.action, act.GiveUp)
    return each.action.stream in rejected and (is_over or each.after_refusal)


def _loss(entry: LogEntry) -> Loss | None:
    event, at = entry.event, (entry.line, entry.now_s)
    match event:
        case ev.InstanceLost():
            return Loss(*at, event.instance, event.cause, None)
        case ev.HolderLost():
            return Loss(*at, event.holder, event.cause, None)
        case ev.AttemptFailed():
            is_refusal = event.failure is ev.FailureKind.REFUSED
            return Loss(*at, event.instance, event.cause, event.stream, is_refusal)
        case _:
            return None


def show_incidents(path: Path, *, as_json: bool = False) -> bool:
    """Print each loss and each decision of an event log, and whether the policy decides the same
    again, given the same events.

    Returns:
        False if a decision differs.

    Raises:
        LogError: the file cannot be read, or has an invalid line.
    """
    lines, notes = lines_of(path)
    with _named(path):
        records = [*read(lines)]
        # The decisions of a log whose beginning is missing are shown, but not made again: earlier
        # events would be needed.
        is_whole = not any(isinstance(each, Header) and each.part > 1 for each in records[:1])
        again = rerun(lines) if is_whole else None
    if again is None:
        notes.append("not run again: the log begins in the middle")
    difference = None if again is None else again.difference
    entries = [record for record in records if isinstance(record, LogEntry)]
    notes += _guesses(entries)
    happened, moment = incidents(entries), _moments(entries)
    document = {
        "version": 1,
        "log": path.name,
        "notes": notes,
        "events": len(entries),
        "actions": sum(len(entry.actions) for entry in entries),
        "span_s": entries[-1].now_s - entries[0].now_s if entries else 0.0,
        "began_wall_s": entries[0].wall_s if entries else None,
        "same": None if again is None else difference is None,
        "difference": difference
        and {
            "line": difference.entry.line,
            "event": type(difference.entry.event).__name__,
            "recorded": [each if as_json else str(each) for each in difference.entry.actions],
            "again": [each if as_json else str(each) for each in difference.again],
        },
        **placements(entries),
        "losses": [asdict(each) | moment(each.at_s) for each in happened if isinstance(each, Loss)],
        "decisions": [
            _plain_decision(each, moment)
            | {name: getattr(each, name) for name in ("action", "plan", "settled", "after_refusal")}
            for each in happened
            if isinstance(each, RecordedDecision)
        ],
    }
    show(document, as_json=as_json, hidden=("action", "plan", "settled", "option", "outcome"))
    return difference is None


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
def _named(path: Path) -> Iterator[None]:
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
    with _named(path):
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


def _moments(entries: Sequence[LogEntry]) -> Moments:
    """Make the function that adds UTC to times of the log, for comparison with other records; logs
    of older versions have no UTC.
    """
    first = next(iter(entries), None)
    wall_zero_s = None if first is None or first.wall_s is None else first.wall_s - first.now_s

    def moment(at_s: float) -> dict[str, Any]:
        utc = None if wall_zero_s is None else datetime.fromtimestamp(wall_zero_s + at_s, UTC)
        return {
            "at_s": at_s,
            "at_utc": utc and utc.isoformat(timespec="milliseconds"),
        }

    return moment


def _plain_decision(each: RecordedDecision, moment: Moments) -> dict[str, Any]:
    action, settled = each.action, each.settled
    back = "open" if settled is None else "back"
    return {
        "line": each.line,
        **moment(each.at_s),
        "stream": action.stream,
        "attempt": getattr(action, "attempt", None),
        "option": each.option,
        "way": each.way,
        "cause": each.cause,
        "raw_s": getattr(each.chosen, "raw_s", None),
        "predicted_s": getattr(action, "predicted_s", None),
        "others_wait_s": each.others_wait_s,
        "real_s": getattr(settled, "real_s", None),
        "regret_s": getattr(settled, "regret_s", None),
        "outcome": "given up" if isinstance(action, act.GiveUp) else back,
        "options": each.options,
    }
