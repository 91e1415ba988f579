"""Effects that `Control` hands to its driver. A driver performs effects in order and decides
nothing.

Those of every stream are structs, as in `kvrs/core/model/events.py`.
"""

from dataclasses import dataclass

import msgspec

from kvrs.core.live import LiveStream, Outcome
from kvrs.core.model import actions as act


class BeginAttempt(msgspec.Struct, frozen=True):
    """Run attempt `live.journal.attempt` by this plan. The attempt before it has been ended."""

    live: LiveStream
    plan: act.Plan


class EndAttempt(msgspec.Struct, frozen=True):
    """Close the connection of the stream's current attempt, if it has one; it writes no more."""

    live: LiveStream


class ExpectToken(msgspec.Struct, frozen=True):
    """The attempt stays at an instance that re-forms: report its next token as that with which it
    resumes.
    """

    live: LiveStream


@dataclass(frozen=True, slots=True)
class GiveEnd:
    """Send the end of a stream that has all its ids: no engine is needed for it."""

    live: LiveStream
    plan: act.Plan


@dataclass(frozen=True, slots=True)
class EndStream:
    """Tell the client how its stream ended."""

    live: LiveStream
    outcome: Outcome


class StreamClosed(msgspec.Struct, frozen=True):
    """The stream is out of all books, however it ended. Once per stream."""

    live: LiveStream


Effect = (
    BeginAttempt
    | EndAttempt
    | ExpectToken
    | GiveEnd
    | EndStream
    | StreamClosed
    | act.Redirect  # The attempt, whose prefill has just reported, goes on by `live.plan`.
    | act.Recovered
    | act.Settled
    | act.Ejected
    | act.Readmitted
    | act.WakeAt
)
