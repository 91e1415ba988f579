"""The records of one stream: its facts, its attempt, its recovery, and the holders of its KV. The
policy's records have no tokens; `LiveStream` adds the journal, which has them.

Each record is written by one module: a stream's facts and its recovery by this module; stage and
attempt by `ledger.py`; holders by `kv_locations.py`; checkpoints by `checkpoints.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.cluster_view import NO_PREFIX, Link, Prefix
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.lifecycle import Stage
from kvrs.core.model.member import Member
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.geometry import KvGeometry

# Exponential backoff between two attempts at the same instance: the first and the longest pause.
RETRY_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
_JITTER = 0.25
# Losses of an instance, its node's agent and its server's other instance within this time count as
# one loss.
LOST_TOGETHER_S = 2.0


class Holder(msgspec.Struct, frozen=True):
    """An instance that has the first `pages` full pages of the stream's history: retained, in its
    prefix cache, or as a replica.
    """

    member: Member
    pages: int
    # Pages that the instance keeps until the moved stream has its next token elsewhere.
    left_pages: int = 0
    # The pages are copies sent by another instance, without a lease, and evicted first.
    is_replica: bool = False


@dataclass(slots=True)
class StoredCheckpoint:
    """An agent that stores the stream's checkpoint, or is to get its pages."""

    agent: Agent
    geometry: KvGeometry
    # Bytes reserved for the stream; 0: the agent gets no more pages, and its pages may still be
    # fetched.
    booked_bytes: int = 0
    pages: int = 0  # Leading full pages of the history, by the agent's last report.
    booked_for: NodeId | None = None  # The node that decodes the stream for which room is reserved.
    # If the pages are rows of an instance's CPU tier (`kv_locations.py`): their namespace, and the
    # instance.
    rows: str = ""
    engine: Member | None = None

    def is_of(self, member: Member) -> bool:
        """Return whether the instance can save and load pages of this geometry and namespace."""
        own, theirs = self.geometry, member.info.geometry
        return self.rows == member.shared.rows and (own is theirs or own == theirs)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The next step of a stream without an attempt, and the estimates that were compared."""

    chosen: Estimate
    estimates: tuple[Estimate, ...]
    # Plan of the next attempt; None: give up, because no option meets the budget.
    plan: act.Plan | None
    # Number of other victims per target; each estimate was charged for their wait.
    others: float = 0.0
    excluded: dict[Option, str] = {}  # The same as in `Recovered`.
    # Refusal of a new stream because of the load; None: none.
    refusal: act.StreamRefusal | None = None


class Predicted(msgspec.Struct, frozen=True):
    """The predicted cost of an attempt that has begun: the time until the stream's next token."""

    seconds: float
    low_s: float  # Nine of ten real costs are between these.
    high_s: float
    victims: int = 1  # Victims of the event that were predicted together.


class RestoredRows(msgspec.Struct, frozen=True):
    """A restore of rows whose first token has come, and what else it would have been."""

    asked: tuple[InstanceId, ...]
    engines: frozenset[InstanceId]  # The instances whose rows were asked for.
    expected_tokens: int
    least_tokens: int  # A restore that expects fewer says nothing about the agents' rows.
    predicted: Predicted
    recompute_s: float | None  # The prediction of a recompute; None: it had none.
    real_s: float


class StayDeadline(msgspec.Struct, frozen=True):
    """The time by which a re-forming instance must produce the next token of a stream that
    stays.
    """

    since_s: float
    until_s: float
    number: int  # The instance's number of the re-forming for which the stream stays.
    latest_s: float  # Limit of `until_s` for changed predictions of the same re-forming.


class Recalled(NamedTuple):
    cached: Mapping[InstanceId, int] = {}
    load: act.PromptLoad | None = None


class AttemptState(msgspec.Struct, eq=False):
    """The stream's latest attempt, and its bookings in the cluster view until the attempt ends."""

    number: int = 0  # Number of the attempt; 0: no attempt yet.
    plan: act.Plan | None = None
    option: Option = Option.START
    started_s: float = 0.0
    decision: Decision | None = None  # The attempt's decision, until its first token.
    # The attempt's predicted cost; None: it is none of time, or not predicted yet.
    predicted: Predicted | None = None
    resumed: bool = False  # The attempt has produced a token for the client.
    runs_on: Member | None = None
    decodes_on: Member | None = None
    booked_on: Member | None = None
    booked_s: float = 0.0
    is_history: bool = False  # The booked work is a history, not a new prompt.
    # Set while the stream's instance re-forms; else None.
    stay_deadline: StayDeadline | None = None
    links: list[tuple[Link, int]] = []  # The attempt's transfers: link and bytes.


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
    server: InstanceId  # The server that runs the instance: its instances are lost together.
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

    failed_at_s: float | None = None  # Time of the first failure; None: no recovery is under way.
    cause: str = ""
    failed: InstanceId | None = None
    # The instance of the last failed attempt, until the next decision; it may be lost.
    suspect_instance: InstanceId | None = None
    # The failed attempt was connected to the suspect; if not, its option is not blamed.
    was_connected: bool = False
    failures: int = 0
    # Lost or failed attempts, without moved ones, denied slots and busy answers.
    attempts: int = 0
    overflowed: tuple[RefusedBy, ...] = ()  # Failures because the stream's logits were not numbers.
    differed: tuple[InstanceId, ...] = ()  # Instances at which a replay's output differed.
    owes_token: bool = False  # The next attempt must take a token of the retry budget.
    token_at_s: float = -inf  # Time from which the retry token may be used.
    has_paused: bool = False  # The stream has been tried once more after two equal errors.
    busy_since_s: float | None = None  # Time of the first busy answer; None: none.
    # Number of times that a second instance produced no token in time either: the request is slow
    # anywhere, and its silence is no fault.
    slow_attempts: int = 0
    retry_at_s: float = 0.0  # Earliest time to retry an instance that failed the stream.
    removed: frozenset[Option] = frozenset()
    slot_expired: bool = False  # The previous attempt's slot expired, and its fetch may still run.
    deaths: tuple[Death, ...] = ()
    # Connections that broke before any data; the processes may have died.
    broken: tuple[Death, ...] = ()
    # Instances that run another stream which may have caused the deaths that this one met.
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

    def note_difference(self, at: InstanceId) -> None:
        self.differed = (*self.differed, at)

    def pay_token(self, at_s: float) -> None:
        self.owes_token, self.token_at_s = False, max(at_s, self.token_at_s)

    def pause(self, now_s: float, pause_s: float) -> None:
        """Let the next attempt wait, wherever it goes, if two instances have failed alike, by a
        cause that they may share and that may pass. 0: they have not.
        """
        if pause_s > 0.0:
            self.has_paused, self.token_at_s = True, now_s + pause_s

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


@dataclass(slots=True, eq=False)
class Stream:
    """The policy's record of a stream."""

    id: StreamId
    order: int = 0  # Number of the stream in order of arrival.
    prompt_tokens: int = 1
    waiting_since_s: float = 0.0
    most_tokens: int | None = None
    deadlines: ev.Deadlines = ev.NO_DEADLINES
    common_deadlines: ev.Deadlines = ev.NO_DEADLINES  # Deadlines of section `slo`.
    tenant: str = ""
    arrived_s: float = 0.0
    name: str = ""  # Name that the client asked for, as in `StreamArrived`.
    picked: tuple[InstanceId, ...] = ()  # Instances named by a gateway's picker.
    prefix: Prefix = NO_PREFIX  # Hash chain of the prompt.
    # Prompt tokens presumed cached at the candidates of the last placement; a load from an agent
    # counts less the time that it takes.
    cached: dict[InstanceId, int] = field(default_factory=dict)
    load: act.PromptLoad | None = None
    recalled: Recalled | None = None  # `cached` and `load` from an event log that is run again.
    produced_tokens: int = 0  # Number of output tokens that the client had at the last failure.
    # Time of the first token of the last attempt that produced tokens, and the number of tokens
    # before it.
    flows_since_s: float = 0.0
    flows_from_tokens: int = 0
    token_s: float | None = None  # Mean time per token of that attempt; None: not known.
    prefilled: bool = False  # A prefill is done: the prompt's length is known, and its KV exists.
    adopted: bool = False  # Taken over from another proxy: the first attempt is a recovery.
    first_token_sent: bool = False
    needs_replay: bool = False  # Only `Option.REPLAY` continues the stream exactly,
    only_replay: bool = False  # or continues it at all.
    is_sampled: bool = False  # The tokens are drawn (temperature above 0).
    is_repeatable: bool = True  # An equal instance generates the same output once more.
    promise: ev.Promise = ev.Promise.NONE
    # Processes (instance, epoch) at which the stream failed.
    excluded_epochs: frozenset[tuple[InstanceId, int]] = frozenset()
    refusals: tuple[RefusedBy, ...] = ()  # Refusals since an instance last accepted the stream.

    stage: Stage = Stage.WAITING
    attempt: AttemptState = field(default_factory=AttemptState)
    recovery: RecoveryState = field(default_factory=RecoveryState)
    holders: dict[InstanceId, Holder] = field(default_factory=dict)
    checkpoints: dict[InstanceId, StoredCheckpoint] = field(default_factory=dict)
    # `Member.tokens` and `generates` of the instance of the last output; empty: not known.
    tokens: str = ""
    generates: str = ""
    unprotected: str = ""  # Reason why no agent stores a checkpoint; empty: an agent does or will.

    def admit(
        self,
        event: ev.StreamArrived | ev.StreamAdopted,
        order: int,
        deadlines: ev.Deadlines,
        common_deadlines: ev.Deadlines,
        now_s: float,
    ) -> None:
        """Initialise a new stream, or a stream taken over from a lost proxy, which begins with a
        recovery.
        """
        self.order, self.waiting_since_s = order, now_s
        self.most_tokens, self.tenant, self.name = event.most_tokens, event.tenant, event.name
        self.deadlines, self.common_deadlines = deadlines, common_deadlines
        if isinstance(event, ev.StreamArrived):
            self.prompt_tokens, self.arrived_s = max(1, event.prompt_tokens), now_s
            self.picked, self.promise = event.picked, event.promise
            return
        self.prompt_tokens, self.produced_tokens = event.prompt_tokens, event.produced_tokens
        self.arrived_s, self.prefilled, self.adopted = now_s - event.age_s, True, True
        self.first_token_sent = event.produced_tokens > 0
        self.needs_replay, self.only_replay = event.needs_replay, event.only_replay
        self.is_sampled, self.is_repeatable = event.is_sampled, event.is_repeatable
        self.recovery.note_failure("taken over from another proxy", None, now_s)

    @property
    def is_fresh(self) -> bool:
        """True if the stream has neither tokens nor KV, so that it can only be started."""
        return not self.prefilled and self.produced_tokens == 0

    @property
    def is_free(self) -> bool:
        """True if the stream itself excludes no instance."""
        return not (self.recovery.avoided or self.name or self.excluded_epochs)

    @property
    def replicas(self) -> dict[InstanceId, int]:
        """Return the replicated pages by peer, except at the instance that decodes the stream."""
        decode = self.attempt.decodes_on
        return {
            name: held.pages
            for name, held in self.holders.items()
            if held.is_replica and held.member is not decode
        }

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + self.produced_tokens

    def due_s(self, deadlines: ev.Deadlines | None = None) -> float:
        """Return the time by which the next token is due, by the given deadlines (None: the
        stream's own).

        The end-to-end deadline holds for the last token, so the next token is due earlier by the
        time of the remaining output: the tokens that the request still allows, at the stream's
        pace. If that output would have been late without the failure too, only the next token is
        compared with the deadline.
        """
        due, wanted, failed_at_s = inf, deadlines or self.deadlines, self.recovery.failed_at_s
        if not self.first_token_sent:
            if wanted.ttft_s is not None:
                due = self.arrived_s + wanted.ttft_s
        elif wanted.recovery_gap_s is not None and failed_at_s is not None:
            due = failed_at_s + wanted.recovery_gap_s
        if wanted.end_to_end_s is not None:
            ends_s = self.arrived_s + wanted.end_to_end_s
            due = min(due, ends_s - self._reserved_s(ends_s))
        return due

    def _reserved_s(self, ends_s: float) -> float:
        """Return the part of the end-to-end deadline for the output after the next token."""
        failed_at_s, rest_s = self.recovery.failed_at_s, self.rest_s
        return rest_s if failed_at_s is not None and failed_at_s + rest_s <= ends_s else 0.0

    def tightest(self) -> str:
        """Describe the deadline that is due first."""
        deadlines, due = self.deadlines, self.due_s()
        if due == inf:
            return "no limit"
        if deadlines.end_to_end_s is not None:
            ends_s = self.arrived_s + deadlines.end_to_end_s
            reserved_s = self._reserved_s(ends_s)
            if due == ends_s - reserved_s:
                rest = f", with {reserved_s:.1f} s for the rest of the output" if reserved_s else ""
                return f"{deadlines.end_to_end_s:g} s in all{rest}"
        if not self.first_token_sent:
            return f"{deadlines.ttft_s:g} s to the first token"
        return f"a pause of {deadlines.recovery_gap_s:g} s"

    def bars(self, member: Member) -> bool:
        return (member.id, member.epoch) in self.excluded_epochs

    @property
    def must_replay(self) -> bool:
        """Return whether no other option than a replay may continue the stream."""
        return self.only_replay or (self.needs_replay and self.promise is not ev.Promise.NONE)

    def may_replay(self, member: Member) -> bool:
        """Return whether the instance can generate the stream's output once more: it has the
        processor that repeats known tokens, or its self-test is equal to that of the instance that
        generated them.
        """
        if member.abilities.replays:
            return True
        if not self.is_repeatable:
            return False
        greedy, _, seeded = self.generates.partition(":")
        known_greedy, _, known_seeded = member.generates.partition(":")
        is_equal = bool(greedy) and greedy == known_greedy
        return is_equal and (not self.is_sampled or seeded == known_seeded)

    def is_served_at(self, member: Member) -> bool:
        """Return whether the instance serves the stream's model, alias or adapter."""
        return not self.name or self.name in member.abilities.names

    def exclude(self, member: Member) -> None:
        self.excluded_epochs |= {(member.id, member.epoch)}

    def keep_to(self, asked: Iterable[InstanceId], peers: Iterable[Member]) -> None:
        """Exclude all peers except those in `asked`."""
        kept, self.refusals = {*asked}, ()
        self.excluded_epochs = frozenset(
            (peer.id, peer.epoch) for peer in peers if peer.id not in kept
        )

    def note_refusal(self, refused: RefusedBy) -> None:
        self.forget_refusal(refused.instance)
        self.refusals = (*self.refusals, refused)

    def forget_refusal(self, instance: InstanceId) -> None:
        self.refusals = tuple(each for each in self.refusals if each.instance != instance)

    def note_tokens(self, produced_tokens: int) -> None:
        self.produced_tokens = max(self.produced_tokens, produced_tokens)

    def note_pace(self, now_s: float) -> None:
        """Measure the pace of the attempt that produced the last tokens, when it ends."""
        tokens = self.produced_tokens - self.flows_from_tokens
        if tokens > 0 and now_s > self.flows_since_s:
            self.token_s = (now_s - self.flows_since_s) / tokens

    @property
    def rest_s(self) -> float:
        """Time of all allowed tokens after the next one, at the stream's pace; 0: not known."""
        if self.token_s is None or self.most_tokens is None:
            return 0.0
        return max(0, self.most_tokens - self.history_tokens - 1) * self.token_s

    def note_prefill(self, history_tokens: int) -> None:
        """Correct the guessed length of a text prompt after the first prefill."""
        if not self.prefilled:
            guess = self.prompt_tokens
            self.prompt_tokens = max(1, history_tokens - self.produced_tokens)
            self.prefilled = True
            if self.most_tokens is not None:
                self.most_tokens += max(0, self.prompt_tokens - guess)

    def note_resumed(self, event: ev.StreamResumed, now_s: float) -> None:
        """Note that a token has reached the client, which ends the recovery."""
        self.first_token_sent = True
        self.needs_replay, self.promise = event.needs_replay, event.promise
        self.only_replay, self.is_sampled = event.only_replay, event.is_sampled
        self.is_repeatable = event.is_repeatable
        self.flows_since_s, self.flows_from_tokens = now_s, self.produced_tokens
        self.recovery = RecoveryState()


def by_urgency(streams: Iterable[Stream]) -> list[Stream]:
    """Sort the streams by urgency, most urgent first.

    The common deadlines decide which places in the order each tenant gets; within these places a
    tenant's streams are ordered by their own deadlines, so that tight deadlines overtake only
    streams of the same tenant.
    """
    ordered = list(streams)
    if len(ordered) < 2:
        return ordered
    ordered.sort(key=lambda stream: (stream.due_s(), stream.order))
    if all(stream.tenant == ordered[0].tenant for stream in ordered):
        return ordered
    of_tenant: dict[str, list[Stream]] = {}
    for stream in ordered:
        of_tenant.setdefault(stream.tenant, []).append(stream)
    next_of = {tenant: iter(own) for tenant, own in of_tenant.items()}
    places = sorted(ordered, key=lambda each: (each.due_s(each.common_deadlines), each.order))
    return [next(next_of[stream.tenant]) for stream in places]


class Complete(msgspec.Struct, frozen=True):
    """The client has every token, the finish reason and the usage; only the formal end is left."""


class CannotContinue(msgspec.Struct, frozen=True):
    """The stream cannot be continued exactly, and the configuration refuses inexact output."""

    cause: str


Outcome = Complete | act.GiveUp | CannotContinue


class StreamJournal(Protocol):
    """Facts about one stream. Only the attempt (`owner_epoch`, `attempt`) may write; attempt 0: no
    attempt.
    """

    stream: StreamId
    arrived_s: float
    owner_epoch: int
    attempt: int
    deadlines: ev.Deadlines
    tenant: str  # The tenant's key; equal for all streams if no tenants are configured.
    name: str  # Key of the alias or adapter (`names.py`); empty: every instance serves it.
    kept: tuple[ev.Kept, ...]  # KV of the stream by the records of its previous proxy.

    @property
    def prompt_ids(self) -> Sequence[int] | None:
        """Token ids of the prompt; None: no engine has tokenised it yet."""

    @property
    def prompt_tokens_guess(self) -> int:
        """Number of prompt tokens, estimated from the text while `prompt_ids` is None."""

    @property
    def prefix(self) -> Prefix:
        """Hash chain of the prompt's blocks."""

    @property
    def max_tokens(self) -> int | None:
        """Limit of the output; None: as many tokens as the engine has room for."""

    @property
    def output_ids(self) -> Sequence[int]: ...

    @property
    def last_write_s(self) -> float | None:
        """Time of the token before the one that is being reported; None: it is the first one."""

    @property
    def token_interval_s(self) -> float | None:
        """Mean time between two tokens; None: too few tokens."""

    @property
    def finished(self) -> bool:
        """True if the client has all of the text."""

    @property
    def resumable(self) -> bool:
        """True if the client may resume the stream at another proxy."""

    @property
    def inexact(self) -> tuple[str, ...]:
        """Features of the request that a recovery cannot continue exactly."""

    @property
    def unkept(self) -> Sequence[str]:
        """Features of `inexact` that `Option.REPLAY` does not continue exactly either."""

    @property
    def needs_replay(self) -> bool:
        """True if only `Option.REPLAY` continues the stream exactly from where it is."""

    @property
    def only_replay(self) -> bool:
        """True if only `Option.REPLAY` may continue the stream at all from where it is."""

    @property
    def is_repeatable(self) -> bool:
        """True if equal instances generate the same output for the same request."""

    @property
    def may_come_again(self) -> bool:
        """True if some instance generates the known output again: `is_repeatable`, or one is told
        it.
        """

    @property
    def is_sampled(self) -> bool:
        """True if tokens are drawn (temperature above 0)."""

    @property
    def produced_tokens(self) -> int:
        """Number of output tokens behind which a recovery continues; 0 if the request is made again
        because the client has nothing of the output.
        """

    @property
    def promise(self) -> ev.Promise:
        """The promise in the head of the response; `NONE` before the head is sent."""

    def commit_head(self) -> None:
        """Fix the head of the response, which goes to the client before the first token."""

    @property
    def is_recoverable(self) -> bool:
        """True if another attempt can continue the stream; false after text without token ids."""

    @property
    def is_predictable(self) -> bool:
        """True if the number of tokens predicts the time of the prefill; false if the engine has to
        fetch images first.
        """


def mean_interval_s(first_s: float | None, last_s: float | None, tokens: int) -> float | None:
    """Return the mean time between two of a stream's tokens; None: too few tokens."""
    if first_s is None or last_s is None or tokens < 2:
        return None
    return (last_s - first_s) / (tokens - 1)


@dataclass(slots=True, eq=False)
class Copy:
    """The state of a stream's checkpoint at one agent."""

    pages: int = 0  # Number of leading full pages that the agent has reported.
    # Reason why the agent has no pages; None: it has some, or may get them.
    lost: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class LiveStream(Stream):
    """An open stream with its journal. Drivers subclass it with their own state of attempts."""

    journal: StreamJournal
    plan: act.Plan | None = None  # Plan of the attempt that the driver runs.
    # Prefill instances that may retain pages.
    prefilled_at: dict[InstanceId, None] = field(default_factory=dict)
    # Checkpoints by agent; a new one has no page yet.
    copies: dict[InstanceId, Copy] = field(default_factory=dict)
    guessed_tokens: int = 0  # Prompt tokens guessed by size; 0: tokenised, or no guess.

    @property
    def stays_until_s(self) -> float | None:
        """End of the time in which an attempt at a re-forming instance may be silent."""
        deadline = self.attempt.stay_deadline
        return None if deadline is None else deadline.until_s

    @property
    def remaining_tokens(self) -> int | None:
        """Number of tokens that the client still wants; None: as many as the engine has room
        for.
        """
        most = self.journal.max_tokens
        return None if most is None else most - len(self.journal.output_ids)
