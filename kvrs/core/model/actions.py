"""The policy's output. Actions are imperative; a driver carries them out in their order.

Those of every stream are structs, as in `events.py`.
"""

from enum import StrEnum

import msgspec

from kvrs.core.model.estimates import Estimate, Option
from kvrs.ids import InstanceId, StreamId


class PageRange(msgspec.Struct, frozen=True, gc=False):
    """Pages `[first_page, first_page + pages)` of the history, to be fetched from `holder` (an
    instance or an agent).
    """

    holder: InstanceId
    first_page: int
    pages: int
    generation: int  # The holder's epoch.


class Place(msgspec.Struct, frozen=True, gc=False):
    """An agent that stores a checkpoint of the stream, with room for all of it; with `backup.mode`
    peer an instance that keeps what it has room for.
    """

    holder: InstanceId
    reserved_bytes: int


class PromptLoad(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a new prompt, which the instance that computes it loads from an agent. What
    has not come in time is computed.
    """

    agent: InstanceId
    generation: int  # The agent's epoch.
    pages: int  # Of the prompt: the agent is asked for all, and may have more than is known.
    # Of the prompt: the first token that the agent is expected to bring, and their number.
    first_token: int
    tokens: int
    within_s: float


class Plan(msgspec.Struct, frozen=True, gc=False):
    """How one attempt produces a stream's next tokens.

    With `prefill`, the whole history goes to that instance first and `decode` gets its hand-off.
    Without it, `decode` takes the history directly, fetches the pages of `runs` and computes the
    rest itself; what lies before the first run it computes while it fetches. `places` are where the
    attempt's newly filled pages go. With `replays` both get the prompt alone, and `decode`
    generates the known output once more. `load` is for the instance that computes the prompt.
    """

    decode: InstanceId
    prefill: InstanceId | None = None
    runs: tuple[PageRange, ...] = ()
    places: tuple[Place, ...] = ()
    replays: bool = False
    load: PromptLoad | None = None


class Start(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Begin attempt `attempt` of the stream; every lower attempt is over and its connections are
    closed.
    """

    stream: StreamId
    attempt: int
    plan: Plan
    # Tokens of the prompt that were taken to be in prefix caches: of the instance with the shortest
    # queue, where it had any, or another one was chosen; and of that.
    cached: dict[InstanceId, int] = {}


class Stay(msgspec.Struct, frozen=True, gc=False):
    """The attempt goes on at its instance, which re-forms; it may be silent until then."""

    stream: StreamId
    attempt: int
    until_s: float


class Recovered(msgspec.Struct, frozen=True, gc=False):
    """A record beside the `Start` or `Stay` it explains: why this option, and what every option was
    predicted to cost.
    """

    stream: StreamId
    attempt: int
    option: Option
    predicted_s: float
    estimates: tuple[Estimate, ...]
    cause: str
    failed: InstanceId | None
    others: float = 0.0  # Other victims, per target, for which each estimate was charged.


class Redirect(msgspec.Struct, frozen=True):
    """The hand-off of this attempt goes by another plan: prefill is done, and its decode call has
    not begun.
    """

    stream: StreamId
    attempt: int
    plan: Plan


class Halt(msgspec.Struct, frozen=True):
    """End this attempt, which still runs: its stream is moved before the instance fails or ends. A
    later `Start` follows.
    """

    stream: StreamId
    attempt: int


class Settled(msgspec.Struct, frozen=True, gc=False):
    """A record of a recovery that has brought a token to the client: predicted and real cost."""

    stream: StreamId
    attempt: int
    option: Option
    raw_s: float  # By the tables.
    predicted_s: float  # After the correction.
    real_s: float
    # Real cost minus the best other prediction; below 0: no other option is predicted to have been
    # better.
    regret_s: float


class Reason(StrEnum):
    NO_INSTANCE = "no_instance"
    BUSY = "busy"  # Every instance, for `recovery.wait_s`.
    OVERLOADED = "overloaded"  # A new request would wait for too long.
    SLO = "slo"
    RETRIES = "retries"
    POISON = "poison"  # `recovery.poison_deaths` instances died of it in a row.
    # By two instances, or by one that named the request's fault: the client gets what the last one
    # said.
    REFUSED = "refused"
    # The same by instances that do not take the proxy's key: no fault of the request.
    DENIED = "denied"
    # Nothing that is up could keep what the head of the response has promised.
    INEXACT = "inexact"


class StreamRefusal(msgspec.Struct, frozen=True, gc=False):
    """Why a stream is not started, and when its client may come again."""

    reason: Reason
    message: str
    retry_after_s: float


class GiveUp(msgspec.Struct, frozen=True, omit_defaults=True):
    """End the stream with an explicit error (503 before the first byte, an error event after
    it).
    """

    stream: StreamId
    reason: Reason
    message: str
    retry_after_s: float
    cached: dict[InstanceId, int] = {}  # As in `Start`, of one that is refused for its wait.


class Ejected(msgspec.Struct, frozen=True):
    """A record: the instance gets nothing new for `pause_s`, and then one request to prove itself
    (`core/defences/outliers.py`).
    """

    instance: InstanceId
    epoch: int
    cause: str
    pause_s: float


class Readmitted(msgspec.Struct, frozen=True):
    """A record: an ejected instance has answered again."""

    instance: InstanceId
    epoch: int


class WakeAt(msgspec.Struct, frozen=True, gc=False):
    """Send `TimerFired` at this time."""

    at_s: float


AfterStart = Stay | Redirect | Halt | Recovered | Settled | GiveUp | Ejected | Readmitted | WakeAt
Action = Start | AfterStart

# What people are shown, beside what is done.
Record = Redirect | Recovered | Settled | Ejected | Readmitted
