"""What the policy keeps of one stream, of its attempt and of the recovery under way. Tokens are
never part of it.

Each record is written from one module: a stream's facts and its recovery from here, stage and
attempt from `ledger.py`, holders from `kv_locations.py`, checkpoints from `checkpoints.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import msgspec

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.model.actions import Plan
from kvrs.policy.model.cluster_view import Agent, Instance, Link, Member
from kvrs.policy.model.estimates import Estimate, Option
from kvrs.policy.model.events import NO_DEADLINES, Deadlines
from kvrs.policy.model.lifecycle import Stage
from kvrs.protocol.geometry import KvGeometry

# Between two tries of the same instance, which double from `recovery.retry_pause_s`.
LONGEST_PAUSE_S = 2.0
_JITTER = 0.25
# So many deaths in a row make a request poison.
_DEATHS_OF_POISON = 2
# The death of an instance is known within this time from the first connection that broke.
_DEATH_KNOWN_AFTER_S = 2.0
# A stream at which a second connection breaks waits so long for news of the instances.
_FATE_KNOWN_AFTER_S = 1.0
# A report shows that an instance lives if it comes so long after the connection broke; an earlier
# one may have been on its way.
_ALIVE_AFTER_S = 0.3


class Holder(msgspec.Struct, frozen=True):
    """An instance that retains the first `pages` full pages of the stream's history, or has them in
    its prefix cache.
    """

    member: Member
    pages: int
    # Of these, so many until the stream has its next token elsewhere: it was moved from there.
    left_pages: int = 0


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


class Death(msgspec.Struct, frozen=True, gc=False):
    """The loss of an instance that a stream waited at for its first token, for no other known
    reason.
    """

    instance: InstanceId
    epoch: int
    node: NodeId
    lost_s: float
    broke_s: float  # When the stream's attempt broke there; the loss may have been known later.
    is_alone: bool  # No other stream waited there.
    may_live: bool  # The instance has only fallen silent.


class RefusedBy(msgspec.Struct, frozen=True, gc=False):
    """A 4xx that may be the fault of the instance, in this epoch."""

    epoch: int
    is_probe: bool  # The stream was to find out whether the instance works again.


class Decision(msgspec.Struct, frozen=True, gc=False):
    """What a stream that has no attempt does next, and what was weighed for it."""

    chosen: Estimate
    estimates: tuple[Estimate, ...]
    plan: Plan | None  # None: give up, no option meets the budget.
    others: float = 0.0  # Other victims, per target, for which each estimate was charged.


@dataclass(frozen=True, slots=True)
class Promise:
    """By when the instance of an attempt, which re-forms, is to bring the stream's next token."""

    since_s: float
    until_s: float
    number: int  # Of the re-forming.
    latest_s: float  # No changed prediction of the same re-forming extends it beyond.


@dataclass(slots=True, eq=False)
class AttemptState:
    """The stream's latest attempt, and what it takes up in the cluster view until it is over."""

    number: int = 0  # 0: there was none.
    plan: Plan | None = None
    option: Option = Option.START
    started_s: float = 0.0
    decision: Decision | None = None  # That led to it, until its first token settles it.
    resumed: bool = False  # It has brought a token to the client.
    runs_on: Member | None = None
    decodes_on: Member | None = None
    booked_on: Member | None = None
    booked_s: float = 0.0
    promise: Promise | None = None  # While it stays at an instance that re-forms.
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
    failures: int = 0
    # Attempts that were lost or failed. To be moved, denied a slot or told to come back later is
    # not to fail.
    attempts: int = 0
    owes_token: bool = False  # To the retry budget, for the next attempt.
    token_at_s: float = -inf  # When the token may be used.
    busy_since_s: float | None = None  # Since the first busy answer.
    retry_at_s: float = 0.0  # Not before this is an instance tried again that failed the stream.
    deaths: tuple[Death, ...] = ()
    apart_until_s: float = -inf  # Until then it runs only where no other stream can be suspected.
    # Instances where an attempt broke that had brought nothing, and when: they may have died of it.
    broken: dict[tuple[InstanceId, int], float] = field(default_factory=dict)
    fate_until_s: float = -inf  # Until then it waits to learn whether they have.
    removed: frozenset[Option] = frozenset()
    slot_expired: bool = False  # What the attempt before fetches may still be under way.

    def note_failure(self, cause: str, failed: InstanceId | None, now_s: float) -> None:
        self.cause, self.failed = cause, failed
        if self.failed_at_s is None:
            self.failed_at_s = now_s

    def suspect(self, instance: InstanceId) -> None:
        self.suspect_instance = instance

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

    @property
    def is_poison(self) -> bool:
        if len(self.deaths) < _DEATHS_OF_POISON:
            return False
        return max(self.deaths, key=lambda death: (death.broke_s, death.lost_s)).is_alone

    @property
    def is_suspect(self) -> bool:
        return bool(self.deaths or self.broken)

    @property
    def awaits_fate(self) -> bool:
        """Whether news of the instances would decide whether it is refused."""
        is_open = self.is_poison and any(death.may_live for death in self.deaths)
        return (bool(self.broken) or is_open) and self.fate_until_s > -inf

    def note_broken(self, instance: Instance, now_s: float, first_wait_s: float) -> None:
        self.broken[instance.id, instance.epoch] = now_s
        self.apart_until_s = max(self.apart_until_s, now_s + first_wait_s)
        self._await_fate(now_s + _FATE_KNOWN_AFTER_S)

    def _await_fate(self, until_s: float) -> None:
        if len(self.deaths) + len(self.broken) >= _DEATHS_OF_POISON:
            self.fate_until_s = max(self.fate_until_s, until_s)

    def wait_apart(self, until_s: float) -> None:
        if self.is_suspect:
            self.apart_until_s = max(self.apart_until_s, until_s)

    def note_alive(self, instance: Instance, now_s: float) -> bool:
        """It reports, after an attempt has broken there; whether that is news."""
        key = instance.id, instance.epoch
        if now_s - self.broken.get(key, now_s) < _ALIVE_AFTER_S:
            return False
        del self.broken[key]
        return True

    def broke_at(self, instance: Instance, now_s: float) -> bool:
        broke_s = self.broken.get((instance.id, instance.epoch), -inf)
        return now_s - broke_s < _DEATH_KNOWN_AFTER_S

    def note_death(
        self,
        instance: Instance,
        now_s: float,
        first_wait_s: float,
        wait_s: float,
        *,
        is_alone: bool,
        may_live: bool,
    ) -> None:
        name, epoch = instance.id, instance.epoch
        broke_s = self.broken.pop((name, epoch), now_s)
        death = Death(name, epoch, instance.node, now_s, broke_s, is_alone, may_live)
        self.deaths = (*self.deaths, death)
        self._await_fate(now_s + _FATE_KNOWN_AFTER_S)
        if self.is_poison and any(death.may_live for death in self.deaths):
            self._await_fate(now_s + wait_s)
        is_first = len(self.deaths) < _DEATHS_OF_POISON
        self.apart_until_s = now_s + (first_wait_s if is_first else wait_s)

    def note_node_lost(self, node: NodeId, since_s: float) -> None:
        """Its instances died with the node, and not of the stream."""
        self.deaths = tuple(
            death for death in self.deaths if death.node != node or death.lost_s < since_s
        )

    def note_ended_from_outside(self, instance: InstanceId, epoch: int) -> None:
        """Its process, in this epoch, did not end of a stream."""
        self.broken.pop((instance, epoch), None)
        self.deaths = tuple(
            death for death in self.deaths if (death.instance, death.epoch) != (instance, epoch)
        )

    def note_fate(self, instance: InstanceId, *, had_not_ended: bool) -> None:
        """An instance that had fallen silent is up: its process did not end, or another one runs
        in its place.
        """
        is_open = [death.may_live and death.instance == instance for death in self.deaths]
        if any(is_open):
            self.deaths = tuple(
                msgspec.structs.replace(death, may_live=False) if was_open else death
                for death, was_open in zip(self.deaths, is_open, strict=True)
                if not (was_open and had_not_ended)
            )

    def pay_token(self, at_s: float) -> None:
        self.owes_token, self.token_at_s = False, at_s

    def note_attempt_failed(self) -> None:
        self.attempts += 1
        self.owes_token = True

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


# Of most streams, and never changed.
NOWHERE: frozenset[str] = frozenset()
NO_EPOCHS: Mapping[InstanceId, int] = {}
NO_REFUSALS: Mapping[InstanceId, RefusedBy] = {}


@dataclass(slots=True, eq=False)
class Stream:
    id: StreamId
    number: int  # Order of arrival.
    prompt_tokens: int
    waiting_since_s: float
    most_tokens: int | None = None
    deadlines: Deadlines = NO_DEADLINES
    common_deadlines: Deadlines = NO_DEADLINES  # Of all tenants: section `slo`.
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
    # Epochs of instances that failed this stream.
    excluded_epochs: Mapping[InstanceId, int] = field(default_factory=lambda: NO_EPOCHS)
    # Instances where it would not be apart, while it is to be.
    shunned: frozenset[str] = NOWHERE
    # Instances that are kept from other streams for it (`quarantine.py`).
    reserved: tuple[Member, ...] = ()
    # Instances that refused it, as long as no other one has accepted it.
    refusals: Mapping[InstanceId, RefusedBy] = field(default_factory=lambda: NO_REFUSALS)

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
        """Whether the attempt, or the next one where there is none yet, is a recovery."""
        return self.adopted or self.attempt.number > 1

    def bars(self, member: Member) -> bool:
        return self.excluded_epochs.get(member.instance.id) == member.instance.epoch

    def is_served_at(self, member: Member) -> bool:
        """Whether the instance has the model, alias or adapter that the stream is of."""
        return not self.name or self.name in member.instance.names

    def exclude(self, member: Member) -> None:
        instance = member.instance
        self.excluded_epochs = {**self.excluded_epochs, instance.id: instance.epoch}

    def note_refusal(self, instance: InstanceId, refused: RefusedBy) -> None:
        self.refusals = {**self.refusals, instance: refused}

    def forget_refusal(self, instance: InstanceId) -> None:
        self.refusals = {name: each for name, each in self.refusals.items() if name != instance}

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
        self.shunned = NOWHERE
        self.recovery = RecoveryState()
