"""The record of the recovery of one stream, from its first failure until a token reaches the client
again.
"""

from collections.abc import Callable, Iterable
from math import inf

import msgspec

from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, NodeId

# Exponential backoff between two attempts at the same instance: the first and the longest pause.
RETRY_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
_JITTER = 0.25
# Losses of an instance, its node's agent and its server's other instance within this time count as
# one loss.
LOST_TOGETHER_S = 2.0


class RefusedBy(msgspec.Struct, frozen=True, gc=False):
    """A failure that may be the fault of the request or of the instance: a 4xx, an error before any
    token, no token in time, or logits that are not numbers.
    """

    instance: InstanceId
    epoch: int
    is_probe: bool  # The stream was the probe of a closed instance.
    failure: ev.FailureKind = ev.FailureKind.REFUSED
    cause: str = ""

    def is_alike(self, failed: ev.AttemptFailed) -> bool:
        """Return whether the other failure is of the same kind and, for errors, the same cause."""
        is_same = self.cause == failed.cause or failed.failure is not ev.FailureKind.ERROR
        return self.failure is failed.failure and is_same


class Death(msgspec.Struct, frozen=True, gc=False):
    """The death of an instance while the stream waited there for its first token (`poison.py`)."""

    instance: InstanceId
    epoch: int
    server: InstanceId  # Instances of the same server are lost together.
    node: NodeId
    lost_s: float

    def is_same(self, other: "Death") -> bool:
        """Return whether both records are of one process, or of one server's two instances that
        died at the same time.
        """
        if self.instance == other.instance:
            return self.epoch == other.epoch
        return self.server == other.server and abs(self.lost_s - other.lost_s) < LOST_TOGETHER_S


class RecoveryState(msgspec.Struct, eq=False):
    """The recovery under way, from the first failure until a token reaches the client again."""

    failed_at_s: float | None = None  # None: no recovery is under way.
    cause: str = ""
    failed: InstanceId | None = None
    # The instance of the last failed attempt, until the next decision; it may be lost.
    suspect_instance: InstanceId | None = None
    # The failed attempt was connected to the suspect; if not, its option is not blamed.
    was_connected: bool = False
    failures: int = 0
    # Lost or failed attempts, without moved ones, denied slots and busy answers.
    attempts: int = 0
    overflowed: tuple[RefusedBy, ...] = ()  # Failures by logits that were not numbers.
    owes_token: bool = False  # The next attempt must take a token of the retry budget.
    token_at_s: float = -inf  # When the token may be used.
    busy_since_s: float | None = None  # Time of the first busy answer.
    # Number of times that a second instance produced no token in time either: the request is slow
    # anywhere, and its silence is no fault.
    slow_attempts: int = 0
    retry_at_s: float = 0.0  # Earliest time to retry an instance that failed the stream.
    removed: frozenset[Option] = frozenset()
    slot_expired: bool = False  # The previous attempt's fetch may still run.
    deaths: tuple[Death, ...] = ()
    # Connections that broke before any data; the processes may have died.
    broken: tuple[Death, ...] = ()
    # Instances that run another stream which may be the cause of such deaths.
    avoided: frozenset[InstanceId] = frozenset()

    @property
    def is_counted(self) -> bool:
        """True if an instance has died, or may have, while the stream waited there for its first
        token.
        """
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
        """Note that the suspected instance is lost by this cause: the stream is a victim like the
        instance's other streams.
        """
        self.suspect_instance, self.cause = None, cause

    def back_off(self, failed: Option | None, jitter: float, now_s: float) -> None:
        """Remove the failed option, and delay attempts at the suspected instance, which still runs.

        The pause doubles with every failure, and is shortened by up to a quarter (`jitter` from 0
        to 1).
        """
        self.suspect_instance = None
        if failed is not None:
            self.removed |= {failed}
        pause_s = min(LONGEST_PAUSE_S, RETRY_PAUSE_S * 2**self.failures)
        self.retry_at_s = now_s + pause_s * (1 - _JITTER * jitter)
        self.failures += 1

    def take_for_slow(self, now_s: float) -> None:
        """Treat the request as slow: its silence is no fault of instances. The next attempt prefers
        the instances that were tried, because one of them may be about to answer.
        """
        self.slow_attempts += 1
        self.suspect_instance = None
        self.retry_at_s = now_s + RETRY_PAUSE_S

    def note_overflow(self, by: RefusedBy) -> None:
        """Note an instance at which the stream's logits were not numbers."""
        self.overflowed = (*self.overflowed, by)

    def pay_token(self, at_s: float) -> None:
        self.owes_token, self.token_at_s = False, at_s

    def note_attempt_failed(self) -> None:
        self.attempts += 1
        self.owes_token = True

    def note_trial_failed(self) -> None:
        """Note a failure at an ejected instance, which was the only one: the failure is not counted
        as an attempt of the stream.
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
        """Do not try the option again before the stream has produced a token."""
        self.removed |= {option}

    def expire_slot(self, option: Option) -> None:
        self.removed |= {option}
        self.slot_expired = True

    def note_start(self) -> None:
        self.slot_expired = False
