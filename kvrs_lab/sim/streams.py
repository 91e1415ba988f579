"""A simulated proxy's streams: the clients' requests and received tokens."""

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Prefix, chain
from kvrs.core.model.estimates import Option
from kvrs.core.model.streams import LiveStream, mean_interval_s
from kvrs.ids import InstanceId, StreamId
from kvrs_lab.sim.calls import tokens_at
from kvrs_lab.sim.flows import FlowPart


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client's request and its time."""

    at_s: float
    prompt_ids: Sequence[int]  # Ids below 65,536, compact for many requests.
    max_tokens: int
    is_text: bool = False  # The proxy learns the ids from prefill.
    is_keyed: bool = False  # The client can resume the stream at another proxy.
    is_poison: bool = False  # The request ends its decode instance.
    deadlines: ev.Deadlines = ev.NO_DEADLINES

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


@dataclass(slots=True, eq=False)
class SimJournal:
    """The true state of one stream, as a `StreamJournal` of `kvrs.core.model.streams`."""

    stream: StreamId
    arrival: Arrival
    arrived_s: float
    prompt_tokens_guess: int
    prompt_ids: Sequence[int] | None = None
    # Tokens of a flow are added when the journal is read.
    taken_ids: MutableSequence[int] = field(default_factory=lambda: array("H"))
    owner_epoch: int = 0
    attempt: int = 0
    deadlines: ev.Deadlines = field(default_factory=ev.Deadlines)
    tenant: str = ""
    name: str = ""
    kept: tuple[ev.Kept, ...] = ()
    inexact: tuple[str, ...] = ()
    unkept: tuple[str, ...] = ()
    is_predictable: bool = True
    promise: ev.Promise = ev.Promise.NONE
    first_token_s: float | None = None
    taken_last_s: float | None = None
    # Time of each token at the client. Journals of one stream share the array.
    taken_s: "array[float]" = field(default_factory=lambda: array("d"))
    part: FlowPart | None = None  # Part of a flow with the tokens.
    is_mirrored: bool = False  # Another journal shares the times, so each token is noted at once.

    needs_replay = only_replay = is_sampled = False
    is_repeatable = may_come_again = True

    @property
    def is_recoverable(self) -> bool:
        return True

    @property
    def produced_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def prefix(self) -> Prefix:
        """The blocks of the prompt's ids, also of text prompts: equal texts have equal tokens."""
        ids = array("I", self.arrival.prompt_ids)
        return Prefix(chain(0, memoryview(ids).cast("B")), len(ids) * ids.itemsize)

    def commit_head(self) -> None:
        """Do nothing: simulated clients get no promises."""

    @property
    def output_ids(self) -> MutableSequence[int]:
        if self.part is not None:
            self._catch_up(self.part)
        return self.taken_ids

    @property
    def received_s(self) -> "array[float]":
        if self.part is not None:
            self._catch_up(self.part)
        return self.taken_s

    @property
    def last_token_s(self) -> float | None:
        if self.part is not None:
            self._catch_up(self.part)
        return self.taken_last_s

    @property
    def takes_flows(self) -> bool:
        """Return whether the stream may join a flow."""
        if self.part is not None:
            self._catch_up(self.part)
        return self.part is None and not self.is_mirrored

    @property
    def max_tokens(self) -> int | None:
        return self.arrival.max_tokens

    @property
    def finished(self) -> bool:
        return len(self.output_ids) >= self.arrival.max_tokens

    @property
    def resumable(self) -> bool:
        return self.arrival.is_keyed and not self.finished

    @property
    def token_interval_s(self) -> float | None:
        return mean_interval_s(self.first_token_s, self.last_token_s, len(self.output_ids))

    @property
    def last_write_s(self) -> float | None:
        # Here a token is appended before it is reported.
        times_s = self.received_s
        return times_s[-2] if len(times_s) > 1 else None

    def append(self, token: int, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        output_ids, taken_s = self.output_ids, self.taken_s
        self.taken_last_s = now_s
        if len(output_ids) == len(taken_s):
            taken_s.append(now_s)
        output_ids.append(token)

    def close_part(self) -> None:
        """Leave the flow; the attempt gets the further tokens."""
        if self.part is not None:
            self._catch_up(self.part)
        if self.part is not None:
            self.part.close()
            self.part = None

    def _catch_up(self, part: FlowPart) -> None:
        if times_s := part.take():
            have = len(self.taken_ids)
            tokens = tokens_at(self.stream, self.arrival.prompt_tokens + have, len(times_s))
            self.taken_ids.extend(tokens)
            self.taken_last_s = times_s[-1]
            # Another proxy may have sent some of these tokens.
            self.taken_s.extend(times_s[len(self.taken_s) - have :])
        if part.is_over:
            self.part = None


class Running(Protocol):
    """An attempt."""

    def close(self) -> None:
        """Close the connections and release the slot."""

    def expect_token(self) -> None:
        """Report the next token as that with which the attempt resumes."""


@dataclass(slots=True, eq=False)
class SimRecovery:
    """One recovery, with the facts of `kvrs.proxy.streams.recoveries`."""

    action: act.Recovered
    at_s: float
    target: str | None
    produced_tokens: int
    last_token_s: float | None
    resumed_s: float | None = None
    settled: act.Settled | None = None  # Predicted and real cost; None: no token yet.

    def resumed(self, now_s: float) -> None:
        if self.resumed_s is None:
            self.resumed_s = now_s

    def row(self) -> dict[str, Any]:
        """A row with the keys of the proxy's state that a report reads."""
        resumed_s, last_s, action = self.resumed_s, self.last_token_s, self.action
        settled = self.settled
        return {
            "at_s": self.at_s,
            "stream": action.stream,
            "attempt": action.attempt,
            "option": action.option.value,
            "from": action.failed,
            "to": self.target,
            "cause": action.cause,
            "predicted_s": action.predicted_s if settled is None else settled.predicted_s,
            "low_s": None if settled is None else settled.low_s,
            "high_s": None if settled is None else settled.high_s,
            "real_s": None if resumed_s is None else resumed_s - self.at_s,
            "gap_s": None if resumed_s is None or last_s is None else resumed_s - last_s,
            "produced_tokens": self.produced_tokens,
        }


@dataclass(slots=True, eq=False, kw_only=True)
class SimStream(LiveStream):
    journal: SimJournal
    run: Running | None = None  # The attempt that may write.
    outcome: str = ""
    ended_s: float | None = None
    failed_at_s: float | None = None  # Start of the client's wait for another attempt.
    option: Option = Option.START
    recoveries: int = 0
    last_recovery: SimRecovery | None = None

    @property
    def arrival(self) -> Arrival:
        return self.journal.arrival

    @property
    def instance(self) -> InstanceId | None:
        """The instance of the current attempt."""
        there = self.attempt.runs_on
        return None if there is None else there.id

    @property
    def output(self) -> Sequence[int]:
        return self.journal.output_ids

    @property
    def history_ids(self) -> "array[int]":
        return array("H", self.arrival.prompt_ids[:]) + array("H", self.journal.output_ids)

    @property
    def true_history_tokens(self) -> int:
        """Length of the history, also if the proxy does not know the prompt's ids."""
        return len(self.arrival.prompt_ids) + len(self.journal.output_ids)

    @property
    def is_interrupted(self) -> bool:
        return self.failed_at_s is not None
