"""The policy's output: actions, named as imperatives, which a driver carries out in their order."""

from enum import StrEnum

import msgspec

from kvrs.core.model.estimates import Estimate, Option
from kvrs.ids import InstanceId, StreamId


class _Action(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """An action. An event log names its kind by `kind`."""


class PageRange(msgspec.Struct, frozen=True, gc=False):
    """Pages `[first_page, first_page + pages)` of the history, to fetch from `holder` (an instance
    or an agent).
    """

    holder: InstanceId
    first_page: int
    pages: int
    generation: int  # The holder's epoch.


class Place(msgspec.Struct, frozen=True, gc=False):
    """An agent that stores the stream's checkpoint and reserves room for all of it; with
    `backup.mode` peer, an instance that keeps as many pages as fit.
    """

    holder: InstanceId
    reserved_bytes: int


class PromptLoad(msgspec.Struct, frozen=True, gc=False):
    """KV of the beginning of a new prompt, which the prefilling instance loads from an agent. The
    instance computes the tokens whose KV does not arrive within `within_s`.
    """

    agent: InstanceId
    generation: int  # The agent's epoch.
    pages: int  # All pages of the prompt: the agent may have more than it has reported.
    first_token: int  # Position of the first token that the agent is expected to have.
    tokens: int  # Number of tokens that the agent is expected to have.
    within_s: float


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Plan by which one attempt produces a stream's next tokens.

    With `prefill`, the whole history goes to that instance first and `decode` gets its hand-off.
    Without `prefill`, `decode` takes the history directly, fetches the pages of `runs` and computes
    the rest; it computes the pages before the first run while it fetches. The attempt's newly
    filled pages are copied to `places`. With `replays` both instances get the prompt alone, and
    `decode` generates the known output once more. `load` is for the prefilling instance.
    """

    decode: InstanceId
    prefill: InstanceId | None = None
    runs: tuple[PageRange, ...] = ()
    places: tuple[Place, ...] = ()
    replays: bool = False
    load: PromptLoad | None = None
    # If the pages of `runs` are rows: all agents that `decode` asks for rows of the history, that
    # of the rows' own node first. `runs` has those from which they are expected.
    asked: tuple[InstanceId, ...] = ()


class Start(_Action, frozen=True, gc=False, omit_defaults=True):
    """Begin attempt `attempt` of the stream, after closing the connections of all lower
    attempts.
    """

    stream: StreamId
    attempt: int
    plan: Plan
    # Prompt tokens presumed cached: at the chosen instance, and at the one with the shortest queue.
    cached: dict[InstanceId, int] = {}


class Stay(_Action, frozen=True, gc=False):
    """Keep the attempt at its instance, which re-forms, and tolerate its silence until
    `until_s`.
    """

    stream: StreamId
    attempt: int
    until_s: float


class Recovered(_Action, frozen=True, gc=False):
    """A record that explains a `Start` or `Stay`: the chosen option and the predicted cost of every
    option.
    """

    stream: StreamId
    attempt: int
    option: Option
    predicted_s: float
    estimates: tuple[Estimate, ...]
    cause: str
    failed: InstanceId | None
    # Number of other victims per target; each estimate was charged for their wait.
    others: float = 0.0
    # Options that have an estimate and could not be chosen, with the cause.
    excluded: dict[Option, str] = {}


class Redirect(_Action, frozen=True):
    """Hand the attempt off by another plan: its prefill is done, and its decode call has not
    begun.
    """

    stream: StreamId
    attempt: int
    plan: Plan


class Halt(_Action, frozen=True):
    """End a running attempt, because its stream is moved before the instance fails or ends. A
    `Start` follows later.
    """

    stream: StreamId
    attempt: int


class Settled(_Action, frozen=True, gc=False):
    """A record of a recovery after its first token has reached the client: predicted and real
    cost.
    """

    stream: StreamId
    attempt: int
    option: Option
    predicted_s: float  # Predicted cost beside the other victims of the event.
    real_s: float
    # Nine of ten real costs with this prediction are between these; None: not known.
    low_s: float | None = None
    high_s: float | None = None


class RowsLoaded(_Action, frozen=True, gc=False):
    """A record of what a restore of rows has loaded: `option` is what it is booked as. One that has
    loaded less than half of what was expected of `asked` is booked as a recompute.
    """

    stream: StreamId
    attempt: int
    option: Option
    loaded_tokens: int
    expected_tokens: int
    asked: tuple[InstanceId, ...]


class Reason(StrEnum):
    NO_INSTANCE = "no_instance"
    BUSY = "busy"  # Every instance was busy for `recovery.wait_s`.
    OVERLOADED = "overloaded"  # A new request would wait for too long.
    SLO = "slo"
    RETRIES = "retries"
    POISON = "poison"  # `recovery.poison_deaths` instances died of the request in a row.
    # Two instances refused the request, or one named the request's fault; the client gets the last
    # answer.
    REFUSED = "refused"
    DENIED = "denied"  # Instances refused the proxy's key.
    # No instance that is up can keep the promise in the head of the response.
    INEXACT = "inexact"


class StreamRefusal(msgspec.Struct, frozen=True, gc=False):
    """The reason why a stream is not started, and the time after which its client may retry."""

    reason: Reason
    message: str
    retry_after_s: float


class GiveUp(_Action, frozen=True, omit_defaults=True):
    """End the stream with an error: a 503 before the first byte, an error event after it."""

    stream: StreamId
    reason: Reason
    message: str
    retry_after_s: float
    # Cached tokens as in `Start`, for a refusal with `Reason.OVERLOADED`.
    cached: dict[InstanceId, int] = {}


class Ejected(_Action, frozen=True):
    """A record: the instance gets no new request for `pause_s`, and then one probe
    (`core/outliers.py`).
    """

    instance: InstanceId
    epoch: int
    cause: str
    pause_s: float


class Readmitted(_Action, frozen=True):
    """A record: an ejected instance has answered again."""

    instance: InstanceId
    epoch: int


class WakeAt(_Action, frozen=True, gc=False):
    """Ask the driver for a `TimerFired` at `at_s`."""

    at_s: float


AfterStart = (
    Stay
    | Redirect
    | Halt
    | Recovered
    | Settled
    | RowsLoaded
    | GiveUp
    | Ejected
    | Readmitted
    | WakeAt
)
Action = Start | AfterStart

# Actions that are shown to operators.
Shown = Redirect | Recovered | Settled | RowsLoaded | GiveUp | Ejected | Readmitted
