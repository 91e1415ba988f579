"""What the policy is told. Events are facts in the past tense; the driver of a proxy or a simulator makes them."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.costs import Instance
from kvrs.protocol.gpus import GpuState


@dataclass(frozen=True, slots=True)
class InstanceUp:
    """The instance answers and may be used. A higher epoch than before replaces the old one."""

    instance: Instance
    lives_on: bool = False  # Another proxy has fenced what is its own; the process, and what else runs there, is as before.


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """The process, its node or the way to it is gone.

    `produced_tokens` holds, for every stream with an attempt on this instance, the tokens that its client already has.
    """

    instance: InstanceId
    epoch: int
    cause: str
    produced_tokens: Mapping[StreamId, int]


@dataclass(frozen=True, slots=True)
class GpuJudged:
    """The worst of the GPUs that the instance runs on, as its node's agent says; told when it has changed.

    `produced_tokens` is that of `InstanceLost`.
    """

    instance: InstanceId
    state: GpuState
    reason: str
    produced_tokens: Mapping[StreamId, int]


@dataclass(frozen=True, slots=True)
class DrainReported:
    """The instance was told to end, and does so when nothing is left there; said again as long as streams run there.

    `produced_tokens` is that of `InstanceLost`.
    """

    instance: InstanceId
    epoch: int
    produced_tokens: Mapping[StreamId, int]


@dataclass(frozen=True, slots=True)
class LoadReported:
    instance: InstanceId
    queue_delay_s: float


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    source: NodeId
    target: NodeId
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class HolderUp:
    """The agent of a node answers and takes checkpoints. A higher epoch than before replaces the old one."""

    holder: InstanceId
    node: NodeId
    epoch: int
    capacity_bytes: int
    host_to_device_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class HolderLost:
    """The agent, its node or the way to it is gone; so, for all that we know, is what it held."""

    holder: InstanceId
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class CheckpointsReported:
    """What a holder says that it has. `pages` counts the leading full pages of each stream that changed since the last report."""

    holder: InstanceId
    epoch: int
    reserved_bytes: int  # For the streams of all proxies.
    checkpoints: int
    pages: Mapping[StreamId, int]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """What the client was promised; None: nothing. The first one holds before the first token, the others after it."""

    ttft_s: float | None = None
    recovery_gap_s: float | None = None
    end_to_end_s: float | None = None


@dataclass(frozen=True, slots=True)
class StreamArrived:
    """A client asked. `prompt_tokens` is a guess while the prompt is text; prefill corrects it."""

    stream: StreamId
    prompt_tokens: int
    most_tokens: int | None = None  # Prompt and output together, at most; None: as many as the model can.
    deadlines: Deadlines = Deadlines()


@dataclass(frozen=True, slots=True)
class Kept:
    """KV of a stream's history: its first `pages` full pages, at an instance or an agent in this epoch."""

    holder: InstanceId
    epoch: int
    pages: int


@dataclass(frozen=True, slots=True)
class StreamAdopted:
    """A stream that another proxy had goes on here, with the history that its client knows. It has no attempt here yet.

    `kept` is what that proxy knew of its KV; what is not up in the epoch named is left out of account.
    """

    stream: StreamId
    prompt_tokens: int
    produced_tokens: int
    most_tokens: int | None = None
    deadlines: Deadlines = Deadlines()
    age_s: float = 0.0  # Since the client first asked.
    kept: tuple[Kept, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Prefill answered: it holds the KV of all `history_tokens`, and retains their pages under a lease or has them cached.

    Of an attempt that is one call it is told by its first token.
    """

    stream: StreamId
    attempt: int
    history_tokens: int


@dataclass(frozen=True, slots=True)
class RetentionLost:
    """An instance no longer retains pages of these streams (lease unknown there)."""

    instance: InstanceId
    streams: tuple[StreamId, ...]


@dataclass(frozen=True, slots=True)
class StreamResumed:
    """The first new token of this attempt reached the client."""

    stream: StreamId
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """One attempt broke while its instance may live on: reset, end without a finish, error event, silence, refusal.

    `abrupt`: without a last word, so that all of the instance may be gone, and the news of it on its way.
    """

    stream: StreamId
    attempt: int
    instance: InstanceId
    cause: str
    produced_tokens: int
    abrupt: bool = False


@dataclass(frozen=True, slots=True)
class SlotDenied:
    """The target's agent has no slot left for this attempt: other proxies hold them. Nothing was begun."""

    stream: StreamId
    attempt: int
    target: InstanceId
    wait_s: float  # Until one may be had, as far as the agent can say.


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Complete, failed for good, or the client left."""

    stream: StreamId
    attempt: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A moment named by `WakeAt` has come."""


Event = (
    InstanceUp
    | InstanceLost
    | GpuJudged
    | DrainReported
    | LoadReported
    | LinkMeasured
    | HolderUp
    | HolderLost
    | CheckpointsReported
    | StreamArrived
    | StreamAdopted
    | PrefillDone
    | RetentionLost
    | StreamResumed
    | AttemptFailed
    | SlotDenied
    | StreamEnded
    | TimerFired
)
