"""The record of the recovery of one stream, from its first failure until a token reaches the client
again.
"""

from collections.abc import Callable, Iterable
from math import inf

import msgspec

from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, NodeId

# Between two tries of the same instance: the first pause, and the longest, as they double.
RETRY_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
_JITTER = 0.25
# An instance and the agent of its node, or the other instance of its server, that are lost within
# this time are lost together.
LOST_TOGETHER_S = 2.0


class RefusedBy(msgspec.Struct, frozen=True, gc=False):
    """A 4xx, an error before any token, no token in time, or logits that are no numbers; it may be
    the fault of the instance, in this epoch.
    """

    instance: InstanceId
    epoch: int
    is_probe: bool  # The stream was to find out whether the instance works again.
    failure: ev.FailureKind = ev.FailureKind.REFUSED
    cause: str = ""

    def is_alike(self, failed: ev.AttemptFailed) -> bool:
        """The other failure is of the same kind; errors are of one by what the engines name."""
        is_same = self.cause == failed.cause or failed.failure is not ev.FailureKind.ERROR
        return self.failure is failed.failure and is_same


class Death(msgspec.Struct, frozen=True, gc=False):
    """An instance died from which the stream waited for its first token (`poison.py`)."""

    instance: InstanceId
    epoch: int
    server: InstanceId  # Instances of the same server are lost together.
    node: NodeId
    lost_s: float

    def is_same(self, other: "Death") -> bool:
        """One process died, or the two instances of a server at once."""
        if self.instance == other.instance:
            return self.epoch == other.epoch
        return self.server == other.server and abs(self.lost_s - other.lost_s) < LOST_TOGETHER_S


class RecoveryState(msgspec.Struct, eq=False):
    """The recovery under way, from the first failure until a token reaches the client again."""

    failed_at_s: float | None = None  # None: there is none.
    cause: str = ""
    failed: InstanceId | None = None
    # The instance that an attempt failed at, until the next decision; it may turn out to be lost.
    suspect_instance: InstanceId | None = None
    was_connected: bool = False  # To it: else nothing has shown the option to be bad.
    failures: int = 0
    # Attempts that were lost or failed. To be moved, denied a slot or told to come back later is
    # not to fail.
    attempts: int = 0
    # Where its logits were no numbers, once for each time.
    overflowed: tuple[RefusedBy, ...] = ()
    owes_token: bool = False  # To the retry budget, for the next attempt.
    token_at_s: float = -inf  # When the token may be used.
    busy_since_s: float | None = None  # Since the first busy answer.
    # How often no second instance brought its first token in time either: the request takes long
    # anywhere, and its silence is no fault.
    slow_attempts: int = 0
    retry_at_s: float = 0.0  # Not before this is an instance tried again that failed the stream.
    removed: frozenset[Option] = frozenset()
    slot_expired: bool = False  # What the attempt before fetches may still be under way.
    deaths: tuple[Death, ...] = ()
    # Connections that broke before they had brought anything: the processes may have died.
    broken: tuple[Death, ...] = ()
    # Instances where it would wait beside a stream that may be the cause of such deaths, too.
    avoided: frozenset[InstanceId] = frozenset()

    @property
    def is_counted(self) -> bool:
        """An instance has died from which the stream waited for its first token, or may have."""
        return bool(self.deaths or self.broken)

    def note_death(self, death: Death) -> None:
        if not any(each.is_same(death) for each in self.deaths):
            self.deaths = (*self.deaths, death)

    def note_broken(self, death: Death) -> None:
        others = (each for each in self.broken if not each.is_same(death))
        self.broken = (*others, death)

    def avoid(self, instances: Iterable[InstanceId]) -> None:
        self.avoided = frozenset(instances)

    def forget_deaths(self, is_forgotten: Callable[[Death], bool]) -> None:
        self.avoided = frozenset()
        self.deaths = tuple(each for each in self.deaths if not is_forgotten(each))
        self.broken = tuple(each for each in self.broken if not is_forgotten(each))

    @property
    def is_slow(self) -> bool:
        return self.slow_attempts > 0

    def note_failure(self, cause: str, failed: InstanceId | None, now_s: float) -> None:
        self.cause, self.failed = cause, failed
        if self.failed_at_s is None:
            self.failed_at_s = now_s

    def suspect(self, instance: InstanceId, *, was_connected: bool) -> None:
        self.suspect_instance, self.was_connected = instance, was_connected

    def clear_suspect(self, cause: str) -> None:
        """The instance as a whole is lost by this cause: the stream is a victim like the others."""
        self.suspect_instance, self.cause = None, cause

    def back_off(self, failed: Option | None, jitter: float, now_s: float) -> None:
        """The suspected instance still runs: try another option, and that instance after a pause
        that doubles with every failure, and is shorter by `jitter` (0 to 1) of a quarter.
        """
        self.suspect_instance = None
        if failed is not None:
            self.removed |= {failed}
        pause_s = min(LONGEST_PAUSE_S, RETRY_PAUSE_S * 2**self.failures)
        self.retry_at_s = now_s + pause_s * (1 - _JITTER * jitter)
        self.failures += 1

    def take_for_slow(self, now_s: float) -> None:
        """Its silence is no fault of instances. One of those that it was silent at may be about to
        answer; others are asked only where these are gone.
        """
        self.slow_attempts += 1
        self.suspect_instance = None
        self.retry_at_s = now_s + RETRY_PAUSE_S

    def note_overflow(self, by: RefusedBy) -> None:
        """Its logits are no numbers there."""
        self.overflowed = (*self.overflowed, by)

    def pay_token(self, at_s: float) -> None:
        self.owes_token, self.token_at_s = False, at_s

    def note_attempt_failed(self) -> None:
        self.attempts += 1
        self.owes_token = True

    def note_trial_failed(self) -> None:
        """At an ejected instance, for want of others: its answers say nothing of the stream, which
        is to have attempts left when others are back.
        """
        self.owes_token = True

    def lasts_s(self, now_s: float) -> float:
        return 0.0 if self.failed_at_s is None else now_s - self.failed_at_s

    def note_busy_answer(self, now_s: float) -> None:
        self.owes_token = True
        self.note_busy(now_s)

    def note_busy(self, now_s: float) -> None:
        if self.busy_since_s is None:
            self.busy_since_s = now_s

    def remove(self, option: Option) -> None:
        """It has failed the stream, and is not tried again before a token has come."""
        self.removed |= {option}

    def expire_slot(self, option: Option) -> None:
        self.removed |= {option}
        self.slot_expired = True

    def note_start(self) -> None:
        self.slot_expired = False
