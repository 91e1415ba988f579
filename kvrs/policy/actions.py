"""What the policy asks for. Actions are imperative; a driver carries them out and decides nothing."""

from dataclasses import dataclass
from enum import StrEnum

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.costs import Estimate, Option


@dataclass(frozen=True, slots=True)
class Plan:
    """How one attempt produces a stream's next tokens.

    With `prefill`, the whole history goes to that instance first and `decode` gets its hand-off. Without it, `decode`
    takes the history directly, pulls pages `[0, source_pages)` from `source` and computes the rest itself.
    """

    decode: InstanceId
    prefill: InstanceId | None = None
    source: InstanceId | None = None
    source_pages: int = 0
    source_generation: int = 0


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


Action = Start | Recovered | GiveUp | WakeAt
