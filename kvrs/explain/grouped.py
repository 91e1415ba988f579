"""`kvrs incidents`: losses and decisions of an event log, those near each other as one incident,
and what another policy would have decided at the same moments.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrs.config.policy import PolicyName
from kvrs.errors import LogError
from kvrs.explain.incidents import Loss, RecordedDecision, incidents, way_of
from kvrs.explain.show_log import lines_of
from kvrs.policy.event_log import Header, LogEntry, read
from kvrs.policy.model.actions import GiveUp, Recovered
from kvrs.policy.model.events import SettingsReloaded
from kvrs.policy.recovery import RecoveryPolicy
from kvrs.tables import folded, output

# Losses and decisions within this time of the last ones belong to the same incident.
_APART_S = 2.0


@dataclass(frozen=True, slots=True)
class Incident:
    number: int  # From 1, in the order of the log.
    at_s: float
    losses: tuple[Loss, ...]
    decisions: tuple[RecordedDecision, ...]

    @property
    def cause(self) -> str:
        lost = [f"{each.instance} lost" for each in self.losses if each.stream is None]
        broken = [f"failed at {each.instance}" for each in self.losses if each.stream is not None]
        moved = [_cause_of(each) for each in self.decisions]
        return ", ".join(dict.fromkeys(lost or broken or moved))

    @property
    def outcome(self) -> str:
        given_up = sum(isinstance(each.action, GiveUp) for each in self.decisions)
        back = sum(each.settled is not None for each in self.decisions)
        open_ = len(self.decisions) - given_up - back
        counts = {"back": back, "tried again or cut off": open_, "given up": given_up}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


@dataclass(frozen=True, slots=True)
class OtherDecision:
    """What another policy decides for a stream, given all that happened before."""

    stream: str
    option: str | None  # None: it gives the stream up, or has it wait.
    predicted_s: float | None


def grouped(entries: Iterable[LogEntry]) -> list[Incident]:
    groups: list[list[Loss | RecordedDecision]] = []
    for each in incidents(entries):
        if not groups or each.at_s > groups[-1][-1].at_s + _APART_S:
            groups.append([])
        groups[-1].append(each)
    # A stream that is refused without a loss is overload, not an incident.
    found = [group for group in groups if not all(_is_refusal(each) for each in group)]
    return [
        Incident(
            number,
            group[0].at_s,
            tuple(each for each in group if isinstance(each, Loss)),
            tuple(each for each in group if isinstance(each, RecordedDecision)),
        )
        for number, group in enumerate(found, 1)
    ]


def what_if(
    records: Sequence[Header | LogEntry], name: PolicyName, lines: set[int]
) -> dict[int, list[OtherDecision]]:
    """By line of the log: at that event, after everything before it as it was, this policy decides.

    Raises:
        LogError: the log begins in the middle.
    """
    found: dict[int, list[OtherDecision]] = {}
    policy: RecoveryPolicy | None = None
    header: Header | None = None
    for record in records:
        if isinstance(record, Header):
            if record.part == 1:
                policy, header = RecoveryPolicy(record.policy, record.slo, record.backup), record
            continue
        if policy is None or header is None:
            raise LogError("the log begins in the middle; allowed with --what-if: from part 1 on")
        if isinstance(record.event, SettingsReloaded):
            header = replace(header, policy=record.event.policy, slo=record.event.slo)
        if record.line in lines:
            other = deepcopy(policy)
            settings = header.policy.model_copy(update={"name": name})
            # What is due by then is decided at the first of the two.
            actions = other.handle(SettingsReloaded(settings, header.slo), record.now_s)
            actions += other.handle(record.event, record.now_s)
            found[record.line] = _decided(actions)
        policy.handle(record.event, record.now_s)
    return found


def _decided(actions: Iterable[object]) -> list[OtherDecision]:
    decided = []
    for each in actions:
        if isinstance(each, Recovered):
            decided.append(OtherDecision(each.stream, each.option.value, each.predicted_s))
        elif isinstance(each, GiveUp):
            decided.append(OtherDecision(each.stream, None, None))
    return decided


@dataclass(frozen=True, slots=True)
class _Began:
    """The first moment of a log, on its own clock and on the wall's."""

    now_s: float
    wall_s: float | None  # Older logs have none.

    @classmethod
    def of(cls, entry: LogEntry | None) -> "_Began":
        return cls(0.0, None) if entry is None else cls(entry.now_s, entry.wall_s)

    def utc(self, at_s: float) -> str | None:
        """A moment as ISO 8601 has it, to be laid beside other records."""
        if self.wall_s is None:
            return None
        moment = datetime.fromtimestamp(self.wall_s + at_s - self.now_s, UTC)
        return moment.isoformat(timespec="milliseconds")

    def shown(self, at_s: float) -> str:
        """UTC; seconds since the beginning where the log does not tell the time."""
        if (utc := self.utc(at_s)) is None:
            return f"{at_s - self.now_s:.3f}"
        return utc.removesuffix("+00:00").replace("T", " ")


def show_incidents(
    path: Path,
    number: int | None,
    policy: PolicyName | None,
    *,
    as_json: bool,
    console: Console | None = None,
) -> None:
    """Print all incidents, or one in detail.

    Raises:
        LogError: the log cannot be read, or has no incident of this number.
    """
    console = console or output()
    lines, notes = lines_of(path)
    try:
        records = [*read(lines)]
        found = grouped(record for record in records if isinstance(record, LogEntry))
        if number is not None:
            if not 1 <= number <= len(found):
                allowed = f"1 to {len(found)}" if found else "none, since nothing was lost"
                raise LogError(f"incident {number}: there is none; allowed: {allowed}")
            found = [found[number - 1]]
        asked = {each.line for incident in found for each in incident.decisions}
        instead = {} if policy is None else what_if(records, policy, asked)
    except LogError as error:
        raise LogError(f"{path}: {error}") from error
    began = _Began.of(next((record for record in records if isinstance(record, LogEntry)), None))
    if as_json:
        console.print_json(
            data={
                "version": 1,
                "log": path.name,
                "notes": notes,
                "what_if": None if policy is None else policy.value,
                "incidents": [_plain(each, began, instead) for each in found],
            }
        )
        return
    for note in notes:
        console.print(note, style="yellow", markup=False)
    if not found:
        console.print("nothing was lost")
    elif number is None:
        console.print(_list_of(found, began, policy, instead))
    else:
        _show_one(found[0], began, policy, instead, console)


def _list_of(
    found: Sequence[Incident],
    began: _Began,
    policy: PolicyName | None,
    instead: dict[int, list[OtherDecision]],
) -> Table:
    at = "at s" if began.wall_s is None else "at, UTC"
    columns = ["id", at, "cause", "victims", "decided", "outcome", "worst s", "regret s"]
    table = Table(*columns, *([] if policy is None else [f"other by {policy.value}"]))
    for each in found:
        settled = [one.settled for one in each.decisions if one.settled is not None]
        worst = max((one.real_s for one in settled), default=None)
        regret = sum(one.regret_s for one in settled)
        options: dict[str, int] = {}
        for one in each.decisions:
            options[_option_of(one)] = options.get(_option_of(one), 0) + 1
        changed = sum(_differs(one, instead) for one in each.decisions)
        row = [
            str(each.number),
            began.shown(each.at_s),
            escape(each.cause),
            str(len({one.action.stream for one in each.decisions})),
            ", ".join(f"{count} {option}" for option, count in options.items()),
            each.outcome,
            "" if worst is None else f"{worst:.3f}",
            f"{regret:+.3f}" if settled else "",
        ]
        table.add_row(*row, *([] if policy is None else [f"{changed} of {len(each.decisions)}"]))
    return folded(table)


def _show_one(
    incident: Incident,
    began: _Began,
    policy: PolicyName | None,
    instead: dict[int, list[OtherDecision]],
    console: Console,
) -> None:
    at = began.shown(incident.at_s) + (" s" if began.wall_s is None else " UTC")
    title = f"incident {incident.number}, {at}: {incident.cause}"
    console.print(title, style="bold", markup=False)
    for loss in incident.losses:
        where = "" if loss.stream is None else f" ({loss.stream})"
        console.print(
            f"  {loss.at_s - began.now_s:.3f} s  {loss.instance}{where}: {loss.cause}", markup=False
        )
    table = Table("stream", "decided", "predicted s", "real s", "regret s", "options")
    if policy is not None:
        table.add_column(f"{policy.value} instead")
    for each in incident.decisions:
        action, settled = each.action, each.settled
        options = "" if isinstance(action, GiveUp) else ", ".join(_options(action))
        row = [
            escape(action.stream),
            escape(action.message if isinstance(action, GiveUp) else way_of(each)),
            "" if isinstance(action, GiveUp) else f"{action.predicted_s:.3f}",
            "" if settled is None else f"{settled.real_s:.3f}",
            "" if settled is None else f"{settled.regret_s:+.3f}",
            options,
        ]
        other = _instead_of(each, instead)
        table.add_row(*row, *([] if policy is None else [_words(other)]))
    console.print(folded(table))


def _plain(
    incident: Incident, began: _Began, instead: dict[int, list[OtherDecision]]
) -> dict[str, Any]:
    return {
        "id": incident.number,
        "at_s": incident.at_s - began.now_s,
        "at_utc": began.utc(incident.at_s),
        "cause": incident.cause,
        "outcome": incident.outcome,
        "losses": [
            {
                "at_s": each.at_s - began.now_s,
                "instance": each.instance,
                "stream": each.stream,
                "cause": each.cause,
            }
            for each in incident.losses
        ],
        "decisions": [_plain_decision(each, instead) for each in incident.decisions],
    }


def _plain_decision(
    each: RecordedDecision, instead: dict[int, list[OtherDecision]]
) -> dict[str, Any]:
    action, settled, other = each.action, each.settled, _instead_of(each, instead)
    is_over = isinstance(action, GiveUp)
    return {
        "line": each.line,
        "stream": action.stream,
        "option": _option_of(each),
        "way": way_of(each),
        "cause": _cause_of(each),
        "predicted_s": None if isinstance(action, GiveUp) else action.predicted_s,
        "real_s": None if settled is None else settled.real_s,
        "regret_s": None if settled is None else settled.regret_s,
        "outcome": "given up" if is_over else "open" if settled is None else "back",
        "options": {} if isinstance(action, GiveUp) else _best(action),
        "instead": None
        if other is None
        else {"option": other.option, "predicted_s": other.predicted_s},
    }


def _best(action: Recovered) -> dict[str, float]:
    """Each option with its least predicted cost."""
    best: dict[str, float] = {}
    for each in action.estimates:
        name = each.option.value
        best[name] = min(each.total_s, best.get(name, each.total_s))
    return dict(sorted(best.items(), key=lambda item: item[1]))


def _options(action: Recovered) -> list[str]:
    return [f"{option} {total_s:.3f}" for option, total_s in _best(action).items()]


def _option_of(each: RecordedDecision) -> str:
    return "given up" if isinstance(each.action, GiveUp) else each.action.option.value


def _cause_of(each: RecordedDecision) -> str:
    return each.action.message if isinstance(each.action, GiveUp) else each.action.cause


def _is_refusal(each: Loss | RecordedDecision) -> bool:
    return isinstance(each, RecordedDecision) and isinstance(each.action, GiveUp)


def _instead_of(
    each: RecordedDecision, instead: dict[int, list[OtherDecision]]
) -> OtherDecision | None:
    """What the other policy decides for the stream at that event; None: nothing then."""
    decided = instead.get(each.line, ())
    return next((other for other in decided if other.stream == each.action.stream), None)


def _differs(each: RecordedDecision, instead: dict[int, list[OtherDecision]]) -> bool:
    other = _instead_of(each, instead)
    return (None if other is None else other.option or "given up") != _option_of(each)


def _words(other: OtherDecision | None) -> str:
    if other is None:
        return "nothing yet"
    if other.option is None or other.predicted_s is None:
        return "given up"
    return f"{other.option} {other.predicted_s:.3f}"
