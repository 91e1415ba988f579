"""The stages of a stream, and the effect of every event on a stream in each stage.

    (new) --> WAITING --> PREFILL --> DECODE --> (ended)

    PREFILL, DECODE --> WAITING    lost, failed, moved, transfer slot expired, or a stay at a
                                   re-forming instance expired
    WAITING --> DECODE             the target fetches or computes the history itself
    WAITING, DECODE --> QUEUED     the target has no slot, by `SlotBook` or by its agent
    QUEUED --> DECODE              a slot is free
    QUEUED --> PREFILL, WAITING    queued for too long; the target is gone
    any stage --> (ended)          complete, refused, given up, or the client left

`RecoveryPolicy` looks up every stream event in `TABLE`; every change of stage is asserted against
`MOVES`, which is derived from the table. A stream leaves WAITING by a decision (`Step.PLACE`), at
once or after a short delay that gathers losses close to each other.
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


# The policy itself raises the next events, `InstanceLeft`, `AlarmDue` and `SlotFree`.


class InstanceLeft(msgspec.Struct, frozen=True):
    """The instance at which the stream runs or queues is lost, or its streams are moved before it
    fails.
    """

    instance: InstanceId
    cause: str
    produced_tokens: Mapping[StreamId, int]
    is_lost: bool  # False: the instance still runs, and its streams are moved.


class AlarmDue(msgspec.Struct, frozen=True):
    """The stream's timer has fired: the end of gathering, of a slot lease, of a wait or of a
    stay.
    """


class SlotFree(msgspec.Struct, frozen=True):
    """The target at which the stream queues has a free slot for it."""


StreamEvent = ev.OfStream | InstanceLeft | AlarmDue | SlotFree


class Step(Enum):
    """The effect of an event on a stream; `kvrs.core.recovery.STEPS` has the function of each."""

    ADMIT = "admit"
    ADOPT = "adopt"
    PLACE = "place"  # Decide: start, queue, keep waiting, or give up.
    NOTE_PREFILL = "note_prefill"
    HAND_OFF = "hand_off"
    AWAIT_WHOLE = "await_whole"
    RESUME = "resume"
    NOTE = "note"  # The attempt has already ended: only note the tokens that it produced.
    FAIL = "fail"
    DENY = "deny"
    LOSE = "lose"
    TARGET_LOST = "target_lost"
    EXPIRE = "expire"
    END = "end"


class Ignored(Enum):
    """The reasons for which an event is ignored."""

    # The attempt is over: a later attempt exists, no attempt runs, or the stream has ended.
    LATE = "late"
    REPEATED = "repeated"  # The stream has arrived before.
    EARLY = "early"  # The event cannot come before the attempt's prefill is done.


# The policy never raises this event in this stage, which is asserted.
_NEVER = None
Cell = Step | Ignored | None

_LATE, _REPEATED, _EARLY = Ignored.LATE, Ignored.REPEATED, Ignored.EARLY
_STAGES: tuple[Stage | None, ...] = (None, *Stage)  # All stages; None: the stream is not known.

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

# The possible stages after a step; None: the stream is forgotten. Other steps change no stage.
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
