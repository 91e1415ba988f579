"""The policy's input: events, named in the past tense, from the driver of a proxy or a simulator.

Events are msgspec structs, which take a tenth of the time of a frozen dataclass to create.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import GpuState, InstanceInfo, LoadReport, ModelNames
from kvrs.protocol.rows import NO_ROWS, RowsReport


class _Event(msgspec.Struct, frozen=True, tag_field="kind", tag=True):
    """An event. An event log names its kind by `kind`."""


class StoreSeen(msgspec.Struct, frozen=True):
    """Known facts of the shared KV store from which an instance's engine loads by itself."""

    namespace: str  # Equal for instances that can load each other's KV.
    restores: bool  # KV that other instances have stored is correct for this instance.
    share: float  # Share of the requested KV that the store had, over past recoveries.


class InstanceUp(_Event, frozen=True):
    """The instance answers and may be used. A higher epoch replaces the previous one."""

    info: InstanceInfo
    prefill: PrefillTable | None = None  # The table of the settings; None: that of `info`.
    moves_kv: bool = True  # The new `Member.moves_kv`.
    tokens: str = ""  # The new `Member.tokens`.
    # The process is the same as before; another proxy has fenced its own attempts there.
    lives_on: bool = False
    had_not_ended: bool = False  # The process ran on while it was considered lost.
    restores: bool | None = None  # The new `Member.restores`; None: same as `moves_kv`.
    is_doubted: bool = False  # The new `Member.is_doubted`.
    # The store that the engine loads from; None: it has used none yet.
    store: StoreSeen | None = None
    generates: str = ""  # The new `Member.generates`.


class PagesKept(_Event, frozen=True):
    """The instance's new process has taken over KV from the memory of its previous process: the
    leading full pages of these streams.

    The event comes before the `InstanceUp` of the same epoch, after which waiting streams are
    placed.
    """

    instance: InstanceId
    epoch: int
    pages: Mapping[StreamId, int]


class InstanceLost(_Event, frozen=True):
    """The instance's process, its node or the path to it is gone.

    `produced_tokens` has, for every stream with an attempt on this instance, the number of tokens
    that the client already has.
    """

    instance: InstanceId
    epoch: int
    cause: str
    produced_tokens: Mapping[StreamId, int]


class InstanceExited(_Event, frozen=True):
    """A supervisor has reported how an instance's process ended. The report comes before or after
    the `InstanceLost` of that epoch, or without one, and does not end the instance's epoch.
    """

    instance: InstanceId
    epoch: int
    cause: str
    # No request caused the end: a SIGKILL or SIGTERM from outside, a lost node or device, an order,
    # a restart.
    is_external: bool


class GpuJudged(_Event, frozen=True):
    """The worst state of the instance's GPUs has changed, by the report of its node's agent.

    `produced_tokens` is as in `InstanceLost`.
    """

    instance: InstanceId
    state: GpuState
    reason: str
    produced_tokens: Mapping[StreamId, int]


class DrainOrdered(_Event, frozen=True):
    """An operator, or a fault of its node, drains the instance and its later processes: it gets no
    new stream while another instance has its role. With `moves` its running streams are moved.

    `produced_tokens` is as in `InstanceLost`.
    """

    instance: InstanceId
    moves: bool
    produced_tokens: Mapping[StreamId, int]
    cause: str = "its instance is drained"


class DrainEnded(_Event, frozen=True):
    """The order is withdrawn: the instance is used like any other."""

    instance: InstanceId


class InstanceRemoved(_Event, frozen=True):
    """The instance is removed from the cluster at the end of an ordered drain, and its record is
    deleted. An `InstanceUp` adds it again as a new instance.

    `produced_tokens` is as in `InstanceLost`.
    """

    instance: InstanceId
    produced_tokens: Mapping[StreamId, int]


class SelfTested(_Event, frozen=True):
    """The instance has finished a resume self-test (docs/guide/backends.md)."""

    instance: InstanceId
    epoch: int
    moves_kv: bool
    tokens: str = ""  # The new `Member.tokens`.
    restores: bool | None = None  # The new `Member.restores`; None: same as `moves_kv`.
    is_doubted: bool = False  # The new `Member.is_doubted`.
    # The store that the engine loads from; None: it has used none yet.
    store: StoreSeen | None = None
    generates: str = ""  # The new `Member.generates`.


class NamesListed(_Event, frozen=True):
    """The set of model and adapter names that the running instance serves has changed."""

    instance: InstanceId
    epoch: int
    names: ModelNames


class TransferHung(_Event, frozen=True):
    """A transfer of KV to the instance may go on, although its attempt was given up: a leg of the
    attempt was lost meanwhile, or nothing has shown the transfer's end in time.
    """

    instance: InstanceId
    epoch: int


class LoadReported(_Event, frozen=True):
    """The instance has sent a load report that can change a decision (`model/reports.py`): a new
    queue, a re-forming of its ranks, or a drain, after which its process ends.
    """

    instance: InstanceId
    report: LoadReport
    has_peers: bool = False  # Other proxies use the instance as well.
    # Mean time between two tokens of a stream there, if the ranks change; 0: not known.
    token_s: float = 0.0
    # Produced tokens as in `InstanceLost`, if the instance drains or re-forms.
    produced_tokens: Mapping[StreamId, int] = msgspec.field(default_factory=dict)


class LinkMeasured(_Event, frozen=True):
    source: NodeId
    target: NodeId
    bytes_per_s: float  # Lower bound, on which decisions count.
    mean_bytes_per_s: float = 0.0  # Mean rate, which predicts; 0: not known.


class HolderUp(_Event, frozen=True):
    """The agent of a node answers and takes checkpoints. A higher epoch replaces the previous
    one.
    """

    holder: InstanceId
    node: NodeId
    epoch: int
    capacity_bytes: int
    host_to_device_bytes_per_s: float


class HolderLost(_Event, frozen=True):
    """The agent, its node or the path to it is gone; its checkpoints are considered lost."""

    holder: InstanceId
    epoch: int
    cause: str


class CheckpointsReported(_Event, frozen=True):
    """An agent has reported its checkpoints. `pages` has the number of leading full pages of each
    stream that has changed since the last report.
    """

    holder: InstanceId
    epoch: int
    reserved_bytes: int  # Bytes reserved for streams of all proxies.
    checkpoints: int
    pages: Mapping[StreamId, int]
    rows: RowsReport = NO_ROWS


class RowsCounted(_Event, frozen=True):
    """The target of a restore has counted the tokens whose rows it has loaded. The stream may have
    ended.
    """

    stream: StreamId
    attempt: int
    loaded_tokens: int


class Deadlines(msgspec.Struct, frozen=True):
    """Time limits of a stream; None: no limit. `ttft_s` holds until the first token,
    `recovery_gap_s` after it.
    """

    ttft_s: float | None = None
    recovery_gap_s: float | None = None
    end_to_end_s: float | None = None


NO_DEADLINES = Deadlines()


class Promise(StrEnum):
    """The promise in the head of a response about the tokens after a recovery."""

    NONE = "none"  # Nothing; an inexact continuation is marked.
    GREEDY = "greedy"  # The exact tokens of greedy decoding, or of a replayed output.
    SAMPLED = "sampled"  # The exact tokens of sampling with the request's seed.


class StreamArrived(_Event, frozen=True, gc=False):
    """A new request has arrived. `prompt_tokens` is a guess for a text prompt, corrected by
    prefill.
    """

    stream: StreamId
    prompt_tokens: int
    # Limit of prompt and output together; None: the model's limit.
    most_tokens: int | None = None
    deadlines: Deadlines = NO_DEADLINES
    tenant: str = ""  # Key of the tenant, among whose streams deadlines decide the order.
    name: str = ""  # The requested model, one of `Abilities.names`; empty: all serve it.
    # Instances that the endpoint picker of a gateway has named, the preferred one first.
    picked: tuple[InstanceId, ...] = ()
    promise: Promise = Promise.NONE  # Before the head only where inexact output is refused.


class Kept(msgspec.Struct, frozen=True):
    """KV of the first `pages` full pages of a stream's history at an instance or agent in the given
    epoch.
    """

    holder: InstanceId
    epoch: int
    pages: int


class StreamAdopted(_Event, frozen=True):
    """The proxy has taken over a stream of another proxy, with the history that its client has.

    `kept` lists the KV that the other proxy knew of, except at holders that are not up in that
    epoch.
    """

    stream: StreamId
    prompt_tokens: int
    produced_tokens: int
    most_tokens: int | None = None
    deadlines: Deadlines = NO_DEADLINES
    age_s: float = 0.0  # Time since the request arrived.
    kept: tuple[Kept, ...] = ()
    tenant: str = ""
    name: str = ""
    needs_replay: bool = False  # These four as in `StreamResumed`.
    only_replay: bool = False
    is_sampled: bool = False
    is_repeatable: bool = True


class PrefillDone(_Event, frozen=True, gc=False):
    """The prefill of an attempt is done: the instance has the KV of all `history_tokens`, retained
    under a lease or in its prefix cache.

    An attempt of a single call has this event with its first token, and again if the engine reports
    `reused_tokens` later.
    """

    stream: StreamId
    attempt: int
    history_tokens: int
    reused_tokens: int | None = None  # Tokens from the prefix cache; None: not reported.


class RetentionLost(_Event, frozen=True):
    """An instance or agent no longer has pages of these streams: it does not know their lease."""

    instance: InstanceId
    streams: tuple[StreamId, ...]


class WholeAsked(_Event, frozen=True):
    """The engine answers this attempt in one piece, so the time of its first token is unknown."""

    stream: StreamId
    attempt: int


class StreamResumed(_Event, frozen=True, gc=False, omit_defaults=True):
    """The first new token of this attempt has reached the client; the event is repeated when
    `needs_replay` or `only_replay` changes.
    """

    stream: StreamId
    attempt: int
    needs_replay: bool = False  # Only `Option.REPLAY` continues the stream exactly.
    promise: Promise = Promise.NONE
    # Only `Option.REPLAY` continues the stream at all: the client has a part of a thought or of a
    # call, or the output follows a grammar.
    only_replay: bool = False
    is_sampled: bool = False  # The tokens are drawn (temperature above 0).
    is_repeatable: bool = True  # An equal instance generates the same output once more.
    # Pause of a recovered stream: the time since the token before; None: no token before.
    gap_s: float | None = None


class FailureKind(StrEnum):
    """The kind of an attempt's failure."""

    BROKEN = "broken"
    # Error answer before any token; a second instance shows whether the request is the cause.
    ERROR = "error"
    SILENT = "silent"  # No first token in time; the request may be the cause, as for an error.
    BUSY = "busy"  # The instance had no room (429, 503), or accepted no connection.
    # A 4xx that may be the client's fault; a second instance shows that, unless it is final.
    REFUSED = "refused"
    DENIED = "denied"  # The instance refuses the proxy's key (401, 403); another may accept it.
    # The stream's logits overflow; if the model is the cause, they overflow at every instance.
    NOT_A_NUMBER = "not_a_number"
    # The instance generated other output than the client has, or the client's text is not that of
    # its tokens: near-ties, or a parser. No instance is at fault.
    DIFFERS = "differs"

    @property
    def is_refusal(self) -> bool:
        """True if the stream is given up after a second instance has refused it too."""
        return self in (FailureKind.REFUSED, FailureKind.DENIED)

    @property
    def is_doubtful(self) -> bool:
        """True if the same failure at a second instance shows that the request is the cause."""
        return self in (FailureKind.ERROR, FailureKind.SILENT)


class AttemptFailed(_Event, frozen=True):
    """An attempt has failed while its instance may still be up: by a reset, an end without a
    finish, an error event, silence or a refusal.

    `abrupt`: the connection ended without an error message, so that the instance may be lost and
    `InstanceLost` may follow.
    """

    stream: StreamId
    attempt: int
    instance: InstanceId
    cause: str
    produced_tokens: int
    abrupt: bool = False
    failure: FailureKind = FailureKind.BROKEN
    retry_after_s: float | None = None  # The `Retry-After` of a busy instance.
    # The refusal or error names a fault of the request: any instance would answer so.
    final: bool = False
    same_tokens: int = 0  # Known tokens that a replay generated before its output differed.


class SlotDenied(_Event, frozen=True):
    """The target's agent has denied a transfer slot to this attempt: other proxies hold the slots.
    No transfer has begun.
    """

    stream: StreamId
    attempt: int
    target: InstanceId
    wait_s: float  # The agent's estimate of the time until a slot is free.


class StreamEnded(_Event, frozen=True, gc=False, omit_defaults=True):
    """The stream is complete or has failed for good, or its client has left."""

    stream: StreamId
    attempt: int
    # The cause for which the proxy has ended the stream, with the instance of its last attempt, if
    # any. Empty: the stream is complete or was given up, or its client has left.
    cause: str = ""
    instance: InstanceId | None = None


class TimerFired(_Event, frozen=True):
    """The time of a `WakeAt` has come."""


class SettingsReloaded(_Event, frozen=True):
    """The settings have changed. Open streams keep their deadlines, and what was learned is
    kept.
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
    | TransferHung
    | LoadReported
    | LinkMeasured
    | HolderUp
    | HolderLost
    | CheckpointsReported
    | RetentionLost
    | RowsCounted
    | TimerFired
    | SettingsReloaded
)
Event = OfCluster | OfStream

# Events that are shown to operators. A stream's end is shown if the stream was being recovered, or
# was ended for a cause.
Shown = (
    InstanceUp
    | InstanceLost
    | InstanceExited
    | GpuJudged
    | DrainOrdered
    | DrainEnded
    | LoadReported
    | HolderUp
    | HolderLost
    | AttemptFailed
    | SlotDenied
)
