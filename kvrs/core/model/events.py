"""The policy's input. Events are facts in the past tense, made by the driver of a proxy or a
simulator.

Those of every stream are structs, which are made in a tenth of the time of a frozen dataclass.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.gpus import GpuState
from kvrs.protocol.instance import InstanceInfo, LoadReport, ModelNames
from kvrs.protocol.rows import NO_ROWS, RowsReport


class StoreSeen(msgspec.Struct, frozen=True):
    """Facts of the store of KV that an instance's engine loads from by itself."""

    namespace: str  # Equal where one instance has loaded what the other had stored.
    restores: bool  # What others have stored serves this instance rightly.
    share: float  # Of what recoveries asked for, that the store had.


class InstanceUp(msgspec.Struct, frozen=True):
    """The instance answers and may be used. A higher epoch than before replaces the old one."""

    info: InstanceInfo
    prefill: PrefillTable | None = None  # By the settings; None: its own, of `info`.
    moves_kv: bool = True  # As `Member.moves_kv`; so is `tokens`.
    tokens: str = ""
    # Another proxy has fenced its own attempts there; the process and all others go on.
    lives_on: bool = False
    # It was taken for lost, and its process had not ended.
    had_not_ended: bool = False
    restores: bool | None = None  # As `Member.restores`; None: as `moves_kv`.
    weights: str = ""  # As `Member.weights`.
    store: StoreSeen | None = None  # None: none was seen.


class PagesKept(msgspec.Struct, frozen=True):
    """The instance, in this epoch, has taken over the memory of the process before it: the leading
    full pages of these streams. It comes before the `InstanceUp` of that epoch, by which streams
    that wait are placed.
    """

    instance: InstanceId
    epoch: int
    pages: Mapping[StreamId, int]


class InstanceLost(msgspec.Struct, frozen=True):
    """The process, its node or the path to it is gone.

    `produced_tokens` holds, for every stream with an attempt on this instance, the tokens that its
    client already has.
    """

    instance: InstanceId
    epoch: int
    cause: str
    produced_tokens: Mapping[StreamId, int]


class InstanceExited(msgspec.Struct, frozen=True):
    """A supervisor reports how the process of an instance ended. It comes before or after the
    `InstanceLost` of that epoch, or without one, and changes nothing of what is up.
    """

    instance: InstanceId
    epoch: int
    cause: str
    # Ended from outside: SIGKILL or SIGTERM that was sent to it, a lost node or device, an order, a
    # restart. So no request caused it.
    is_external: bool


class GpuJudged(msgspec.Struct, frozen=True):
    """The worst state of the GPUs that the instance runs on, as reported by its node's agent; sent
    when it has changed.

    `produced_tokens` is that of `InstanceLost`.
    """

    instance: InstanceId
    state: GpuState
    reason: str
    produced_tokens: Mapping[StreamId, int]


class DrainOrdered(msgspec.Struct, frozen=True):
    """An operator drains the instance, also its next processes: it gets nothing new while another
    one has its role. With `moves` the streams that run there are moved.

    `produced_tokens` is that of `InstanceLost`.
    """

    instance: InstanceId
    moves: bool
    produced_tokens: Mapping[StreamId, int]


class DrainEnded(msgspec.Struct, frozen=True):
    """The operator's order is withdrawn: the instance is used like any other."""

    instance: InstanceId


class InstanceRemoved(msgspec.Struct, frozen=True):
    """The instance is no part of the cluster any more: what is known of it is forgotten. The end of
    an ordered drain; an `InstanceUp` adds it again, as a new one.

    `produced_tokens` is that of `InstanceLost`.
    """

    instance: InstanceId
    produced_tokens: Mapping[StreamId, int]


class SelfTested(msgspec.Struct, frozen=True):
    """Results of a resume self-test of the instance (docs/guide/backends.md)."""

    instance: InstanceId
    epoch: int
    moves_kv: bool
    tokens: str = ""  # As `Member.tokens`.
    restores: bool | None = None  # As of `InstanceUp`.
    weights: str = ""  # As `Member.weights`.
    store: StoreSeen | None = None  # As of `InstanceUp`.


class NamesListed(msgspec.Struct, frozen=True):
    """The instance serves these names from now on: adapters come and go while it runs."""

    instance: InstanceId
    epoch: int
    names: ModelNames


class LoadReported(msgspec.Struct, frozen=True):
    """A report of the instance that can change a decision (`model/reports.py`): of its queue, of a
    re-forming of its ranks, or that it is draining, and ends when no stream runs there.
    """

    instance: InstanceId
    report: LoadReport
    has_peers: bool = False  # Other proxies use the instance as well.
    # Where its ranks change, the mean time between two tokens of a stream there, until now; 0: not
    # known.
    token_s: float = 0.0
    # That of `InstanceLost`, while it drains or re-forms.
    produced_tokens: Mapping[StreamId, int] = msgspec.field(default_factory=dict)


class LinkMeasured(msgspec.Struct, frozen=True):
    source: NodeId
    target: NodeId
    bytes_per_s: float


class HolderUp(msgspec.Struct, frozen=True):
    """The agent of a node answers and takes checkpoints. A higher epoch than before replaces the
    old one.
    """

    holder: InstanceId
    node: NodeId
    epoch: int
    capacity_bytes: int
    host_to_device_bytes_per_s: float


class HolderLost(msgspec.Struct, frozen=True):
    """The agent, its node or the path to it is gone; what it stored is taken to be gone too."""

    holder: InstanceId
    epoch: int
    cause: str


class CheckpointsReported(msgspec.Struct, frozen=True):
    """A holder's report of what it stores. `pages` counts the leading full pages of each stream
    that changed since the last report.
    """

    holder: InstanceId
    epoch: int
    reserved_bytes: int  # For the streams of all proxies.
    checkpoints: int
    pages: Mapping[StreamId, int]
    rows: RowsReport = NO_ROWS


class Deadlines(msgspec.Struct, frozen=True):
    """Limits on a stream; None: no limit. The first one holds until the first token, the second one
    after it.
    """

    ttft_s: float | None = None
    recovery_gap_s: float | None = None
    end_to_end_s: float | None = None


NO_DEADLINES = Deadlines()


class StreamArrived(msgspec.Struct, frozen=True, gc=False):
    """A new request. `prompt_tokens` is a guess while the prompt is text; prefill corrects it."""

    stream: StreamId
    prompt_tokens: int
    # Prompt and output together, at most; None: as many as the model can.
    most_tokens: int | None = None
    deadlines: Deadlines = NO_DEADLINES
    tenant: str = ""  # Its mark: the deadlines count among the streams of the same tenant.
    name: str = ""  # One of `Member.names`, which its instances must have; empty: all have it.


class Kept(msgspec.Struct, frozen=True):
    """KV of a stream's history: its first `pages` full pages, at an instance or an agent in this
    epoch.
    """

    holder: InstanceId
    epoch: int
    pages: int


class StreamAdopted(msgspec.Struct, frozen=True):
    """A stream of another proxy goes on here, with the history that its client has. It has no
    attempt here yet.

    `kept` is where its KV was by that proxy's view; holders that are not up in the epoch named are
    left out.
    """

    stream: StreamId
    prompt_tokens: int
    produced_tokens: int
    most_tokens: int | None = None
    deadlines: Deadlines = NO_DEADLINES
    age_s: float = 0.0  # Since the request arrived.
    kept: tuple[Kept, ...] = ()
    tenant: str = ""
    name: str = ""


class PrefillDone(msgspec.Struct, frozen=True, gc=False):
    """Prefill answered: it holds the KV of all `history_tokens`, and retains their pages under a
    lease or has them cached.

    An attempt that is one call reports it with its first token, and once more if what the cache had
    is told later than that.
    """

    stream: StreamId
    attempt: int
    history_tokens: int
    reused_tokens: int | None = None  # Of these, that its prefix cache had; None: it does not say.


class RetentionLost(msgspec.Struct, frozen=True):
    """An instance no longer retains pages of these streams (lease unknown there)."""

    instance: InstanceId
    streams: tuple[StreamId, ...]


class Promise(StrEnum):
    """A promise of the head of a response: how the tokens behind a cut follow."""

    NONE = "none"  # Marked: as well as the instances that are left can do it.
    GREEDY = "greedy"  # Exactly as those of temperature 0, or of an output generated again.
    SAMPLED = "sampled"  # Exactly as those of its seed.


class WholeAsked(msgspec.Struct, frozen=True):
    """The answer of this attempt comes in one piece: when its first token is made stays unknown."""

    stream: StreamId
    attempt: int


class StreamResumed(msgspec.Struct, frozen=True, gc=False):
    """The first new token of this attempt reached the client; once more when `needs_replay` has
    become true.
    """

    stream: StreamId
    attempt: int
    needs_replay: bool = False  # Only `Option.REPLAY` continues it exactly.
    promise: Promise = Promise.NONE


class FailureKind(StrEnum):
    """The meaning of a failed attempt for the instance."""

    BROKEN = "broken"
    # By an error answer before any token, or no first token in time: the request may be the cause,
    # which another instance will tell.
    ERROR = "error"
    SILENT = "silent"
    BUSY = "busy"  # It had no room (429, 503), or took no connection.
    # By a 4xx that may be the client's fault: another instance will tell, unless it is final.
    REFUSED = "refused"
    DENIED = "denied"  # It does not take the proxy's key (401, 403); another one may.
    # The logits of this stream overflow there: where that is the model's, they do anywhere.
    NOT_A_NUMBER = "not_a_number"

    @property
    def is_refusal(self) -> bool:
        """Another instance is asked, and if that refuses too the stream is given up."""
        return self in (FailureKind.REFUSED, FailureKind.DENIED)

    @property
    def is_doubtful(self) -> bool:
        """Two instances that fail the stream alike show that the request is the cause."""
        return self in (FailureKind.ERROR, FailureKind.SILENT)


class AttemptFailed(msgspec.Struct, frozen=True):
    """One attempt broke while its instance may still be up: reset, end without a finish, error
    event, silence, refusal.

    `abrupt`: the connection ended without an error, so that the whole instance may be lost and the
    report of that still to come.
    """

    stream: StreamId
    attempt: int
    instance: InstanceId
    cause: str
    produced_tokens: int
    abrupt: bool = False
    failure: FailureKind = FailureKind.BROKEN
    retry_after_s: float | None = None  # As a busy instance asked for.
    final: bool = False  # A refusal that names a fault of the request: any instance would refuse.


class SlotDenied(msgspec.Struct, frozen=True):
    """The target's agent has no slot left for this attempt: other proxies hold them. No transfer
    was begun.
    """

    stream: StreamId
    attempt: int
    target: InstanceId
    wait_s: float  # Until one is free, by the agent's estimate.


class StreamEnded(msgspec.Struct, frozen=True, gc=False):
    """Complete, failed for good, or the client left."""

    stream: StreamId
    attempt: int


class TimerFired(msgspec.Struct, frozen=True):
    """A moment named by `WakeAt` has come."""


class SettingsReloaded(msgspec.Struct, frozen=True):
    """The settings from now on. Streams that have arrived keep their deadlines, predictions what
    they have learned.
    """

    policy: PolicySettings
    slo: SloSettings


OfAttempt = PrefillDone | WholeAsked | StreamResumed | AttemptFailed | SlotDenied | StreamEnded
OfStream = StreamArrived | StreamAdopted | OfAttempt
OfCluster = (
    InstanceUp
    | InstanceLost
    | InstanceExited
    | PagesKept
    | GpuJudged
    | DrainOrdered
    | DrainEnded
    | InstanceRemoved
    | SelfTested
    | NamesListed
    | LoadReported
    | LinkMeasured
    | HolderUp
    | HolderLost
    | CheckpointsReported
    | RetentionLost
    | TimerFired
    | SettingsReloaded
)
Event = OfCluster | OfStream
