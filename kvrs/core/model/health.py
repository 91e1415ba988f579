"""The health of an instance as its answers show it, whatever its reports say.

An instance does one stage of streams (prefill or decode), or both in one call, so that it has one
record. A closed instance gets nothing new while another one is open; when its pause is over, one
new request at a time finds out whether it works again.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any
from zlib import crc32

from kvrs.ids import InstanceId, StreamId

# Without any answer for this long, and several times what was predicted, nothing new is sent there.
UNANSWERED_S = 2.0
# Pauses of new requests, which double: after a failure, at an ejection, after a busy answer. An
# instance that answers every request wrongly gets three of them at most in any 10 s: now, after
# the first pause, and as the first probe.
FAILURE_PAUSE_S = 0.5
EJECTION_PAUSE_S = 4.0
BUSY_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
# While nothing else is open, a busy instance is tried again after so long, doubled, and at least so
# often.
_FIRST_BUSY_S = 0.25
_LONGEST_BUSY_S = 2.0
# After a busy pause one attempt goes there; the others wait so long for its answer.
_TRY_S = 0.5
_JITTER = 0.25
# Failures and answers count half after this time.
_HALF_LIFE_S = 10.0


def fraction(*of: object) -> float:
    """A number from 0 to 1 that depends on nothing but `of`: jitter without randomness."""
    return crc32(":".join(map(str, of)).encode()) / 2**32


def pause_s(instance: InstanceId, first_s: float, count: int) -> float:
    """The pause number `count` (from 0) of an instance, with jitter: proxies that hold the same
    view of two instances do not probe both at the same moment.
    """
    return min(LONGEST_PAUSE_S, first_s * 2.0 ** min(count, 16)) * _jitter(instance, count)


def _jitter(instance: InstanceId, count: int) -> float:
    return 1 + _JITTER * fraction(instance, count)


@dataclass(slots=True, eq=False)
class AnswerHealth:
    consecutive: int = 0  # Failures since the last answer.
    refuses_wrongly: bool = False  # Others have accepted what it refused since its last answer.
    answers: float = 0.0
    failures: float = 0.0
    counted_s: float = 0.0
    abrupt_s: float = -inf  # The last failure that came without an error.
    is_ejected: bool = False
    ejections: int = 0
    quick_deaths: int = 0  # Of the processes before it, in a row (`core/defences/restarts.py`).
    readmitted_s: float = -inf
    cause: str = ""  # Of the last closing.
    closed_s: float = -inf
    until_s: float | None = None  # The end of the pause; None: open.
    pauses: int = 0  # Since the last answer.
    probe: StreamId | None = None
    # It has said that it is busy: nothing goes there before then. None: it has not, or has answered
    # since.
    busy_until_s: float | None = None
    asked_until_s: float = -inf  # The end of the pause that it has asked for itself.
    busies: int = 0  # Since the last answer.
    tried_by: StreamId | None = None  # The attempt that tries it after the pause.
    # Streams that wait for its answer, oldest first: since when, and the wait that was predicted.
    awaited: dict[StreamId, tuple[float, float]] = field(default_factory=dict)
    awaited_from_s: float = -inf  # Not after the first of them.
    answered_s: float = -inf

    def is_overdue(self, now_s: float, queue_s: float) -> bool:
        """The instance has answered nothing for too long."""
        if not self.awaited or now_s - max(self.awaited_from_s, self.answered_s) <= UNANSWERED_S:
            return False
        since_s, predicted_s = next(iter(self.awaited.values()))
        limit_s = UNANSWERED_S + 4 * predicted_s + 2 * queue_s
        return now_s - max(since_s, self.answered_s) > limit_s

    def is_busy(self, now_s: float) -> bool:
        return self.busy_until_s is not None and now_s < self.busy_until_s

    def note_busy(
        self, instance: InstanceId, stream: StreamId, retry_after_s: float, now_s: float
    ) -> None:
        """Pause, at least for as long as it asks; the pauses double with every busy answer but
        those to attempts from before the pause.
        """
        pause_s = 0.0
        if not self.is_busy(now_s) or self.tried_by == stream:
            pause_s = min(_LONGEST_BUSY_S, _FIRST_BUSY_S * 2.0 ** min(self.busies, 16))
            self.busies += 1
            self.tried_by, self.busy_until_s = None, now_s
        jitter = _jitter(instance, self.busies)
        retry_after_s = min(LONGEST_PAUSE_S, retry_after_s)
        self.asked_until_s = max(self.asked_until_s, now_s + retry_after_s * jitter)
        assert self.busy_until_s is not None
        self.busy_until_s = max(self.busy_until_s, now_s + pause_s * jitter, self.asked_until_s)

    def note_room(self, now_s: float) -> bool:
        """A stream has ended there, so that one more has room: whether streams wait for that."""
        if self.busy_until_s is None or now_s < self.asked_until_s or self.is_ejected:
            return False
        if self.until_s is not None:
            self.until_s = min(self.until_s, now_s)
        if not self.is_busy(now_s):
            return False
        self.busy_until_s, self.tried_by = now_s, None
        return True

    def try_busy(self, stream: StreamId, now_s: float) -> None:
        """The pause of a busy instance is over, and an attempt goes there."""
        self.tried_by, self.busy_until_s = stream, now_s + _TRY_S

    def count(self, now_s: float, *, answered: bool) -> None:
        decay = 0.5 ** max(0.0, (now_s - self.counted_s) / _HALF_LIFE_S)
        self.answers, self.failures, self.counted_s = (
            self.answers * decay + answered,
            self.failures * decay + (not answered),
            now_s,
        )

    def close(self, cause: str, now_s: float, pause: float) -> None:
        self.cause, self.closed_s, self.until_s, self.probe = cause, now_s, now_s + pause, None
        self.pauses += 1

    def open(self) -> None:
        self.until_s = self.probe = None
        self.is_ejected, self.pauses, self.cause = False, 0, ""
        self.busy_until_s, self.busies, self.tried_by = None, 0, None

    def awaits(self, stream: StreamId, predicted_s: float, now_s: float) -> None:
        """The stream waits for its answer from now on."""
        if not self.awaited:
            self.awaited_from_s = now_s
        self.awaited[stream] = now_s, predicted_s

    def left(self, stream: StreamId) -> None:
        """The stream waits for no answer any more."""
        self.awaited.pop(stream, None)
        if self.probe == stream:
            self.probe = None

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """Plain data for people."""
        return {
            "ejected": self.is_ejected,
            "failures_in_a_row": self.consecutive,
            "paused_s": 0.0 if self.until_s is None else max(0.0, self.until_s - now_s),
            "busy_s": max(0.0, (self.busy_until_s or 0.0) - now_s),
            "quick_deaths": self.quick_deaths,
            "cause": self.cause,
        }
