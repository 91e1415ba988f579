"""Format of the event log: a policy's events and actions, by which an incident can be rerun.

The log is JSON lines; this module reads and writes text. The first line has the version and the
settings, each further line an event, its time and its actions. Numbers keep their exact values, so
the same events lead to the same actions.

A log that outgrows its file continues in the next one, whose header has the number of the part;
earlier files are kept as `PATH.NUMBER.gz`. A rerun reads all parts from the first, because the
policy's state depends on all earlier events. A part 1 behind other lines begins a new proxy.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict, replace
from pydantic import ValidationError

from kvrs.config.backup import BackupSettings
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.config.settings import Settings, reason_of
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.streams import Recalled, Stream
from kvrs.core.recovery import RecoveryPolicy
from kvrs.errors import LogError
from kvrs.ids import StreamId
from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import Positive
from kvrs.protocol.instance import LoadReport, Natural, Seconds

VERSION = 2
# Latest valid time: a time too large to add to, or not a number, never reaches an alarm.
_LATEST_S = 1e9
_ALLOWED = "allowed: a proxy's event log (proxy.event_log names the file), from its first line on"
_NO_HEADER = f"no header; {_ALLOWED}"

# Default values of fields of a load report; the log leaves out fields with these values.
_UNSAID: dict[str, Any] = dict(
    [*msgspec.to_builtins(LoadReport(0, 0, 0, 0, 0.0, [])).items()][
        -len(LoadReport.__struct_defaults__) :
    ]
)

_Row = Annotated[list[Seconds], msgspec.Meta(min_length=2)]


class Header(msgspec.Struct, frozen=True):
    policy: PolicySettings
    slo: SloSettings
    backup: BackupSettings
    part: Positive = 1


class LogEntry(msgspec.Struct, frozen=True):
    line: int
    now_s: float
    event: ev.Event
    actions: tuple[act.Action, ...]
    wall_s: float | None = None  # Time of the event by the wall clock; None in older logs.


class RerunDifference(msgspec.Struct, frozen=True):
    """The first event for which the policy now returns other actions."""

    entry: LogEntry
    again: tuple[act.Action, ...]


class Rerun(msgspec.Struct, frozen=True):
    lines: int
    counts: dict[str, int]  # Numbers of events and actions by name, up to the difference.
    difference: RerunDifference | None


class _Grid(msgspec.Struct):
    new_step_tokens: Positive
    cached_step_tokens: Positive
    rows: Annotated[list[_Row], msgspec.Meta(min_length=2)]

    def __post_init__(self) -> None:
        if len({len(row) for row in self.rows}) > 1:
            raise ValueError("prefill.grid.rows: got rows of different lengths; allowed: one")


class _Table(msgspec.Struct):
    label: str
    source: str
    step_tokens: Positive
    seconds: _Row
    covered_from_tokens: Natural
    grid: _Grid | None
    covered_to_tokens: Natural | None = None
    is_guess: bool = False
    is_estimated: bool = False


class _Up(msgspec.Struct):
    prefill: _Table


class _Line(msgspec.Struct):
    at_s: float
    event: ev.Event
    actions: tuple[act.Action, ...]
    wall_s: float | None = None


def header_line(
    policy: PolicySettings, slo: SloSettings, backup: BackupSettings, part: int = 1
) -> str:
    """First line of a file, without its line end. `part` rises with each further file of a log."""
    header = msgspec.to_builtins(Header(policy, slo, backup, part), enc_hook=_as_plain)
    return json.dumps({"kvrs_event_log": VERSION} | header)


def event_line(
    now_s: float, event: ev.Event, actions: Sequence[act.Action], wall_s: float | None = None
) -> str:
    """Line of an event at `now_s` and its actions, without its line end; `wall_s` is the same time
    by the wall clock.
    """
    at = {"at_s": now_s} if wall_s is None else {"at_s": now_s, "wall_s": round(wall_s, 3)}
    # `json` is used because msgspec's writer has null for non-finite numbers.
    return json.dumps(
        at | {"event": _plain(event), "actions": [_plain(action) for action in actions]}
    )


def read(lines: Iterable[str]) -> Iterator[Header | LogEntry]:
    """Read the records of a log one by one.

    Raises:
        LogError: an invalid line, or a first line that is no header.
    """
    for number, text in enumerate(lines, 1):
        try:
            found = json.loads(text)
            if isinstance(found, dict) and "kvrs_event_log" in found:
                yield _header(found)
                continue
            if number == 1:
                raise ValueError(_NO_HEADER)
            yield _entry(number, found)
        except json.JSONDecodeError as error:
            cause = f"line {number}: not JSON: {error.msg} at character {error.pos}"
            raise LogError(cause if number > 1 else f"{cause}; {_ALLOWED}") from None
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise LogError(f"line {number}: {' '.join(str(error).split())}") from None


class RecalledCaches:
    """Restores, for a rerun, the cached tokens that the log's placements recorded: the log has no
    prompts in which to look them up.
    """

    def __init__(self) -> None:
        self._recalled: dict[StreamId, Recalled] = {}

    def policy_of(self, header: Header) -> RecoveryPolicy:
        """Make the policy at the start of the log."""
        return RecoveryPolicy(
            header.policy,
            header.slo,
            header.backup,
            stream_of=lambda name: Stream(name, recalled=self._recalled.get(name, Recalled())),
        )

    def recall(self, policy: RecoveryPolicy, entry: LogEntry) -> None:
        """Restore the cached tokens before the policy gets the entry's event."""
        for action in entry.actions:
            if isinstance(action, act.Start):
                recalled = Recalled(action.cached, action.plan.load)
            elif isinstance(action, act.GiveUp):
                recalled = Recalled(action.cached)
            elif isinstance(action, act.Recovered) and action.option is not Option.START:
                # The record of a new stream that stays has the estimate of a start, with its cached
                # tokens.
                starts = [each for each in action.estimates if each.option is Option.START]
                if not starts:
                    continue
                cached = {starts[0].source or starts[0].target: starts[0].cached_tokens}
                recalled = Recalled(cached)
            else:
                continue
            self._recalled[action.stream] = recalled
            if (stream := policy.streams.get(action.stream)) is not None:
                stream.recalled = recalled


def rerun(lines: Iterable[str]) -> Rerun:
    """Pass all events to a new policy, and compare its actions with the recorded ones, up to the
    first difference.

    Raises:
        LogError: an invalid line, a log that begins in the middle, or an event on which the policy
            fails.
    """
    counts: Counter[str] = Counter()
    number = 1
    for policy, entry in policies(lines):
        again, number = handled(policy, entry), entry.line
        counts.update(type(each).__name__ for each in (entry.event, *entry.actions))
        if not is_same(entry.actions, again):
            return Rerun(number, dict(counts), RerunDifference(entry, again))
    return Rerun(number, dict(counts), None)


def policies(lines: Iterable[str]) -> Iterator[tuple[RecoveryPolicy, LogEntry]]:
    """Yield each entry of a log with the policy before its event, to which the caller passes the
    event (`handled`) before the next entry.

    Raises:
        LogError: an invalid line, or a log that begins in the middle.
    """
    policy: RecoveryPolicy | None = None
    header: Header | None = None
    caches = RecalledCaches()
    for number, record in enumerate(read(lines), 1):
        if isinstance(record, Header):
            if record.part == 1:
                policy = caches.policy_of(record)
            elif header is None or record.part != header.part + 1:
                raise LogError(
                    f"line {number}: got part {record.part}; allowed: part 1, or the one "
                    f"behind the part before it"
                )
            header = record
            continue
        assert policy is not None
        if not abs(record.now_s) <= _LATEST_S:
            raise LogError(
                f"line {record.line}: at_s: got {record.now_s}; allowed: seconds up to "
                f"{_LATEST_S:g}"
            )
        caches.recall(policy, record)
        yield policy, record
    if header is None:
        raise LogError(f"line 1: {_NO_HEADER}")


def handled(policy: RecoveryPolicy, entry: LogEntry) -> tuple[act.Action, ...]:
    """Pass an entry's event to the policy, and return its actions. Raises LogError if the policy
    fails on it.
    """
    try:
        return tuple(policy.handle(entry.event, entry.now_s))
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        # The event is impossible or the policy has a bug: either way the line is the useful
        # information.
        raise LogError(f"line {entry.line}: the policy fails on it: {error!r}") from error


def is_same(recorded: tuple[act.Action, ...], again: tuple[act.Action, ...]) -> bool:
    """Return whether the policy has returned the recorded actions again."""
    # The comparison of texts is needed because NaN does not equal itself.
    return recorded == again or _text(recorded) == _text(again)


def _text(actions: tuple[act.Action, ...]) -> str:
    return json.dumps([_plain(action) for action in actions])


def _plain(record: ev.Event | act.Action) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(record, enc_hook=_as_plain)
    if isinstance(record, ev.InstanceUp) and record.prefill is not None:
        table = plain["prefill"] = _public(plain["prefill"])
        if table["grid"] is not None:
            table["grid"] = _public(table["grid"])
    if isinstance(record, ev.LoadReported):
        said = plain["report"].items()
        plain["report"] = {name: each for name, each in said if _UNSAID.get(name, ...) != each}
    return plain


def _as_plain(value: Any) -> Any:
    """The hook of msgspec for values of foreign types. By its contract it raises
    NotImplementedError for types that it cannot encode.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Settings):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"{type(value).__name__} has no place in an event log")


def _public(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without those that begin with `_`: a table derives these from
    the others.
    """
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _header(found: dict[str, Any]) -> Header:
    if found["kvrs_event_log"] != VERSION:
        raise ValueError(f"kvrs_event_log: got {found['kvrs_event_log']!r}; allowed: {VERSION}")
    return msgspec.convert(found, Header, dec_hook=_as_settings)


def _entry(number: int, found: Any) -> LogEntry:
    event = found.get("event") if isinstance(found, dict) else None
    table = event.pop("prefill", None) if isinstance(event, dict) else None
    line = msgspec.convert(found, _Line, dec_hook=_as_settings)
    if isinstance(line.event, ev.InstanceUp) and table is not None:
        line.event = replace(
            line.event, prefill=_table(msgspec.convert({"prefill": table}, _Up).prefill)
        )
    return LogEntry(number, line.at_s, line.event, line.actions, line.wall_s)


def _as_settings(kind: type, found: Any) -> Any:
    """The hook of msgspec for fields of foreign types. By its contract it raises
    NotImplementedError for types that it cannot make.
    """
    if not issubclass(kind, Settings):
        raise NotImplementedError(f"{kind.__name__} has no place in an event log")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        section = kind.__name__.removesuffix("Settings").lower()
        path = ".".join(map(str, (section, *fault["loc"])))
        is_unknown = fault["type"] == "extra_forbidden"
        why = "the version of kvrs that wrote this log knows it" if is_unknown else reason_of(fault)
        raise ValueError(f"{path}: got {fault['input']!r}; {why}") from None


def _table(found: _Table) -> PrefillTable:
    grid = None if found.grid is None else PrefixGrid(**asdict(found.grid))
    return PrefillTable(**asdict(found) | {"grid": grid})
