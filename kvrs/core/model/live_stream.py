"""An open stream of a proxy: the policy's record of it with its journal, which has the tokens, and
the KV that processes keep of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.prefixes import Prefix
from kvrs.core.model.streams import Stream
from kvrs.ids import InstanceId, StreamId


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
    def replayed(self) -> tuple[str, ...]:
        """Features that only `Option.REPLAY` continues exactly."""

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
