"""The instance protocol: messages between proxies, instances and agents beside the OpenAI API.

It keeps vLLM's P/D convention (`kv_transfer_params`) and adds one object, `kvrs`, to the request
body for kvrs's own engines.

Counts of vLLM's hand-offs over NIXL, as a server reports them.

`hand_off_format` of an instance is a kind and a value. NIXL refuses hand-offs between two values of
one kind; values of two kinds cannot be compared.

Messages of speculative decoding: an instance's counts, the notice of its reload, and the drafts
that a reloading instance makes for another one.

The helper connects to the verifying instance by WebSocket (`GET /kvrs/v1/drafts`, msgpack): it
sends a `DraftOffer`, then receives lists of `MirrorUpdate` and sends lists of `Burst`.

Faults that an instance injects into itself: body of `POST /kvrs/v1/faults`.

The route exists only where the configuration has `cluster.allow_faults: true`.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated

import msgspec

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.rows import NO_ROWS, RowsReport

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ExpertReport(msgspec.Struct, frozen=True):
    """Load of a mixture of experts on several ranks, and the copies of experts that even the load
    out.
    """

    count: _Natural  # Number of experts in each layer that has experts.
    # Number of parts of experts (a whole expert, or one of its equal divisions, of one layer) that
    # are held a second time, on a rank that does not own them.
    copies: _Natural
    # Load of the busiest rank divided by the mean load of all, from the latest choices; 1.0: not
    # known yet.
    skew: Annotated[float, msgspec.Meta(ge=1)]
    # By rank: tiles (up to 16 tokens through one unit) that the rank has computed since the start.
    tiles: list[_Natural]
    # Changes of the set of copies since the start, each to even out the load.
    rebalances: _Natural
    copied_bytes: _Natural  # Bytes of weights that ranks have received in `rebalances`.
    # Reason why no more copies are made although they would help; empty: nothing prevents copies.
    reason: str = ""


class HandOffReport(msgspec.Struct, frozen=True):
    """NIXL's counts in vLLM since its start."""

    transfers: _Natural = 0  # Reads of a whole hand-off that the server's ranks have completed.
    transferred_bytes: _Natural = 0
    failed_transfers: _Natural = 0  # Failed reads, hand-shakes and notices, added.
    # Failed notices by which decode tells prefill that it has read the blocks.
    failed_notices: _Natural = 0
    # Hand-offs whose lease at prefill ended before decode had read the blocks.
    expired: _Natural = 0
    # Notices that reached prefill after the lease had ended: decode may have read other KV.
    late_notices: _Natural = 0


_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StageInfo(msgspec.Struct, frozen=True):
    """A stage of an instance, and the process that runs its ranks."""

    stage: _Natural
    node: NodeId
    host_pid: int  # Process that runs the ranks: a stage host, or the instance itself.
    session: _Natural | None  # Number of the session at the stage host; None: there is no host.
    epoch: _Natural  # Epoch of the instance when the session was opened.
    # CPU time that the ranks have computed; each rank's starts again at 0 after 71 minutes.
    worked_s: _Seconds
    read_bytes: _Natural  # Bytes of weights read from files since the process began.
    # Instance that owns the host which runs the stage now; None: this instance.
    donor: InstanceId | None = None
    # Pages that the instance may use, if the stage is borrowed; None: all.
    pages: _Natural | None = None
    # Instance of the group whose host of the stage keeps replicas of this stage's parts of full
    # pages. None: no replicas; `unprotected` has the reason, if replicas are configured.
    replica_to: InstanceId | None = None
    unprotected: str | None = None
    replica_lag_pages: _Natural = 0  # Full pages that have no replica yet.
    # Bytes of replicas sent since the start of the instance.
    replica_sent_bytes: _Natural = 0
    replica_dropped_pages: _Natural = 0  # Pages that the holder did not accept or keep as replicas.


class StageLent(msgspec.Struct, frozen=True):
    """Pages of one of an instance's stages that another instance of the group uses."""

    to: InstanceId
    stage: _Natural
    pages: _Natural


class RestartReport(msgspec.Struct, frozen=True):
    """Report of the first token of an attempt that restarted at its instance after a stage lost
    cells.
    """

    stream: StreamId
    attempt: _Natural
    owner_epoch: _Natural
    # Pages whose lost part was a replica at the stage's new host.
    adopted_pages: _Natural
    recomputed_tokens: _Natural  # Tokens of the history that were computed again.


class GpuState(StrEnum):
    """Health of a GPU; later values are worse."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # The GPU serves, but slower than it should, or a repair is due.
    FAILING = "failing"  # The GPU is lost, or is likely to fail with the processes on it.


class GpuHealth(msgspec.Struct, frozen=True, array_like=True):
    # NVML's identifier of the board, which stays the same while indexes change as boards are lost.
    uuid: Annotated[str, msgspec.Meta(max_length=128)]
    index: Annotated[int, msgspec.Meta(ge=0)]  # Index that the board had when the agent started.
    state: GpuState
    # Cause of the state; empty if healthy.
    reason: Annotated[str, msgspec.Meta(max_length=128)]
    # Time at which `state` last changed, by the clock of the reporting node; other nodes compute
    # the age of the change from the message's age.
    since_s: float
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # Kind of the GPU; empty: not reported.


DraftId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

MAX_RELOAD_S = 60.0  # Most seconds that a reload notice may be valid.
MAX_READY_S = 1e6
MAX_REASON = 500  # Most characters of a reason in a report.
MOST_DRAFTS = 64  # Most drafts of one stream beyond its verified tokens.
MAX_MESSAGE_BYTES = 1 << 24
# Number of tokens at which a list of updates ends and the next one begins.
_MESSAGE_TOKENS = 1 << 18
# Seconds between pings of both sides; a peer that does not answer within half of it is dropped.
HEARTBEAT_S = 5.0


class ReloadState(StrEnum):
    """State of a reloading instance (LUMEN, section 4.4)."""

    LOADING = "loading"  # The model is loading; the instance makes no drafts.
    LOADING_DRAFT = "loading_draft"
    ASSIST = "assist"  # The instance makes drafts, or offers them to others.
    HOTSWAP = "hotswap"  # The model is loaded; the instance is about to serve.


class Reload(msgspec.Struct, frozen=True):
    """State of a reloading instance, as it reports it."""

    state: ReloadState = ReloadState.LOADING
    # The instance that gets its drafts; None: no other instance does.
    paired_with: InstanceId | None = None
    # Predicted seconds until the instance serves; None: not known.
    ready_in_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_READY_S)] | None = None
    # Reason why the instance makes no drafts; empty: it makes some, or has not decided.
    skipped: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class SpeculationReport(msgspec.Struct, frozen=True):
    """Counts of drafts since the start of an instance."""

    source: str
    active: bool = False  # True while drafts are made.
    steps: _Natural = 0  # Steps that verified drafts; a step of n streams counts n times.
    proposed: _Natural = 0
    accepted: _Natural = 0
    # Received drafts that were not proposed, because the stream had continued otherwise.
    stale: _Natural = 0
    helper: InstanceId | None = None  # Instance that makes the drafts; None: no other instance.
    skipped: str = ""  # Reason why this instance, at its start, made no drafts for others.
    reloads: dict[InstanceId, Reload] = {}  # Reloads that other instances have announced.

    @property
    def wants_helper(self) -> bool:
        """True if the instance verifies drafts that another instance makes."""
        return self.source == "draft"


class ReloadNotice(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/reload`: an instance reloads and serves nothing for `ready_in_s`, or
    until its next notice.
    """

    instance: InstanceId
    for_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_RELOAD_S)]
    reload: Reload = Reload()


class DraftOffer(msgspec.Struct, frozen=True):
    """An instance's offer of drafts. The verifier closes the connection, with the reason, if the
    vocabularies differ or another instance already makes its drafts.
    """

    instance: InstanceId
    vocabulary: str  # Digest of the tokenizer, and of its number of ids.


class DraftChoice(msgspec.Struct, frozen=True):
    """Sampling parameters of a stream, which the draft model uses too, because its drafts are then
    right more often.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int


class MirrorUpdate(msgspec.Struct, frozen=True):
    """News of a stream for the helper: the begin of the stream (`choice` is given), further tokens,
    or the end (neither).
    """

    number: _Natural
    token_ids: list[DraftId] = []
    choice: DraftChoice | None = None


def in_messages(updates: Iterable[MirrorUpdate]) -> Iterator[list[MirrorUpdate]]:
    """Split the updates, in order, into lists that each fit into a message: a new helper gets all
    tokens of all streams at once.
    """
    message: list[MirrorUpdate] = []
    tokens = 0
    for update in updates:
        message.append(update)
        tokens += len(update.token_ids)
        if tokens >= _MESSAGE_TOKENS:
            yield message
            message, tokens = [], 0
    if message:
        yield message


class Burst(msgspec.Struct, frozen=True):
    """Drafts for a stream, from `position` of its tokens on. `begins_anew`: earlier drafts are
    wrong.
    """

    number: _Natural
    position: _Natural
    token_ids: Annotated[list[DraftId], msgspec.Meta(max_length=MOST_DRAFTS)]
    begins_anew: bool = False


# Number of epochs kept for one start of a process: an instance's epoch rises within a start with
# every fence, and with every restart of a stage.
EPOCHS_PER_START = 1 << 20
# Key in `vllm_xargs`, or in SGLang's `custom_params`, of the ids that the output begins with
# (`kvrs/vllm/replay.py`, `kvrs/sglang/replay.py`).
REPLAY_KEY = "kvrs_replay"
# Largest number in a page frame or a message: msgspec compares no larger one.
_MOST = (1 << 63) - 1

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
AttemptNumber = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Factor = Annotated[float, msgspec.Meta(gt=0)]


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Capability(StrEnum):
    """An ability of an engine beyond vLLM's P/D convention.

    The policy considers no option that needs an absent ability. An engine works with a proxy that
    does not use the ability.
    """

    PULL_PAGES = "pull_pages"  # Pulls the pages of `kvrs.sources` itself.
    RETAIN = "retain"  # Keeps the pages of a prompt after prefill until a lease ends.
    FENCE = "fence"  # Refuses attempts with lower numbers; has /kvrs/v1/fence.
    SPLIT = "split"  # Computes the front of a history while the back of it is fetched.
    CHECKPOINT = "checkpoint"  # Sends newly filled pages to the agents of `kvrs.checkpoints`.
    # Computes only the new part of a history whose beginning it has computed before.
    PREFIX_CACHE = "prefix_cache"
    # Continues text, stop strings, usage and sampling behind `kvrs.prompt_tokens`.
    EXACT_RESUME = "exact_resume"
    REPLAY = "replay"  # Generates the tokens of `REPLAY_KEY` again before new tokens.
    # Computes histories of recoveries before new prompts, four tokens to one.
    FAIR_QUEUE = "fair_queue"

    @classmethod
    def _missing_(cls, value: object) -> "Capability | None":
        """Accept the name of another version's capability; it equals no known capability."""
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


class MeasuredPrefill(msgspec.Struct, frozen=True):
    """Prefill time on a uniform grid: `seconds[i]` is the time of `i * step_tokens` tokens,
    `seconds[0]` the overhead of a step.
    """

    label: str
    step_tokens: Annotated[int, msgspec.Meta(ge=1)]
    seconds: list[Seconds]
    covered_tokens: Natural | None = None  # Longest measured length; None: all are measured.
    is_guess: bool = False  # True: not measured, but estimated from the model's size.
    engine_step_s: Seconds = 0.0  # Engine's part of a step, beside the model; 0: not measured.


class RankInfo(msgspec.Struct, frozen=True):
    """One of the processes that share an instance's model."""

    rank: Natural
    stage: Natural
    pid: int
    node: NodeId
    units: Natural  # Number of units that the rank computes, over all layers.
    heads: list[int]  # KV heads of which the rank has cells, in any layer of its stage.
    gpus: list[str] = []  # NVML uuids of the boards it computes on; empty on CPUs.
    borrowed_from: InstanceId | None = None  # Instance that owns the rank's host; None: this one.


class LayoutInfo(msgspec.Struct, frozen=True):
    """Division of an instance among its ranks."""

    number: Natural  # Number of the layout, higher after every change.
    stages: list[tuple[int, int]]  # The layers [first, end) of each stage.
    # The instance goes on without a lost rank; otherwise the instance ends.
    re_forms: bool = True


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter; requests name it in place of the model."""

    name: str
    root: str = ""  # Path of the adapter's weights.

    @property
    def key(self) -> str:
        """Key that tells adapters apart: name and path, as two paths may have one name."""
        return f"{self.name} ({self.root})"


class ModelNames(msgspec.Struct, frozen=True):
    """Names that an instance serves beside its model's name."""

    aliases: tuple[str, ...] = ()  # Other names under which the model's own weights are served.
    adapters: tuple[Adapter, ...] = ()


NO_OTHER_NAMES = ModelNames()


class InstanceInfo(msgspec.Struct, frozen=True):
    """Answer of `GET /kvrs/v1/instance`."""

    id: InstanceId
    node: NodeId
    role: Role
    epoch: Natural  # Rises with every start of the process and with every fence.
    pid: int
    model: str
    # Hash of weights and KV geometry: pages move only between instances with equal fingerprints.
    fingerprint: str
    geometry: KvGeometry
    # Limit of prompt and output together; a chat without max_tokens may fill it.
    max_model_len: Natural
    page_port: int
    capabilities: list[Capability]
    prefill: MeasuredPrefill
    # The prefill instance of the same server, if any. A decode call without a hand-off computes the
    # history there, so prefill and decode are one call.
    own_prefill: InstanceId | None = None
    # The decode instance computes prompts within the decode call while no prefill instance is up.
    computes_prompts: bool = False
    # Each decode call waits for the KV of a prefill call that goes out with it, and computes none.
    joins_prefill: bool = False
    # Chat streams have no token ids before their end, so a chat without tools is sent as a
    # completion of the ids of its messages.
    chats_by_ids: bool = False
    worker_pids: list[int] = []  # Processes that compute, if `pid` does not.
    ranks: list[RankInfo] = []  # One per rank; empty: one process computes everything.
    layout: LayoutInfo | None = None  # None: there are no ranks.
    # NVML uuids of the boards it runs on; None: unknown, so it may use any board of its node.
    gpus: list[str] | None = None
    # By stream: leading full pages that the process before has left in memory, which this process
    # has taken over and leases like the pages of a hand-off.
    kept: dict[StreamId, Natural] = {}
    names: ModelNames = NO_OTHER_NAMES
    hand_off_format: str = ""  # vLLM's format (`kvrs/protocol/instance.py`); empty: not reported.
    # Of a stock engine: path or name of the model that it has loaded, and its version.
    root: str = ""
    engine: str = ""
    step_tokens: Natural = 0  # Most tokens that the engine computes in one step; 0: not reported.

    @property
    def name_keys(self) -> tuple[str, ...]:
        """Return the keys of all models and adapters that the instance serves, and the bare names
        of its adapters for streams that arrived before any instance was up.
        """
        adapters = self.names.adapters
        keys = (key for adapter in adapters for key in (adapter.name, adapter.key))
        return (self.model, *self.names.aliases, *keys)


def assumed_instance(
    name: InstanceId,
    node: NodeId,
    role: Role,
    geometry: KvGeometry,
    capabilities: Iterable[Capability] = tuple(Capability),
    epoch: int = 1,
) -> InstanceInfo:
    """Make an instance for calculations, with default values for all that a process would report;
    the caller provides its prefill times.
    """
    prefill = MeasuredPrefill("", 1, [])
    return InstanceInfo(
        name, node, role, epoch, 0, "", "", geometry, 0, 0, [*capabilities], prefill
    )


# Source node of the link for loads from a KV store that engines share by themselves.
STORE = NodeId(":store")
# Source node of the link on which instances copy pages out of the memory of their node's agent.
MEMORY = NodeId(":memory")
PREFIX = "prefix"  # Key in `LoadReport.kv_bytes` of KV loaded for the beginning of a new prompt.


class LinkReport(msgspec.Struct, frozen=True):
    """Bandwidth of the link from a node, measured on pages that the instance pulled from it."""

    source: NodeId
    bytes_per_s: float
    # Mean absolute deviation of the samples, in bytes per second.
    spread: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    age_s: Seconds = 0.0  # Time since the latest sample was measured.


class ReformingReport(msgspec.Struct, frozen=True):
    """An instance that has lost ranks, and will go on without them or with new ones. Its streams
    continue in the same attempt unless they are moved before.
    """

    number: Natural  # Rises with each re-forming of the instance.
    way: str  # Way in which the instance goes on: a value of `kvrs_engine.elastic.ways.Way`.
    ready_in_s: Seconds  # Predicted time from this report until it serves again.
    degree: Natural  # Number of ranks that will compute after the re-forming.
    lost: list[Natural]  # Numbers of the lost ranks.
    move_bytes: Natural  # Bytes of weights and KV that will move between processes.
    # By stream: pages with lost cells, to be restored or computed once the instance is ready.
    missing_pages: dict[StreamId, Natural] = {}
    page_s: Seconds = 0.0  # Predicted time to compute one missing page.
    # Predicted step time of the new layout, relative to the layout with all ranks.
    decode_factor: Factor = 1.0
    prefill_factor: Factor = 1.0
    # By stream: pages with lost cells that agents hold, so only these cells are fetched; and the
    # predicted time to fetch the cells of one such page.
    held_pages: dict[StreamId, Natural] = {}
    held_page_s: Seconds = 0.0


class FetchReport(msgspec.Struct, frozen=True):
    """The end of a fetch of the pages that the `sources` of an attempt name."""

    stream: StreamId
    attempt: Natural
    owner_epoch: Natural
    # Tokens of the history that were fetched, verified and used; `computed_tokens`: neither fetched
    # nor in the instance's cache.
    loaded_tokens: Natural
    computed_tokens: Natural


class WatchQuestion(StrEnum):
    """Questions that a proxy asks a stock engine as it watches it: paths, and what they do not say
    (`kvrs/core/model/reports.py`).
    """

    HEALTH = "/health"
    METRICS = "/metrics"
    MODELS = "/v1/models"
    ENGINES = "/fault_tolerance/status"
    LOADS = "/v1/loads"
    READY = "/ready"
    PROCESS = "process"  # Is the process still the one that was identified?


class Fails(StrEnum):
    """Kinds of failed questions."""

    ERROR = "error"  # A status of 500 or above.
    LATE = "late"  # No answer in time.
    LOST = "lost"  # The connection was refused, or ended without an answer.
    OTHER = "other"  # The answer of another server, or one that cannot be read.


class FailedQuestion(msgspec.Struct, frozen=True):
    by: Fails
    cause: str


class LoadReport(msgspec.Struct, frozen=True):
    """Answer of `GET /kvrs/v1/load`, and each line of `GET /kvrs/v1/load?watch=SECONDS`
    (newline-delimited JSON).
    """

    epoch: Natural
    queued: Natural
    running: Natural
    free_pages: Natural
    queue_delay_s: Seconds  # Predicted time until a request that arrives now starts its prefill.
    links: list[LinkReport]
    # Requests in `queued` that own no pages yet, by kind; engines with one queue report 0.
    queued_reuse: Natural = 0  # Recoveries that will first try to fetch KV.
    queued_recompute: Natural = 0  # Recoveries that compute all their history.
    queued_new: Natural = 0
    # Full pages of streams with checkpoints that the agents do not have yet.
    checkpoint_lag_pages: Natural = 0
    # Pages that were fetched since the start, but were damaged, so that they were computed.
    damaged_pages: Natural = 0
    # Pages that were fetched from instances and agents since the start and used; None: not counted.
    fetched_pages: Natural | None = None
    fetches: list[FetchReport] = []  # Fetches that ended within the last few seconds.
    restarts: list[RestartReport] = []  # First tokens after restarts, of the last few seconds.
    adopted_pages: Natural = 0  # Pages that restarted attempts took from replicas, since the start.
    # KV bytes from elsewhere since the start (of vLLM, since the first contact): fetched for a
    # `handoff` or a `recovery`, or for a new prompt that begins with them (`prefix`); and sent as a
    # `checkpoint`.
    kv_bytes: dict[str, Natural] = {}
    draining: bool = False  # The instance will end once no stream runs and no lease holds a page.
    # The re-forming in progress; None: none. Pushed when it begins, is predicted anew, and ends.
    reforming: ReformingReport | None = None
    layout_number: Natural = 0  # Number of the ranks' layout, higher after every change.
    degree: Natural = 0  # Ranks that compute, or will next; 0: one process computes everything.
    full_degree: Natural = 0  # Number of ranks in the configuration.
    # Step time of the present layout, relative to the full layout; None: estimate by `degree`.
    decode_factor: Factor | None = None
    prefill_factor: Factor | None = None
    rank_deaths: Natural = 0  # Ranks lost since the start while the instance went on.
    stages: list[StageInfo] = []  # One per stage; empty: one process computes everything.
    lends: list[StageLent] = []
    batches_in_flight: Natural | None = None  # Batches being computed now; None: not reported.
    # By stream of another instance: leading full pages held here as replicas, if the number changed
    # in the last seconds; pages of all replicas; pages of replicas dropped since the start.
    replicas: dict[StreamId, Natural] = {}
    replica_pages: Natural = 0
    replica_dropped_pages: Natural = 0
    names: ModelNames | None = None  # New names served, as in `InstanceInfo`; None: unchanged.
    hand_offs: HandOffReport | None = None  # Counts of vLLM's NixlConnector; None: it has none.
    speculation: SpeculationReport | None = None  # None: the instance takes no drafts.
    experts: ExpertReport | None = None  # None: a model without experts, or a single process.
    # Kind of the store that it loads KV from on its own (LMCache, Mooncake); empty: none seen.
    store: str = ""
    # Rises with each computed token or step, so that a stall shows; 0: not counted.
    progress: float = 0.0
    total_pages: Natural = 0  # KV pages that the engine has; 0: not reported.
    # Questions of the watch that a stock engine fails now; engines of kvrs are not asked.
    failing: dict[WatchQuestion, FailedQuestion] = {}
    # Time of a recent step without prompts; 0: not reported.
    step_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    # Time of recent steps with prompts over that of the declared prefill table, with the present
    # ranks; None: not reported.
    slowness: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """A line of `GET /kvrs/v1/heartbeat?watch=SECONDS` of an instance or agent. A thread writes
    them: while the event loop stalls, load reports and tokens stop, but heartbeats go on.
    """

    loop_age_s: Seconds  # Time since the event loop last ran.


class KvTransferParams(msgspec.Struct, omit_defaults=False):
    """vLLM's hand-off parameters. A proxy forwards what prefill returned to decode, unchanged."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[str] | None = None  # Tags of the full pages, in hexadecimal.
    remote_host: str | None = None  # Unused: the instance knows the addresses of its peers.
    remote_port: int | None = None
    remote_request_id: str | None = None  # Id of the hand-off, needed for its partial page.


class SourceRange(msgspec.Struct, frozen=True):
    """Pages `[first_page, first_page + pages)` of the history. Instance `id` holds them if it is
    still in epoch `generation`.
    """

    id: InstanceId
    first_page: Natural
    pages: Natural
    generation: Natural  # Epoch of the holder in which the pages were made.
    # Time limit, after which missing pages are computed; null: as long as the holder sends. With a
    # limit the history is a new prompt, whose pages belong to other streams.
    within_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class CheckpointTarget(msgspec.Struct, frozen=True):
    """Receiver of a stream's pages as they fill: an agent with room reserved for the whole stream,
    or, with `backup.mode: peer`, an instance without a reservation.
    """

    agent: InstanceId
    reserved_bytes: Natural


class KvrsParams(msgspec.Struct):
    """The `kvrs` object of a request: the stream and its attempt, and the places of the history's
    KV.
    """

    stream: StreamId
    attempt: AttemptNumber
    # Tokens of the history that the client wrote; the others were already sent to the client.
    prompt_tokens: Natural
    owner_epoch: Natural = 0
    # Sources in the order of their pages. Pages that no source names are computed; those before the
    # first source while it is fetched.
    sources: list[SourceRange] = []
    checkpoints: list[CheckpointTarget] = []
    # The whole history of a chat, whose template the first attempt rendered.
    token_ids: list[int] | None = None
    # Number of the slot that allows to fetch `sources`; the target's agent may end it. 0: only the
    # proxy counts the fetch.
    slot_token: Natural = 0
    # Tokens of a self-test that may follow the history, right or wrong. An engine that verifies
    # drafts proposes these before the drafts of its own source; others ignore them.
    drafts: Annotated[list[DraftId], msgspec.Meta(max_length=MOST_DRAFTS)] = []


class LeaseUpdate(msgspec.Struct):
    """Body of `POST /kvrs/v1/leases`: one batched message per proxy and instance."""

    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    renew: list[StreamId] = []
    release: list[StreamId] = []


class LeaseAnswer(msgspec.Struct):
    """Answer to a `LeaseUpdate`: streams of its `renew` whose pages are no longer kept."""

    unknown: list[StreamId]


class FenceRequest(msgspec.Struct):
    """Body of `POST /kvrs/v1/fence`: drop every attempt below the named attempt of each named
    stream.

    With `slots_only`, sent by an agent whose slots have ended, only attempts that still fetch under
    a slot are dropped, and the instance keeps its epoch.
    """

    attempts: dict[StreamId, AttemptNumber]
    owner_epochs: dict[StreamId, Natural] = {}  # Owner epochs; a missing stream has 0.
    slots_only: bool = False

    def numbers(self) -> dict[StreamId, tuple[int, int]]:
        """Return the (owner_epoch, attempt) below which each stream's attempts are dropped."""
        return {
            stream: (self.owner_epochs.get(stream, 0), attempt)
            for stream, attempt in self.attempts.items()
        }


class RankRequest(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/ranks`: a rank is to leave while its memory is still readable, or to
    return.
    """

    rank: Natural
    leaves: bool
    epoch: Natural  # Epoch of the instance; another process of the instance refuses.


class RankAnswer(msgspec.Struct, frozen=True):
    refused: str | None = None  # Cause of a refusal of the order; None: it was carried out.


class ExitReport(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/exits/{id}` at a proxy's admin port: a supervisor reports how the
    process of an instance ended.
    """

    start: Natural  # Number of the start: its epochs begin at `start * EPOCHS_PER_START`.
    cause: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    # True: ended from outside, so no request is to blame.
    is_external: bool


# Messages of a node's agent, which leases checkpoints like an instance, and grants slots: each
# allows one recovery to transfer KV to one of the node's instances.


class SlotRequest(msgspec.Struct, frozen=True):
    """The attempt of a stream at `target` for which a slot is requested, renewed or released."""

    target: InstanceId
    stream: StreamId
    attempt: AttemptNumber
    owner_epoch: Natural = 0


class SlotUpdate(msgspec.Struct):
    """Body of `POST /kvrs/v1/slots`: one batched message per proxy and agent. The agent carries out
    the fields in order.
    """

    owner: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]  # Id of one run of a proxy.
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    release: list[SlotRequest] = []
    renew: list[SlotRequest] = []
    acquire: list[SlotRequest] = []


class Slot(msgspec.Struct, frozen=True):
    """A granted slot, or a denial."""

    token: Natural  # Number of the slot, higher than all granted before; 0: denied.
    wait_s: Seconds = 0.0  # Time after which to ask again for a denied slot.


class SlotAnswer(msgspec.Struct):
    acquired: list[Slot]  # Slots in the order of `acquire`.
    lost: list[StreamId] = []  # Streams of `renew` whose slots have ended.


class SlotCounts(msgspec.Struct, frozen=True):
    """Counts of the slots of one target instance."""

    held: Natural
    waiting: Natural  # Denied requests that will probably be repeated.
    most: Natural  # Most slots held at any one time.
    granted: Natural  # Slots granted since the agent's start.
    denied: Natural
    expired: Natural


class AgentInfo(msgspec.Struct, frozen=True):
    """Answer of `GET /kvrs/v1/agent`."""

    id: InstanceId
    node: NodeId
    # Higher after each start that finds files of the run before; a clean end leaves no files.
    epoch: Natural
    pid: int
    page_port: int
    capacity_bytes: Natural
    host_to_device_bytes_per_s: float


class AgentReport(msgspec.Struct, frozen=True):
    """Answer of `GET /kvrs/v1/holdings`, and each line of its `?watch=SECONDS`."""

    epoch: Natural
    reserved_bytes: Natural
    held_bytes: Natural  # Bytes of the pages held now, with a reservation or without.
    checkpoints: Natural  # Number of streams with a reservation.
    # Leading full pages held per stream; on later lines of a watch only of the changed ones.
    pages: dict[StreamId, Natural]
    denied: list[StreamId] = []  # Streams refused for lack of room since the last line.
    slots: dict[InstanceId, SlotCounts] = {}  # By target: counts of slots, over all proxies.
    rows: RowsReport = NO_ROWS


class LinkFault(msgspec.Struct, frozen=True, tag="link"):
    """A limit on the bandwidth of sends to `node`, for `for_s` seconds; rate 0 cuts the link."""

    node: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    for_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.node)


class PageFault(msgspec.Struct, frozen=True, tag="pages"):
    """A bit flip in each of the next `pages` pages that this instance sends, made after the page's
    checksum was computed.
    """

    pages: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class DeviceFault(msgspec.Struct, frozen=True, tag="device"):
    """The kill of the process of one rank, with its KV memory. `rank` None: the instance has only
    one process, which is killed.
    """

    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None


class NoFault(msgspec.Struct, frozen=True, tag="none"):
    """The end of every fault of this instance."""


FaultRequest = LinkFault | PageFault | DeviceFault | NoFault
