"""The record of one stream, of its attempt and of the recovery under way, of which tokens are never
part; and of an open stream: with its journal, and what processes keep of it.

Each record is written from one module: a stream's facts and its recovery from here, stage, attempt
and holders from `ledger.py`, checkpoints from `checkpoints.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Agent, Link
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.lifecycle import Stage
from kvrs.core.model.member import Member
from kvrs.core.model.prefixes import NO_PREFIX, Prefix
from kvrs.core.model.recovery_state import RecoveryState, RefusedBy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.geometry import KvGeometry


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
    # Their namespace, where they are rows of the instance's own memory (`books/rows.py`).
    rows: str = ""

    def is_of(self, member: Member) -> bool:
        """The instance saves and loads pages like these."""
        theirs = self.geometry
        return self.rows == member.rows and (theirs is member.geometry or theirs == member.geometry)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The next step of a stream that has no attempt, and the options that were weighed for it."""

    chosen: Estimate
    estimates: tuple[Estimate, ...]
    plan: act.Plan | None  # None: give up, no option meets the budget.
    others: float = 0.0  # Other victims, per target, for which each estimate was charged.
    refusal: act.StreamRefusal | None = None  # Of a first attempt: the load is too high for it.


class StayDeadline(msgspec.Struct, frozen=True):
    """By when the instance of an attempt, which re-forms, is to bring the stream's next token."""

    since_s: float
    until_s: float
    number: int  # Of the re-forming.
    latest_s: float  # No changed prediction of the same re-forming extends it beyond.


class Recalled(NamedTuple):
    cached: Mapping[InstanceId, int] = {}
    load: act.PromptLoad | None = None


class AttemptState(msgspec.Struct, eq=False):
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
    # With the bytes that it has put on each.
    links: list[tuple[Link, int]] = []


@dataclass(slots=True, eq=False)
class Stream:
    """A stream as the policy sees it, from `admit` on."""

    id: StreamId
    order: int = 0  # Of arrival.
    prompt_tokens: int = 1
    waiting_since_s: float = 0.0
    most_tokens: int | None = None
    deadlines: ev.Deadlines = ev.NO_DEADLINES
    common_deadlines: ev.Deadlines = ev.NO_DEADLINES  # Of all tenants: section `slo`.
    tenant: str = ""
    arrived_s: float = 0.0
    name: str = ""  # As of `StreamArrived`.
    prefix: Prefix = NO_PREFIX  # What others may have in common with its prompt.
    # Tokens of its prompt that the instances between which it was placed last have, or load from an
    # agent, as the chosen one does: less the time of that.
    cached: dict[InstanceId, int] = field(default_factory=dict)
    load: act.PromptLoad | None = None
    recalled: Recalled | None = None  # The same, of a log that is run again.
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
    promise: ev.Promise = ev.Promise.NONE
    excluded_epochs: frozenset[tuple[InstanceId, int]] = frozenset()  # That failed this stream.
    # Instances that refused it, as long as no other one has accepted it.
    refusals: tuple[RefusedBy, ...] = ()

    stage: Stage = Stage.WAITING
    attempt: AttemptState = field(default_factory=AttemptState)
    recovery: RecoveryState = field(default_factory=RecoveryState)
    holders: dict[InstanceId, Holder] = field(default_factory=dict)
    checkpoints: dict[InstanceId, StoredCheckpoint] = field(default_factory=dict)
    tokens: str = ""  # `Instance.tokens` of the one that gave its last output; empty: not known.
    unprotected: str = ""  # Why no agent stores a checkpoint of it.

    def admit(
        self,
        event: ev.StreamArrived | ev.StreamAdopted,
        order: int,
        deadlines: ev.Deadlines,
        common_deadlines: ev.Deadlines,
        now_s: float,
    ) -> None:
        """It has come to this proxy; from another one it comes as a victim of the loss of that."""
        self.order, self.waiting_since_s = order, now_s
        self.most_tokens, self.tenant, self.name = event.most_tokens, event.tenant, event.name
        self.deadlines, self.common_deadlines = deadlines, common_deadlines
        if isinstance(event, ev.StreamArrived):
            self.prompt_tokens, self.arrived_s = max(1, event.prompt_tokens), now_s
            return
        self.prompt_tokens, self.produced_tokens = event.prompt_tokens, event.produced_tokens
        self.arrived_s, self.prefilled, self.adopted = now_s - event.age_s, True, True
        self.first_token_sent = event.produced_tokens > 0
        self.recovery.note_failure("it came from another proxy", None, now_s)

    @property
    def is_fresh(self) -> bool:
        """Nothing was produced and no KV was made: starting is all that can be done."""
        return not self.prefilled and self.produced_tokens == 0

    @property
    def is_free(self) -> bool:
        """Any instance that is clear may get it: nothing more need be tested."""
        return not (self.recovery.avoided or self.name or self.excluded_epochs)

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + self.produced_tokens

    def due_s(self, deadlines: ev.Deadlines | None = None) -> float:
        """The time by which the next token must have come, by its own deadlines or by these.

        The end-to-end deadline is that of the last token, so the next one is due as much earlier as
        the rest of the output takes: the tokens that the request still allows, at the stream's own
        pace. Where these would have been late without the failure, too, the limit of the request
        says nothing about the end of its output, and only the next token is held against the
        deadline.
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
        """The part of the end-to-end deadline that the output behind the next token needs."""
        failed_at_s, rest_s = self.recovery.failed_at_s, self.rest_s
        return rest_s if failed_at_s is not None and failed_at_s + rest_s <= ends_s else 0.0

    def tightest(self) -> str:
        """The deadline that is due first, in words."""
        deadlines, due = self.deadlines, self.due_s()
        if due == inf:
            return "no limit"
        if deadlines.end_to_end_s is not None:
            ends_s = self.arrived_s + deadlines.end_to_end_s
            reserved_s = self._reserved_s(ends_s)
            if due == ends_s - reserved_s:
                rest = (
                    f", {reserved_s:.1f} s of them for the rest of its output" if reserved_s else ""
                )
                return f"{deadlines.end_to_end_s:g} s in all{rest}"
        if not self.first_token_sent:
            return f"{deadlines.ttft_s:g} s to its first token"
        return f"a pause of {deadlines.recovery_gap_s:g} s"

    def bars(self, member: Member) -> bool:
        return (member.id, member.epoch) in self.excluded_epochs

    def is_served_at(self, member: Member) -> bool:
        """The instance has the model, alias or adapter that the stream is of."""
        return not self.name or self.name in member.names

    def exclude(self, member: Member) -> None:
        self.excluded_epochs |= {(member.id, member.epoch)}

    def keep_to(self, asked: Iterable[InstanceId], peers: Iterable[Member]) -> None:
        """Bar all peers but those that were asked."""
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
            guess = self.prompt_tokens
            self.prompt_tokens = max(1, history_tokens - self.produced_tokens)
            self.prefilled = True
            if self.most_tokens is not None:
                self.most_tokens += max(0, self.prompt_tokens - guess)

    def note_resumed(self, event: ev.StreamResumed, now_s: float) -> None:
        """A token has reached the client: the recovery is over."""
        self.first_token_sent = True
        self.needs_replay, self.promise = event.needs_replay, event.promise
        self.flows_since_s, self.flows_from_tokens = now_s, self.produced_tokens
        self.recovery = RecoveryState()


def by_urgency(streams: Iterable[Stream]) -> list[Stream]:
    """The most urgent first. By the deadlines that are common to all tenants each tenant has its
    places in the order, and its streams take them by the deadlines of their own: a tenant that
    names tight ones overtakes itself only.
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
    """Every token, the finish and the usage were sent; only the formal end is left."""


class CannotContinue(msgspec.Struct, frozen=True):
    """The rest of the stream could not be produced exactly, and the configuration refuses less."""

    cause: str


Outcome = Complete | act.GiveUp | CannotContinue


class StreamJournal(Protocol):
    """Facts about one stream. (`owner_epoch`, `attempt`) is its only writer; attempt 0 while there
    is none.
    """

    stream: StreamId
    arrived_s: float
    owner_epoch: int
    attempt: int
    deadlines: ev.Deadlines
    tenant: str  # Its mark; all are the same where there are no tenants.
    name: str  # Key of the alias or adapter that it is of (`names.py`); empty: all have it.
    kept: tuple[ev.Kept, ...]  # KV of the stream as the proxy before this one knew it.

    @property
    def prompt_ids(self) -> Sequence[int] | None:
        """None until an engine has tokenised the prompt."""

    @property
    def prompt_tokens_guess(self) -> int:
        """Tokens of the prompt, estimated from its text while `prompt_ids` is None."""

    @property
    def prefix(self) -> Prefix:
        """The blocks of its prompt, by which others are found that begin alike."""

    @property
    def max_tokens(self) -> int | None:
        """None: as many as the engine has room for."""

    @property
    def output_ids(self) -> Sequence[int]: ...

    @property
    def token_interval_s(self) -> float | None:
        """Mean time between two tokens; None: there are too few."""

    @property
    def finished(self) -> bool:
        """The client has all of the text."""

    @property
    def resumable(self) -> bool:
        """The client may resume the stream at another proxy."""

    @property
    def inexact(self) -> tuple[str, ...]:
        """Features that could not be continued exactly after a cut."""

    @property
    def replayed(self) -> tuple[str, ...]:
        """Features that only `Option.REPLAY` continues exactly."""

    @property
    def promise(self) -> ev.Promise:
        """The promise that the head of its response has made; none before that."""

    def commit_head(self) -> None:
        """Its first token goes to the client, and the head of its response before that."""

    @property
    def is_recoverable(self) -> bool:
        """Another attempt can go on with it. False once its engine has sent text without ids."""

    @property
    def is_predictable(self) -> bool:
        """The time of its prefill follows from its tokens: an engine that has to fetch pictures for
        it first may take any time.
        """


def mean_interval_s(first_s: float | None, last_s: float | None, tokens: int) -> float | None:
    """Return the mean time between two of a stream's tokens; None: there are too few."""
    if first_s is None or last_s is None or tokens < 2:
        return None
    return (last_s - first_s) / (tokens - 1)


@dataclass(slots=True, eq=False)
class Copy:
    """The checkpoint of a stream at one agent."""

    pages: int = 0  # Leading full ones.
    lost: str | None = None  # Why the agent keeps nothing.


@dataclass(slots=True, eq=False, kw_only=True)
class LiveStream(Stream):
    """A stream that has not ended. Drivers extend it with what they need to run attempts."""

    journal: StreamJournal
    plan: act.Plan | None = None  # Of the attempt that the shell runs, if it runs one.
    # Instances that may retain pages of it.
    prefilled_at: dict[InstanceId, None] = field(default_factory=dict)
    copies: dict[InstanceId, Copy] = field(default_factory=dict)  # By agent.
    guessed_tokens: int = 0  # Of its prompt, by its size, until an engine has tokenised the text.

    @property
    def stays_until_s(self) -> float | None:
        """Until when its attempt, which stays at an instance that re-forms, may be silent."""
        deadline = self.attempt.stay_deadline
        return None if deadline is None else deadline.until_s

    @property
    def remaining_tokens(self) -> int | None:
        """How many more the client wants; None: as many as the engine has room for."""
        most = self.journal.max_tokens
        return None if most is None else most - len(self.journal.output_ids)
