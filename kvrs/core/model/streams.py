"""The records of one stream: its facts, its attempt, its recovery, and the holders of its KV. The
policy's records have no tokens; `LiveStream` adds the journal, which has them.

Each record is written by one module: a stream's facts and its recovery by this module; stage,
attempt by `ledger.py`; holders by `kv_locations.py`; checkpoints by `checkpoints.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.cluster_view import Link
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.lifecycle import Stage
from kvrs.core.model.member import Member
from kvrs.core.model.prefixes import NO_PREFIX, Prefix
from kvrs.core.model.recovery_state import RecoveryState, RefusedBy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.geometry import KvGeometry


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
    booked_bytes: int = 0  # 0: the agent gets no more pages, and its pages may still be fetched.
    pages: int = 0  # Leading full pages of the history, by the agent's last report.
    booked_for: NodeId | None = None  # The node that decodes the stream.
    # The namespace, if the pages are rows of an instance's CPU tier (`kv_locations.py`).
    rows: str = ""

    def is_of(self, member: Member) -> bool:
        """Return whether the instance can save and load pages of this geometry and namespace."""
        own, theirs = self.geometry, member.info.geometry
        return self.rows == member.rows and (own is theirs or own == theirs)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The next step of a stream without an attempt, and the estimates that were compared."""

    chosen: Estimate
    estimates: tuple[Estimate, ...]
    plan: act.Plan | None  # None: give up, because no option meets the budget.
    others: float = 0.0  # Other victims per target, for whose wait each estimate was charged.
    refusal: act.StreamRefusal | None = None  # A new stream is refused because of the load.


class StayDeadline(msgspec.Struct, frozen=True):
    """The time by which a re-forming instance must produce the next token of a stream that
    stays.
    """

    since_s: float
    until_s: float
    number: int  # Number of the re-forming.
    latest_s: float  # Limit of `until_s` for changed predictions of the same re-forming.


class Recalled(NamedTuple):
    cached: Mapping[InstanceId, int] = {}
    load: act.PromptLoad | None = None


class AttemptState(msgspec.Struct, eq=False):
    """The stream's latest attempt, and its bookings in the cluster view until the attempt ends."""

    number: int = 0  # 0: no attempt yet.
    plan: act.Plan | None = None
    option: Option = Option.START
    started_s: float = 0.0
    decision: Decision | None = None  # The attempt's decision, until its first token.
    resumed: bool = False  # The attempt has produced a token for the client.
    runs_on: Member | None = None
    decodes_on: Member | None = None
    booked_on: Member | None = None
    booked_s: float = 0.0
    stay_deadline: StayDeadline | None = None  # Set while the stream's instance re-forms.
    links: list[tuple[Link, int]] = []  # The attempt's transfers: link and bytes.


@dataclass(slots=True, eq=False)
class Stream:
    """The policy's record of a stream."""

    id: StreamId
    order: int = 0  # Order of arrival.
    prompt_tokens: int = 1
    waiting_since_s: float = 0.0
    most_tokens: int | None = None
    deadlines: ev.Deadlines = ev.NO_DEADLINES
    common_deadlines: ev.Deadlines = ev.NO_DEADLINES  # Deadlines of section `slo`.
    tenant: str = ""
    arrived_s: float = 0.0
    name: str = ""  # As in `StreamArrived`.
    prefix: Prefix = NO_PREFIX  # Hash chain of the prompt.
    # Prompt tokens presumed cached at the candidates of the last placement; a load from an agent
    # counts less the time that it takes.
    cached: dict[InstanceId, int] = field(default_factory=dict)
    load: act.PromptLoad | None = None
    recalled: Recalled | None = None  # `cached` and `load` from an event log that is run again.
    produced_tokens: int = 0  # Number of tokens at the last failure.
    # Time of the first token of the last attempt that produced tokens, and the number of tokens
    # before it.
    flows_since_s: float = 0.0
    flows_from_tokens: int = 0
    token_s: float | None = None  # Mean time per token of that attempt; None: not known.
    prefilled: bool = False  # A prefill is done: the prompt's length is known, and its KV exists.
    adopted: bool = False  # Taken over from another proxy: the first attempt is a recovery.
    first_token_sent: bool = False
    needs_replay: bool = False  # Only `Option.REPLAY` continues the stream exactly.
    promise: ev.Promise = ev.Promise.NONE
    excluded_epochs: frozenset[tuple[InstanceId, int]] = frozenset()  # Processes that failed it.
    refusals: tuple[RefusedBy, ...] = ()  # Refusals since an instance last accepted the stream.

    stage: Stage = Stage.WAITING
    attempt: AttemptState = field(default_factory=AttemptState)
    recovery: RecoveryState = field(default_factory=RecoveryState)
    holders: dict[InstanceId, Holder] = field(default_factory=dict)
    checkpoints: dict[InstanceId, StoredCheckpoint] = field(default_factory=dict)
    tokens: str = ""  # `Member.tokens` of the instance of its last output; empty: not known.
    unprotected: str = ""  # The reason why no agent stores a checkpoint.

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
            return
        self.prompt_tokens, self.produced_tokens = event.prompt_tokens, event.produced_tokens
        self.arrived_s, self.prefilled, self.adopted = now_s - event.age_s, True, True
        self.first_token_sent = event.produced_tokens > 0
        self.recovery.note_failure("it came from another proxy", None, now_s)

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
        """Return whether the instance serves the stream's model, alias or adapter."""
        return not self.name or self.name in member.names

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
    def replayed(self) -> tuple[str, ...]:
        """Features that only `Option.REPLAY` continues exactly."""

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
    """The checkpoint of a stream at one agent."""

    pages: int = 0  # Number of leading full pages.
    lost: str | None = None  # The reason why the agent has none.


@dataclass(slots=True, eq=False, kw_only=True)
class LiveStream(Stream):
    """An open stream with its journal. Drivers subclass it with their own state of attempts."""

    journal: StreamJournal
    plan: act.Plan | None = None  # Plan of the attempt that the driver runs.
    prefilled_at: dict[InstanceId, None] = field(default_factory=dict)  # May retain its pages.
    copies: dict[InstanceId, Copy] = field(default_factory=dict)  # Checkpoints by agent.
    guessed_tokens: int = 0  # Prompt tokens guessed by size, until the text is tokenised.

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
