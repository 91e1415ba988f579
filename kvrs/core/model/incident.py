"""An incident of one proxy: what was lost or failed, and what became of the streams there; with the
sentence that describes it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum, auto
from itertools import chain
from math import isfinite
from typing import NamedTuple

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Estimate, Option, real_over_predicted
from kvrs.ids import InstanceId, StreamId

# Failures of one instance belong to one incident if each follows the one before within this time.
TOGETHER_S = 10.0
_LOST = "connection lost"


class Moment(NamedTuple):
    now_s: float  # By the clock of the events.
    wall_s: float | None  # Unix time; None: the log has none.

    @property
    def utc(self) -> datetime | None:
        return None if self.wall_s is None else datetime.fromtimestamp(self.wall_s, UTC)

    def __str__(self) -> str:
        return f"at {self.now_s:.3f} s" if self.utc is None else f"{self.utc:%Y-%m-%d %H:%M:%S} UTC"


class IncidentKind(Enum):
    DIED = auto()
    ENDED = auto()  # The process was lost after a drain.
    FAILED = auto()  # Attempts failed at the instance.
    MOVED = auto()  # Streams were moved from the instance, or stayed while it re-formed.
    GIVEN_UP = auto()  # New requests that nothing could serve.


class Fate(StrEnum):
    """State or end of a stream that an incident has hit."""

    BACK = "back"
    LOST = "lost"
    LEFT = "left"  # The client has left meanwhile.
    RUNNING = "running"  # The client has no new token yet.


_WORDS = {Fate.BACK: "back", Fate.LOST: "lost", Fate.LEFT: "cancelled", Fate.RUNNING: "recovering"}


class Loss(NamedTuple):
    line: int
    at: Moment
    instance: InstanceId  # The instance or agent that was lost, or at which an attempt failed.
    cause: str
    stream: StreamId | None  # The stream of the attempt; None: the whole process was lost.
    is_refusal: bool = False  # The instance refused the attempt (HTTP 4xx).


class AttemptEnd(StrEnum):
    """End of the attempt that a recovery began."""

    RESUMED = "resumed"  # The first token has come.
    FAILED = "failed"  # The stream was decided again.
    DENIED = "denied"  # The target had no slot.
    ENDED = "ended"  # The stream ended before.
    REJECTED = "rejected"  # The attempt has only shown that its request is at fault.


class OptionCost(NamedTuple):
    """An option's best estimate, as the policy compared it."""

    option: Option
    predicted_s: float  # Until the stream's next token.
    # Charged besides: the time that other victims wait, and slower tokens later.
    extra_s: float
    is_chosen: bool
    excluded: str  # Cause for which it could not be chosen; empty: it could.


@dataclass(slots=True, eq=False)
class RecordedDecision:
    """A decision about a stream that was hit. A proxy's records extend it (`Recovery`)."""

    line: int
    at: Moment
    action: act.Recovered | act.GiveUp
    # None: the stream was given up, or stayed at its instance.
    new_plan: act.Plan | None
    # Result of the decision; None: no token came before the attempt or the log ended.
    settled: act.Settled | None = None
    # Tokens that a restore of rows has loaded; None: another option, or its target has not
    # counted them.
    loaded: act.RowsLoaded | None = None
    retried_for: str = ""  # Cause for which the stream was decided again; empty: it was not.
    # Agents that were lost and not up again, if restore was not weighed: why it may be missing.
    agents_down: tuple[InstanceId, ...] = ()

    @property
    def option(self) -> str:
        if self.loaded is not None:
            return self.loaded.option.value
        return "given up" if isinstance(self.action, act.GiveUp) else self.action.option.value

    @property
    def cause(self) -> str:
        return self.action.message if isinstance(self.action, act.GiveUp) else self.action.cause

    @property
    def way(self) -> str:
        """The recovery in words: its option, source and target."""
        action, plan = self.action, self.new_plan
        if isinstance(action, act.GiveUp):
            return self.option
        if plan is None:
            return f"{action.option.value} at {action.failed}"
        if plan.prefill is not None:
            return f"{action.option.value} at {plan.prefill}, to {plan.decode}"
        if (loaded := self.loaded) is not None and loaded.option is not action.option:
            found = f"{loaded.loaded_tokens:,} of {loaded.expected_tokens:,} tokens"
            return (
                f"{loaded.option.value} at {plan.decode}: {found} were loaded from "
                f"{', '.join(loaded.asked)}"
            )
        runs = ", ".join(map(_run, plan.runs))
        return f"{action.option.value} to {plan.decode}" + (f" from {runs}" if runs else "")

    @property
    def predicted_s(self) -> float | None:
        """The predicted cost: of the option alone, and once the stream is back, beside the other
        victims; None: the stream was given up.
        """
        if self.settled is not None:
            return self.settled.predicted_s
        return None if isinstance(self.action, act.GiveUp) else self.action.predicted_s

    @property
    def interval_factor(self) -> float | None:
        """The factor from a prediction to the ends of its interval when this was decided; None: not
        known.
        """
        settled = self.settled
        if settled is None or not settled.high_s or settled.predicted_s <= 0:
            return None
        return settled.high_s / settled.predicted_s

    @property
    def off(self) -> float | None:
        """The factor from the predicted cost to the real one; None: not known."""
        if self.settled is None or not isfinite(self.settled.predicted_s):
            return None
        return real_over_predicted(self.settled.predicted_s, self.settled.real_s)

    def interval(self, cost_s: float | None) -> tuple[float, float] | None:
        """Return the interval of a cost that was predicted for this decision; None: not known."""
        factor = self.interval_factor
        return None if cost_s is None or factor is None else (cost_s / factor, cost_s * factor)

    def outcome(self, victim: "HitStream") -> str:
        if self.settled is not None:
            return "back"
        return "tried again" if self.retried_for else victim.fate.value

    @property
    def chosen(self) -> Estimate | None:
        """The estimate that was chosen; None: the stream was given up."""
        if isinstance(action := self.action, act.GiveUp):
            return None
        wanted = action.option, action.predicted_s
        found = (each for each in action.estimates if (each.option, each.next_token_s) == wanted)
        return next(found, None)

    @property
    def costs(self) -> list[OptionCost]:
        """Costs of the options, the cheapest first."""
        action = self.action
        if isinstance(action, act.GiveUp):
            return []
        chosen = self.chosen
        found = [
            OptionCost(
                each.option,
                each.next_token_s,
                each.lookahead_s + each.wait_of_others_s(action.others),
                each is chosen,
                action.excluded.get(each.option, ""),
            )
            for each in compared(action, chosen)
        ]
        return sorted(found, key=lambda each: each.predicted_s + each.extra_s)


def off_words(off: float | None) -> str | None:
    """Say how far a real cost is from the predicted one, given the factor between them."""
    if off is None:
        return None
    factor = f"x{max(off, 1 / off):.3g}"
    return factor if factor == "x1" else f"{factor} {'longer' if off > 1 else 'shorter'}"


def _run(run: act.PageRange) -> str:
    return f"{run.holder} [{run.first_page}, {run.first_page + run.pages})"


def compared(action: act.Recovered, chosen: Estimate | None) -> list[Estimate]:
    """Return one estimate for each option: the chosen one, and of the other options the cheapest
    over all targets, with the wait of other victims.
    """
    best: dict[Option, Estimate] = {} if chosen is None else {chosen.option: chosen}
    for each in sorted(action.estimates, key=lambda e: e.total_s + e.at_target_s * action.others):
        best.setdefault(each.option, each)
    return [*best.values()]


def brief(action: act.Recovered) -> act.Recovered:
    """Return the decision with the estimates that are shown: the chosen one, and of each other
    option the cheapest over all targets, alone and with the wait of other victims.

    Estimates for all targets would take megabytes in a large cluster; the event log has them.
    """
    chosen: Estimate | None = None
    alone: dict[Option, Estimate] = {}
    beside: dict[Option, tuple[float, Estimate]] = {}
    for each in action.estimates:
        option, cost_s = each.option, each.total_s + each.at_target_s * action.others
        if option not in alone or each.total_s < alone[option].total_s:
            alone[option] = each
        if option not in beside or cost_s < beside[option][0]:
            beside[option] = cost_s, each
        if chosen is None and option is action.option and each.next_token_s == action.predicted_s:
            chosen = each
    if chosen is not None:
        alone[chosen.option], beside[chosen.option] = chosen, (0.0, chosen)
    kept: dict[Option, list[Estimate]] = {option: [] for option in alone}
    for each in action.estimates:
        if each is alone[each.option] or each is beside[each.option][1]:
            kept[each.option].append(each)
    return msgspec.structs.replace(action, estimates=tuple(chain.from_iterable(kept.values())))


@dataclass(slots=True, eq=False)
class HitStream:
    """A stream that an incident has hit."""

    stream: StreamId
    fate: Fate = Fate.RUNNING
    pause_s: float | None = None  # Pause that its client saw; None: not back, or no token before.
    decisions: list[RecordedDecision] = field(default_factory=list)
    is_refused: bool = False  # All its failures so far were refusals.


@dataclass(slots=True, eq=False)
class Incident:
    number: int  # Counts the incidents of this proxy from 1.
    at: Moment
    subject: InstanceId | None  # The instance or agent; None: none.
    kind: IncidentKind
    why: str  # Cause of the first failure, or of the loss.
    last_s: float
    is_agent: bool = False
    losses: list[Loss] = field(default_factory=list)
    victims: dict[StreamId, HitStream] = field(default_factory=dict)
    fates: Counter[Fate] = field(default_factory=Counter)  # Numbers of all streams.
    not_loaded: int = 0  # Restores that loaded less than half of what was expected.
    failed_attempts: int = 0  # Attempts that failed at the subject.
    longest_pause_s: float | None = None
    up: Moment | None = None  # Time at which a new process was up; None: not yet.
    exit: str = ""  # End of the process, as its supervisor reports it.

    @property
    def is_loss(self) -> bool:
        return self.kind in (IncidentKind.DIED, IncidentKind.ENDED)

    @property
    def is_over(self) -> bool:
        return not self.fates[Fate.RUNNING] and (self.up is not None or not self.is_loss)

    def takes(self, now_s: float) -> bool:
        """Return whether a failure of the same instance, or its loss, belongs to this incident."""
        return self.is_loss or now_s - self.last_s < TOGETHER_S

    def note_pause(self, pause_s: float | None) -> None:
        if pause_s is not None:
            self.longest_pause_s = max(pause_s, self.longest_pause_s or 0.0)


def sentence(incident: Incident) -> str:
    """Describe an incident in one sentence, without its time."""
    return "; ".join([_head(incident), *_streams(incident), *_end(incident)])


def _head(incident: Incident) -> str:
    subject, cause = incident.subject, incident.why
    match incident.kind:
        case IncidentKind.DIED | IncidentKind.ENDED:
            verb = "died" if incident.kind is IncidentKind.DIED else "shut down as announced"
            if cause.startswith(_LOST):  # The rest depends on what each connection was doing.
                cause = _LOST
            return f"{subject} {verb}: {cause}" + (f" ({incident.exit})" if incident.exit else "")
        case IncidentKind.FAILED:
            many = (
                f"{incident.failed_attempts} attempts"
                if incident.failed_attempts != 1
                else "1 attempt"
            )
            return f"{subject} failed {many}: {cause}"
        case IncidentKind.MOVED if subject is not None and subject not in cause:
            return f"{subject}: {cause.removeprefix('moved: ')}"
        case _:
            return cause


def _streams(incident: Incident) -> Iterator[str]:
    count = incident.fates.total()
    if incident.kind is IncidentKind.GIVEN_UP:
        yield f"{count} {'request' if count == 1 else 'requests'} given up"
        return
    if not count:
        if not incident.is_agent:  # No stream runs at an agent.
            yield "no streams affected"
        return
    streams = f"{count} {'stream' if count == 1 else 'streams'}"
    fates = [(fate, n) for fate in Fate if (n := incident.fates[fate])]
    if len(fates) == 1:
        yield f"{streams}, {'all ' if count > 1 else ''}{_WORDS[fates[0][0]]}"
    else:
        yield f"{streams}: " + ", ".join(f"{n} {_WORDS[fate]}" for fate, n in fates)
    if many := incident.not_loaded:
        yield f"{many} {'restore' if many == 1 else 'restores'} loaded less than half"
    if (pause_s := incident.longest_pause_s) is not None:
        yield f"{'pause' if count == 1 else 'longest pause'} {pause_s:.2f} s"


def _end(incident: Incident) -> Iterator[str]:
    if not incident.is_loss:
        return
    if (up := incident.up) is None:
        yield "still down"
    elif up.utc is None:
        yield f"up again after {up.now_s - incident.at.now_s:.1f} s"
    else:
        yield f"up again {up.utc:%H:%M:%S}"
