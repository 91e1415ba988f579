"""The stages of a stream, and what every event does to a stream in each of them.

    (new) --> WAITING --> PREFILL --> DECODE --> (ended)

    PREFILL, DECODE --> WAITING    lost, failed, moved, its slot has expired, or its instance
                                   was to go on with it and has not
    WAITING --> DECODE             the target fetches or computes the history itself
    WAITING, DECODE --> QUEUED     the target has no slot: by the own book, or by its agent
    QUEUED --> DECODE              it has one
    QUEUED --> PREFILL, WAITING    queued for too long; the target is gone
    any stage --> (ended)          complete, refused, given up on, or the client left

`TABLE` is the source: `RecoveryPolicy` looks up every stream event in it, and `MOVES`, which is
derived from it, is asserted wherever a stage changes. WAITING passes on to the decision
(`Step.PLACE`), at once or when the losses that are near to each other have been gathered.
"""

from collections.abc import Mapping
from enum import Enum, StrEnum
from itertools import chain

import msgspec

from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId


class Stage(StrEnum):
    # No attempt runs; the stream waits for an instance to come up, for other losses of the same
    # event, or for a pause before the same instance is tried again.
    WAITING = "waiting"
    QUEUED = "queued"  # No attempt runs; the stream waits for a slot at the chosen target.
    PREFILL = "prefill"  # The attempt's prefill call runs.
    DECODE = "decode"  # The attempt's decode call runs: fetching, computing or producing.


# Events that the policy raises itself, for one stream.


class InstanceLeft(msgspec.Struct, frozen=True):
    """The instance that the stream runs on or queues for is lost, or is left before it fails."""

    instance: InstanceId
    cause: str
    produced_tokens: Mapping[StreamId, int]
    is_lost: bool  # Else it still runs, and its streams are moved.


class AlarmDue(msgspec.Struct, frozen=True):
    """The stream's timer: gathering, slot lease, wait or stay is over."""


class SlotFree(msgspec.Struct, frozen=True):
    """The target that the stream queues for has a slot for it."""


StreamEvent = ev.OfStream | InstanceLeft | AlarmDue | SlotFree


class Step(Enum):
    """The effect of an event: a method of `kvrs.core.steps.Steps`."""

    ADMIT = "admit"
    ADOPT = "adopt"
    PLACE = "place"  # Decide: start, queue, wait on, or give up.
    NOTE_PREFILL = "note_prefill"
    HAND_OFF = "hand_off"
    AWAIT_WHOLE = "await_whole"
    RESUME = "resume"
    NOTE = "note"  # The attempt has ended before: only what it produced counts.
    FAIL = "fail"
    DENY = "deny"
    LOSE = "lose"
    TARGET_LOST = "target_lost"
    EXPIRE = "expire"
    END = "end"


class Ignored(Enum):
    """The rules by which an event does nothing."""

    # The attempt is over: it has a successor (a lower number than the stream's, in any stage), no
    # attempt runs, or the stream has ended.
    LATE = "late"
    REPEATED = "repeated"  # The stream is known.
    EARLY = "early"  # Nothing comes of an attempt before its prefill is done.


# Events that the policy raises itself cannot meet a stream in this stage: asserted.
_NEVER = None
Cell = Step | Ignored | None

_LATE, _REPEATED, _EARLY = Ignored.LATE, Ignored.REPEATED, Ignored.EARLY
_STAGES: tuple[Stage | None, ...] = (None, *Stage)  # None: the stream is not known.

# fmt: off
_ROWS: dict[type[StreamEvent], tuple[Cell, ...]] = {
    #                  not known   WAITING     QUEUED            PREFILL        DECODE
    ev.StreamArrived: (Step.ADMIT, _REPEATED,  _REPEATED,        _REPEATED,     _REPEATED),
    ev.StreamAdopted: (Step.ADOPT, _REPEATED,  _REPEATED,        _REPEATED,     _REPEATED),
    ev.PrefillDone:   (_LATE,      _LATE,      _LATE,            Step.HAND_OFF, Step.NOTE_PREFILL),
    ev.WholeAsked:    (_LATE,      _LATE,      _LATE,            _EARLY,        Step.AWAIT_WHOLE),
    ev.StreamResumed: (_LATE,      _LATE,      _LATE,            _EARLY,        Step.RESUME),
    ev.AttemptFailed: (_LATE,      Step.NOTE,  Step.NOTE,        Step.FAIL,     Step.FAIL),
    ev.SlotDenied:    (_LATE,      _LATE,      _LATE,            _EARLY,        Step.DENY),
    ev.StreamEnded:   (_LATE,      Step.END,   Step.END,         Step.END,      Step.END),
    InstanceLeft:     (_NEVER,     _NEVER,     Step.TARGET_LOST, Step.LOSE,     Step.LOSE),
    AlarmDue:         (_NEVER,     Step.PLACE, Step.PLACE,       Step.EXPIRE,   Step.EXPIRE),
    SlotFree:         (_NEVER,     _NEVER,     Step.PLACE,       _NEVER,        _NEVER),
}

_W, _Q, _P, _D = Stage.WAITING, Stage.QUEUED, Stage.PREFILL, Stage.DECODE

# The stages that a step may lead to; None: the stream is forgotten. A step that is not listed
# changes no stage.
LEADS_TO: Mapping[Step, frozenset[Stage | None]] = {
    Step.ADMIT:       frozenset({_W}),
    Step.ADOPT:       frozenset({_W}),
    Step.PLACE:       frozenset({_W, _Q, _P, _D, None}),
    Step.HAND_OFF:    frozenset({_W, _D}),
    Step.FAIL:        frozenset({_W, None}),
    Step.DENY:        frozenset({_Q}),
    Step.LOSE:        frozenset({_W}),
    Step.TARGET_LOST: frozenset({_W}),
    Step.EXPIRE:      frozenset({_W}),
    Step.END:         frozenset({None}),
}
# fmt: on

TABLE: Mapping[type[StreamEvent], Mapping[Stage | None, Cell]] = {
    event: dict(zip(_STAGES, row, strict=True)) for event, row in _ROWS.items()
}

# Every change of stage that the table allows.
MOVES: frozenset[tuple[Stage | None, Stage | None]] = frozenset(
    chain.from_iterable(
        ((stage, then) for then in LEADS_TO.get(step, frozenset()) if then is not stage)
        for row in TABLE.values()
        for stage, step in row.items()
        if isinstance(step, Step)
    )
)
