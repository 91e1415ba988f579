"""The decisions of an event log's incidents, made once more under another setting.

All events are passed to the policy again. A copy of it gets the changed settings before each
decision of an incident, as by a reload, and decides the same victims from the same state. What the
log has after a decision followed from the one that was made then, so each decision is compared by
itself, and by what it predicts: for all victims of its event together, on both sides. That tells of
the incident only if its predictions came true: where fewer than `LEAST_SHARE` of the real costs lie
in their predicted intervals, as recorded, no other decision is shown.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from kvrs.config.document import parse_yaml, yaml_reason
from kvrs.config.policy import PolicySettings
from kvrs.config.settings import faults_of
from kvrs.core.event_log import LogEntry, handled, is_same, policies, read
from kvrs.core.incidents import Incident, Incidents, Moment, RecordedDecision, sentence
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Option
from kvrs.core.model.streams import Predicted
from kvrs.core.recovery import RecoveryPolicy
from kvrs.core.together import predict
from kvrs.errors import ConfigError, nearest
from kvrs.ids import StreamId
from kvrs.sums import sum_in_order

LEAST_SHARE = 0.8  # Share of an incident's real costs that must lie in their predicted intervals.
# Settings that a decision reads at its moment; others had their effect before it, or have it later.
ALLOWED = (
    *("name", "dispatch", "restored_at", "slots_max"),
    "assumed_link_bytes_per_s",
)

Changes = Mapping[str, Any]
_Key = tuple[int, StreamId]  # Line of the log, and the stream that was decided there.
_Other = tuple[RecordedDecision, Predicted | None]


def changes_of(texts: Sequence[str]) -> Changes:
    """Parse texts such as `policy.name=always_recompute`.

    Raises:
        ConfigError: an unknown setting, or a value that it cannot have.
    """
    if not texts:
        raise ConfigError("--set: missing; allowed: policy.KEY=VALUE, such as policy.name=rom")
    changes, wrong = dict[str, Any](), list[str]()
    allowed = [f"policy.{name}" for name in ALLOWED]
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or path not in allowed:
            wrong.append(
                f"--set: got {text!r}; allowed: KEY=VALUE, with a KEY of {', '.join(allowed)}"
                + nearest(path, allowed)
            )
            continue
        try:
            changes[path.removeprefix("policy.")] = parse_yaml(value)
        except yaml.YAMLError as error:
            wrong.append(f"--set: got {text!r}; {yaml_reason(error)}")
    try:
        PolicySettings.model_validate(changes)
    except ValidationError as error:
        wrong += [f"--set: {fault}" for fault in faults_of(error, PolicySettings, "policy")]
    if wrong:
        raise ConfigError(wrong)
    return changes


@dataclass(frozen=True, slots=True)
class Compared:
    """A decision of an incident, and the one under the changed settings."""

    made: RecordedDecision
    # None: the stream would have waited, or other decisions are not shown.
    other: RecordedDecision | None
    # Predicted cost of the other one, beside the other victims; None: it is not known.
    predicted: Predicted | None = None

    @property
    def is_other(self) -> bool:
        return self.other is not None and self.other.way != self.made.way

    @property
    def measured(self) -> act.Settled | None:
        """Predicted and real cost of the recovery; None: it has brought no token, or was a start,
        whose prediction rests on a guessed length.
        """
        settled = self.made.settled
        return None if settled is None or settled.option is Option.START else settled

    @property
    def is_within(self) -> bool | None:
        """Return whether the real cost is in the recorded interval; None: there is none."""
        settled = self.measured
        if settled is None or settled.low_s is None or settled.high_s is None:
            return None
        return settled.low_s <= settled.real_s <= settled.high_s


@dataclass(frozen=True, slots=True)
class ComparedIncident:
    incident: Incident
    decisions: list[Compared]
    why_not: str  # Cause for which no other decision is shown; empty: they are shown.

    @property
    def totals_s(self) -> tuple[float, float, float] | None:
        """Sums over the decisions that have all three: the real costs, the predicted ones, and
        those predicted under the changed settings; None: no decision has all.
        """
        rows = [
            (settled.real_s, settled.predicted_s, each.predicted.seconds)
            for each in self.decisions
            if (settled := each.measured) is not None
            and each.is_within is not None
            and each.predicted is not None
        ]
        if not rows:
            return None
        real, predicted, other = zip(*rows, strict=True)
        return sum_in_order(real), sum_in_order(predicted), sum_in_order(other)


def compared(lines: Sequence[str], changes: Changes) -> list[ComparedIncident]:
    """Return the incidents of a log in which streams were recovered, with each decision as it was
    and as it would have been.

    Raises:
        LogError: an invalid line, a log that begins in the middle, or an event on which the policy
            fails.
    """
    book = Incidents()
    for entry in read(lines):
        if isinstance(entry, LogEntry):
            book.note(entry.now_s, entry.wall_s, entry.event, entry.actions, entry.line)
    made = [(incident, [*_decisions(incident)]) for incident in book.entries]
    wanted = {each.line for _, decisions in made for each in decisions}
    others, differs_at = _others(lines, wanted, changes)
    found = []
    for incident, decisions in made:
        if not any(isinstance(each.action, act.Recovered) for each in decisions):
            continue
        each_one = [Compared(each, *others.get(_key(each), (None, None))) for each in decisions]
        why_not = _why_not(each_one, differs_at)
        if why_not:
            each_one = [Compared(each.made, None) for each in each_one]
        found.append(ComparedIncident(incident, each_one, why_not))
    return found


def _decisions(incident: Incident) -> Iterator[RecordedDecision]:
    for victim in incident.victims.values():
        yield from victim.decisions


def _key(decision: RecordedDecision) -> _Key:
    return decision.line, decision.action.stream


def _others(
    lines: Iterable[str], wanted: set[int], changes: Changes
) -> tuple[dict[_Key, _Other], int | None]:
    """Return the decisions at these lines under changed settings with their predicted costs, and
    the first line at which this version of the policy differs from the log, where it ends.
    """
    found = dict[_Key, _Other]()
    for policy, entry in policies(lines):
        copied = _changed(policy, changes, entry.now_s) if entry.line in wanted else None
        if not is_same(entry.actions, handled(policy, entry)):
            return found, entry.line
        if copied is not None:
            found |= _decided(copied, entry)
    return found, None


def _decided(copied: RecoveryPolicy, entry: LogEntry) -> Iterator[tuple[_Key, _Other]]:
    """Yield the decisions of a policy upon an event. Their costs are predicted at once, not before
    the next event, which followed from other decisions.
    """
    actions = handled(copied, entry)
    predict(copied.state)
    plans = {each.stream: each.plan for each in actions if isinstance(each, act.Start)}
    for each in actions:
        if isinstance(each, act.Recovered | act.GiveUp):
            at, plan = Moment(entry.now_s, entry.wall_s), plans.get(each.stream)
            other = RecordedDecision(entry.line, at, each, plan)
            predicted = None
            if isinstance(each, act.Recovered) and (stream := copied.streams.get(each.stream)):
                predicted = stream.attempt.predicted
            yield _key(other), (other, predicted)


def _changed(policy: RecoveryPolicy, changes: Changes, now_s: float) -> RecoveryPolicy:
    copied = deepcopy(policy)
    settings = copied.state.settings
    changed = PolicySettings.model_validate(settings.policy.model_dump() | dict(changes))
    copied.state.reload(changed, settings.slo)
    return copied


def _why_not(decisions: Sequence[Compared], differs_at: int | None) -> str:
    """Return why an incident tells nothing of other settings; empty: it does."""
    if differs_at is not None and max(each.made.line for each in decisions) >= differs_at:
        return f"this version of kvrs decides otherwise from line {differs_at} on"
    if not any(each.measured for each in decisions):
        return "no recovery was measured"
    within = [each.is_within for each in decisions if each.is_within is not None]
    if not within:
        return "its predictions have no intervals: those of rom and of older logs have none"
    if sum(within) < LEAST_SHARE * len(within):
        return (
            f"{sum(within)} of {len(within)} real costs are in their predicted intervals, and "
            f"{LEAST_SHARE:.0%} must be"
        )
    return ""


def document_of(found: Sequence[ComparedIncident], changes: Changes) -> dict[str, Any]:
    """Return incidents and decisions as plain data, with a sentence for each incident."""
    settings = ", ".join(f"policy.{name}={value}" for name, value in changes.items())
    return {
        "version": 1,
        "sentence": "\n".join(_sentence(each, settings) for each in found)
        or "no incident in which a stream was recovered",
        "settings": {f"policy.{name}": value for name, value in changes.items()},
        "incidents": [
            {
                "at_s": each.incident.at.now_s,
                "incident": sentence(each.incident),
                "why_not": each.why_not or None,
                "decisions": [_row(one) for one in each.decisions],
            }
            for each in found
        ],
    }


def _sentence(found: ComparedIncident, settings: str) -> str:
    said = f"{found.incident.at}  {sentence(found.incident)}"
    if found.why_not:
        return f"{said}\n    {settings}: not shown: {found.why_not}"
    changed = sum(each.is_other for each in found.decisions)
    said += f"\n    {settings}: {changed} of {len(found.decisions)} decisions would be others"
    if waiting := sum(each.other is None for each in found.decisions):
        said += f", and {waiting} would wait first, which is in no sum"
    if found.totals_s is not None:
        real_s, predicted_s, other_s = found.totals_s
        said += (
            f"; {predicted_s:.3g} s were predicted in sum and {real_s:.3g} s taken, "
            f"{other_s:.3g} s would be predicted"
        )
    elif all(each.predicted is None for each in found.decisions):
        said += "; no times would be predicted"
    return said


def _row(compared: Compared) -> dict[str, Any]:
    made, other, predicted = compared.made, compared.other, compared.predicted
    settled = made.settled
    return {
        "line": made.line,
        "stream": made.action.stream,
        "decision": made.way,
        "predicted_s": made.predicted_s,
        "low_s": None if settled is None else settled.low_s,
        "high_s": None if settled is None else settled.high_s,
        "real_s": None if settled is None else settled.real_s,
        "other_decision": None if other is None else other.way,
        "other_predicted_s": None if predicted is None else predicted.seconds,
        "other_low_s": None if predicted is None else predicted.low_s,
        "other_high_s": None if predicted is None else predicted.high_s,
    }
