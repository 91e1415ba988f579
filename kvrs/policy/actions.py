"""What the policy asks for. Actions are imperative; a driver carries them out and decides nothing."""

from dataclasses import dataclass
from enum import StrEnum

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.costs import Estimate, Option


@dataclass(frozen=True, slots=True)
class Run:
    """Pages `[first_page, first_page + pages)` of the history are to be had from `holder` (an instance or an agent)."""

    holder: InstanceId
    first_page: int
    pages: int
    generation: int  # The holder's epoch.


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint of the stream is kept by this agent, with room for all that it may come to."""

    holder: InstanceId
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How one attempt produces a stream's next tokens.

    With `prefill`, the whole history goes to that instance first and `decode` gets its hand-off. Without it, `decode` takes
    the history directly, fetches the pages of `runs` and computes the rest itself; what lies before the first run it
    computes while it fetches. `places` are where the attempt's newly filled pages go.
    """

    decode: InstanceId
    prefill: InstanceId | None = None
    runs: tuple[Run, ...] = ()
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Begin attempt `attempt` of the stream; every lower attempt is over and its connections are closed."""

    stream: StreamId
    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Recovered:
    """For the record, beside the `Start` it explains: why this option, and what every option was predicted to cost."""

    stream: StreamId
    attempt: int
    option: Option
    predicted_s: float
    estimates: tuple[Estimate, ...]
    cause: str
    failed: InstanceId | None


@dataclass(frozen=True, slots=True)
class Redirect:
    """The hand-off of this attempt goes by another plan: prefill is done, and its decode call has not begun."""

    stream: StreamId
    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Halt:
    """End this attempt, which still runs: its instance is left before it fails. The next one starts in a moment."""

    stream: StreamId
    attempt: int


@dataclass(frozen=True, slots=True)
class Settled:
    """For the record: a recovery has brought a token to the client. What it was predicted to cost, and what it did cost."""

    stream: StreamId
    attempt: int
    option: Option
    raw_s: float  # As the tables say.
    predicted_s: float  # After the correction.
    real_s: float
    regret_s: float  # Real cost minus the best other prediction; below 0: nothing would have been better, as far as is known.


class Reason(StrEnum):
    NO_INSTANCE = "no_instance"
    SLO = "slo"
    RETRIES = "retries"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the stream with an explicit error (503 before the first byte, an error event after it)."""

    stream: StreamId
    reason: Reason
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `TimerFired` at this time."""

    at_s: float


Action = Start | Redirect | Halt | Recovered | Settled | GiveUp | WakeAt
