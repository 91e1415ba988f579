"""The policy's records of one stream, of its attempt and of the recovery under way. Tokens are
never part of them.

Each record is written from one module: a stream's facts and its recovery from here, stage and
attempt from `ledger.py`, holders from `kv_locations.py`, checkpoints from `checkpoints.py`.
"""

from dataclasses import dataclass, field
from math import inf

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Agent, Link, Member
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.lifecycle import Stage
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import InstanceInfo

# Between two tries of the same instance, which double from `recovery.retry_pause_s`.
LONGEST_PAUSE_S = 2.0
_JITTER = 0.25


class Holder(msgspec.Struct, frozen=True):
    """An instance that retains the first `pages` full pages of the stream's history, or has them in
    its prefix cache, or as a replica.
    """

    member: Member
    pages: int
    # Pages among these that stay until the stream, which was moved, has its next token elsewhere.
    left_pages: int = 0
    # Another instance has sent them there, without a lease: they go when that one needs the room.
    is_replica: bool = False


@dataclass(slots=True)
class StoredCheckpoint:
    """An agent that stores the first `pages` full pages of the stream's history, as it reported
    last, or is to get them.
    """

    agent: Agent
    geometry: KvGeometry
    # 0: nothing is sent there any more, but what is there may still be fetched.
    booked_bytes: int = 0
    pages: int = 0
    booked_for: NodeId | None = None  # The node that decodes the stream.
    kv_fingerprint: str | None = None  # Of the instance that saves; None: not known.

    def is_of(self, info: InstanceInfo) -> bool:
        """The instance saves and loads pages like these."""
        theirs, kv_fingerprint = self.geometry, self.kv_fingerprint
        return (theirs is info.geometry or theirs == info.geometry) and (
            kv_fingerprint is None or kv_fingerprint == info.kv_fingerprint
        )


class RefusedBy(msgspec.Struct, frozen=True, gc=False):
    """A 4xx, or logits that are no numbers; it may be the fault of the instance, in this epoch."""

    instance: InstanceId
    epoch: int
    is_probe: bool  # The stream was to find out whether the instance works again.


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The next step of a stream that has no attempt, and the options that were weighed for it."""

    chosen: Estimate
    estimates: tuple[Estimate, ...]
    plan: act.Plan | None  # None: give up, no option meets the budget.
    others: float = 0.0  # Other victims, per target, for which each estimate was charged.


class StayDeadline(msgspec.Struct, frozen=True):
    """By when the instance of an attempt, which re-forms, is to bring the stream's next token."""

    since_s: float
    until_s: float
    number: int  # Of the re-forming.
    latest_s: float  # No changed prediction of the same re-forming extends it beyond.


@dataclass(slots=True, eq=False)
class AttemptState:
    """The stream's latest attempt, and what it takes up in the cluster view until it is over."""

    number: int = 0  # 0: there was none.
    plan: act.Plan | None = None
    option: Option = Option.START
    started_s: float = 0.0
    decision: Decision | None = None  # That led to it, until its first token settles it.
    resumed: bool = False  # It has brought a token to the client.
    runs_on: Member | None = None
    decodes_on: Member | None = None
    booked_on: Member | None = None
    booked_s: float = 0.0
    stay_deadline: StayDeadline | None = None  # While it stays at an instance that re-forms.
    # The attempt of a stream that flowed, where only an instance kept for a suspected one was left:
    # if that dies, this attempt is no suspect.
    is_guest: bool = False
    # With the bytes that it has put on each.
    links: list[tuple[Link, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RecoveryState:
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
    retry_at_s: float = 0.0  # Not before this is an instance tried again that failed the stream.
    removed: frozenset[Option] = frozenset()
    slot_expired: bool = False  # What the attempt before fetches may still be under way.

    def note_failure(self, cause: str, failed: InstanceId | None, now_s: float) -> None:
        self.cause, self.failed = cause, failed
        if self.failed_at_s is None:
            self.failed_at_s = now_s

    def suspect(self, instance: InstanceId, *, was_connected: bool) -> None:
        self.suspect_instance, self.was_connected = instance, was_connected

    def clear_suspect(self, cause: str) -> None:
        """The instance as a whole is lost by this cause: the stream is a victim like the others."""
        self.suspect_instance, self.cause = None, cause

    def back_off(self, failed: Option | None, pause_s: float, jitter: float, now_s: float) -> None:
        """The suspected instance still runs: try another option, and that instance after a pause
        that doubles with every failure, and is shorter by `jitter` (0 to 1) of a quarter.
        """
        self.suspect_instance = None
        if failed is not None:
            self.removed |= {failed}
        pause_s = min(LONGEST_PAUSE_S, pause_s * 2**self.failures)
        self.retry_at_s = now_s + pause_s * (1 - _JITTER * jitter)
        self.failures += 1

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


# The value for most streams, never changed.
NOWHERE: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Stream:
    id: StreamId
    number: int  # Order of arrival.
    prompt_tokens: int
    waiting_since_s: float
    most_tokens: int | None = None
    deadlines: ev.Deadlines = ev.NO_DEADLINES
    common_deadlines: ev.Deadlines = ev.NO_DEADLINES  # Of all tenants: section `slo`.
    tenant: str = ""
    arrived_s: float = 0.0
    client: str = ""
    name: str = ""  # As of `StreamArrived`.
    produced_tokens: int = 0  # As reported at the last failure.
    flows_since_s: float = 0.0  # Since the first token of its last attempt that brought any,
    flows_from_tokens: int = 0  # which had so many before it.
    token_s: float | None = None  # Per token, until that attempt ended; None: not known.
    # Prefill has answered once: the prompt's length is known, its KV was made.
    prefilled: bool = False
    # Another proxy had it: its first attempt here is a recovery already.
    adopted: bool = False
    first_token_sent: bool = False
    needs_replay: bool = False  # Only `Option.REPLAY` continues it exactly.
    excluded_epochs: frozenset[tuple[InstanceId, int]] = frozenset()  # That failed this stream.
    # Instances where it would not be apart, while it is to be.
    avoided: frozenset[str] = NOWHERE
    # Instances that are kept from other streams for it (`quarantine.py`).
    reserved: tuple[Member, ...] = ()
    # Instances that refused it, as long as no other one has accepted it.
    refusals: tuple[RefusedBy, ...] = ()

    stage: Stage = Stage.WAITING
    attempt: AttemptState = field(default_factory=AttemptState)
    recovery: RecoveryState = field(default_factory=RecoveryState)
    holders: dict[InstanceId, Holder] = field(default_factory=dict)
    checkpoints: dict[InstanceId, StoredCheckpoint] = field(default_factory=dict)
    tokens: str = ""  # `Instance.tokens` of the one that gave its last output; empty: not known.
    unprotected: str = ""  # Why no agent stores a checkpoint of it.

    @property
    def is_fresh(self) -> bool:
        """Nothing was produced and no KV was made: starting is all that can be done."""
        return not self.prefilled and self.produced_tokens == 0

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + self.produced_tokens

    @property
    def recovers(self) -> bool:
        """The attempt, or the next one where there is none yet, is a recovery."""
        return self.adopted or self.attempt.number > 1

    def bars(self, member: Member) -> bool:
        return (member.id, member.info.epoch) in self.excluded_epochs

    def is_served_at(self, member: Member) -> bool:
        """The instance has the model, alias or adapter that the stream is of."""
        return not self.name or self.name in member.names

    def exclude(self, member: Member) -> None:
        self.excluded_epochs |= {(member.id, member.info.epoch)}

    def note_refusal(self, refused: RefusedBy) -> None:
        self.forget_refusal(refused.instance)
        self.refusals = (*self.refusals, refused)

    def forget_refusal(self, instance: InstanceId) -> None:
        self.refusals = tuple(each for each in self.refusals if each.instance != instance)

    def note_tokens(self, produced_tokens: int) -> None:
        self.produced_tokens = max(self.produced_tokens, produced_tokens)

    def note_pace(self, now_s: float) -> None:
        """The attempt that brought its last tokens ends."""
        tokens = self.produced_tokens - self.flows_from_tokens
        if tokens > 0 and now_s > self.flows_since_s:
            self.token_s = (now_s - self.flows_since_s) / tokens

    @property
    def rest_s(self) -> float:
        """How long the tokens behind the next one take at its pace, if all that are allowed come;
        0: not known.
        """
        if self.token_s is None or self.most_tokens is None:
            return 0.0
        return max(0, self.most_tokens - self.history_tokens - 1) * self.token_s

    def note_prefill(self, history_tokens: int) -> None:
        """The first prefill corrects the prompt's length, a guess while the prompt was text."""
        if not self.prefilled:
            guess, self.prompt_tokens = (
                self.prompt_tokens,
                max(1, history_tokens - self.produced_tokens),
            )
            self.prefilled = True
            if self.most_tokens is not None:
                self.most_tokens += max(0, self.prompt_tokens - guess)

    def note_resumed(self, now_s: float) -> None:
        """A token has reached the client: the recovery is over."""
        self.first_token_sent = True
        self.flows_since_s, self.flows_from_tokens = now_s, self.produced_tokens
        self.avoided = NOWHERE
        self.recovery = RecoveryState()
