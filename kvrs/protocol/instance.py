"""The instance protocol: messages between proxies, instances and agents beside the OpenAI API.

The vLLM P/D convention (`kv_transfer_params`) is kept as it is; engines of ours take one more
object, `kvrs`, in the same request body.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.experts import ExpertReport
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.hand_offs import HandOffReport
from kvrs.protocol.rows import NO_ROWS, RowsReport
from kvrs.protocol.speculation import MOST_DRAFTS, DraftId, SpeculationReport
from kvrs.protocol.stages import RestartReport, StageInfo, StageLent

# Within one start of the process an instance's epoch rises with every fence, and where a stage can
# be restarted with every restart.
EPOCHS_PER_START = 1 << 20
# In `vllm_xargs`, or SGLang's `custom_params`: the ids with which the output is to begin
# (`kvrs/vllm/replay.py`, `kvrs/sglang/replay.py`).
REPLAY_KEY = "kvrs_replay"
_MOST = (1 << 63) - 1  # What page frames can carry, and msgspec can compare.

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
    """An ability of an engine beyond the plain vLLM P/D convention; the policy considers no option
    that needs more. Each is an offer: an engine works with a proxy that does not use it.
    """

    PULL_PAGES = "pull_pages"  # Takes `kvrs.sources` and pulls those pages itself.
    RETAIN = "retain"  # Keeps a prompt's pages under a lease after hand-off.
    FENCE = "fence"  # Refuses lower attempts and has /kvrs/v1/fence.
    SPLIT = "split"  # Computes the front of a history while the back of it is fetched.
    CHECKPOINT = "checkpoint"  # Sends newly filled pages to the agents of `kvrs.checkpoints`.
    # Computes only the new part of a history whose beginning it has computed before.
    PREFIX_CACHE = "prefix_cache"
    # Text, stop strings, usage and sampling continue from `kvrs.prompt_tokens`.
    EXACT_RESUME = "exact_resume"
    REPLAY = "replay"  # Generates the tokens of `REPLAY_KEY` again before new ones.

    @classmethod
    def _missing_(cls, value: object) -> "Capability | None":
        """A capability of another version keeps its name, and is no other's."""
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


class MeasuredPrefill(msgspec.Struct, frozen=True):
    """Prefill time on a uniform grid: `seconds[i]` is the time of `i * step_tokens` tokens,
    `seconds[0]` a step's overhead.
    """

    label: str
    step_tokens: Annotated[int, msgspec.Meta(ge=1)]
    seconds: list[Seconds]
    covered_tokens: Natural | None = None  # Values above it are extrapolated; None: none is.
    is_guess: bool = False  # Of an engine that measures nothing, by the size of its model.


class RankInfo(msgspec.Struct, frozen=True):
    """One of the processes among which an instance divides a model."""

    rank: Natural
    stage: Natural
    pid: int
    node: NodeId
    units: Natural  # That it computes, of all layers and kinds.
    heads: list[int]  # KV heads of which it has cells, in any layer of its stage.
    gpus: list[str] = []  # The boards it computes on, by NVML's uuid; none on processors.
    borrowed_from: InstanceId | None = None  # Whose host it is in; None: its own, or in no host.


class LayoutInfo(msgspec.Struct, frozen=True):
    """How an instance is divided among its ranks."""

    number: Natural  # Rises with every change.
    stages: list[tuple[int, int]]  # The layers [first, end) of each.
    # The others go on without a rank that is lost; otherwise the instance ends.
    re_forms: bool = True


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter, which is asked for by its name in place of the model's."""

    name: str
    root: str = ""  # Where its weights lie.

    @property
    def key(self) -> str:
        """Equal names of adapters from different places are different adapters."""
        return f"{self.name} ({self.root})"


class ModelNames(msgspec.Struct, frozen=True):
    """Names that an instance serves beside its model's own."""

    aliases: tuple[str, ...] = ()  # Of the same weights.
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
    fingerprint: str  # Of weights and geometry: pages move only between equal fingerprints.
    geometry: KvGeometry
    # Prompt and output together; a chat that names no max_tokens may fill it.
    max_model_len: Natural
    page_port: int
    capabilities: list[Capability]
    prefill: MeasuredPrefill
    # The prefill instance of the same server, where there is one: a decode call without a hand-off
    # has the history computed there, so prefill and decode are one call.
    own_prefill: InstanceId | None = None
    # A decode instance computes prompts within the decode call, where no prefill instance is up.
    computes_prompts: bool = False
    # Each decode call goes out together with a prefill call, whose KV it waits for: the instance
    # computes no prompt itself.
    joins_prefill: bool = False
    # Its streams of chats have no token ids before their end: one without tools goes there as a
    # completion, whose prompt are the ids of its messages.
    chats_by_ids: bool = False
    worker_pids: list[int] = []  # Where the work is done in other processes than `pid`.
    ranks: list[RankInfo] = []  # None where one process computes everything.
    layout: LayoutInfo | None = None  # Of the ranks.
    # The boards it runs on, by NVML's uuid; None: not known, so it may be any of its node.
    gpus: list[str] | None = None
    # Leading full pages of streams that ran in the process before, whose memory it has taken over;
    # they are leased as those of a hand-off.
    kept: dict[StreamId, Natural] = {}
    names: ModelNames = NO_OTHER_NAMES
    hand_off_format: str = ""  # Of vLLM (`kvrs/protocol/hand_offs.py`); empty: not told.

    @property
    def name_keys(self) -> tuple[str, ...]:
        """Keys of everything that it serves, and the names of its adapters for streams that came
        when no instance had come up.
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
    """An instance for a calculation, of which no process says the rest; its prefill table is to be
    given beside it.
    """
    prefill = MeasuredPrefill("", 1, [])
    return InstanceInfo(
        name, node, role, epoch, 0, "", "", geometry, 0, 0, [*capabilities], prefill
    )


# A store of KV that engines share by themselves, as a place that they load from.
STORE = NodeId(":store")
# The source of the link on which instances of a node copy pages out of the memory of its agent.
MEMORY = NodeId(":memory")
PREFIX = "prefix"  # Of `LoadReport.kv_bytes`, beside the classes of traffic.


class LinkReport(msgspec.Struct, frozen=True):
    """Bandwidth of the link from a node, measured on pages that the instance pulled from it."""

    source: NodeId
    bytes_per_s: float
    # Mean deviation of the samples, in bytes per second.
    spread: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    age_s: Seconds = 0.0  # Of the last sample.


class ReformingReport(msgspec.Struct, frozen=True):
    """An instance of several ranks that has lost some, and is about to go on without them or with
    new ones. Its streams go on in the same attempt, unless they leave before.
    """

    number: Natural  # Of this re-forming; rises.
    way: str  # One of `kvrs_engine.elastic.ways.base.Way`.
    ready_in_s: Seconds  # Predicted, from this report on.
    degree: Natural  # Ranks that will compute then.
    lost: list[Natural]  # Ranks.
    move_bytes: Natural  # Of the plan.
    # Pages of each stream of which cells are lost, to be restored or computed once it is ready.
    missing_pages: dict[StreamId, Natural] = {}
    page_s: Seconds = 0.0  # Predicted per such page that is computed.
    # Step times of the layout that will serve then, over those of the full one.
    decode_factor: Factor = 1.0
    prefill_factor: Factor = 1.0
    # Pages with lost cells that agents hold: only these cells are fetched. The time is that per
    # such page.
    held_pages: dict[StreamId, Natural] = {}
    held_page_s: Seconds = 0.0


class FetchReport(msgspec.Struct, frozen=True):
    """The end of a fetch of the pages that the `sources` of an attempt name."""

    stream: StreamId
    attempt: Natural
    owner_epoch: Natural
    # Of the history, in tokens: fetched, verified and used; and neither that nor in the own cache.
    loaded_tokens: Natural
    computed_tokens: Natural


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
    # Requests in `queued` that own no pages yet, by kind: engines with one queue leave it at 0.
    queued_reuse: Natural = 0  # Recoveries that will try to fetch KV of their history.
    queued_recompute: Natural = 0  # Recoveries that compute it.
    queued_new: Natural = 0
    # Full pages of protected streams that their holders do not have yet.
    checkpoint_lag_pages: Natural = 0
    # Fetched since the start and found damaged; they were computed instead.
    damaged_pages: Natural = 0
    # Fetched from other instances and agents since the start, and used; None: it does not count.
    fetched_pages: Natural | None = None
    fetches: list[FetchReport] = []  # That have ended within the last seconds.
    restarts: list[RestartReport] = []  # The same.
    adopted_pages: Natural = 0  # Of all restarts since the start.
    # KV from elsewhere since the start (of vLLM, since it was met), in bytes: fetched for a
    # `handoff` or a `recovery`, or for a new prompt that begins with it (`prefix`); and sent as a
    # `checkpoint`.
    kv_bytes: dict[str, Natural] = {}
    draining: bool = False  # It ends as soon as none of its streams and pages is needed any more.
    # While it re-forms: pushed at once when that begins, is predicted otherwise, and ends.
    reforming: ReformingReport | None = None
    layout_number: Natural = 0  # Of its ranks; rises with every change.
    degree: Natural = 0  # Ranks that compute, or will next; 0: one process computes everything.
    full_degree: Natural = 0  # Ranks that it was configured with.
    # Step times of the layout that serves over those of the full one; None: by the number of ranks.
    decode_factor: Factor | None = None
    prefill_factor: Factor | None = None
    rank_deaths: Natural = 0  # Since the start, of ranks that it has lost and goes on without.
    stages: list[StageInfo] = []  # None where one process computes everything.
    lends: list[StageLent] = []
    batches_in_flight: Natural | None = None  # That it computes now; None: it does not tell.
    # Leading full pages of other instances' streams that it keeps as replicas, where their number
    # has changed within the last seconds; how many pages all have, and how many were given up.
    replicas: dict[StreamId, Natural] = {}
    replica_pages: Natural = 0
    replica_dropped_pages: Natural = 0
    names: ModelNames | None = None  # As of `InstanceInfo`, where they change; None: as they were.
    hand_offs: HandOffReport | None = None  # Of vLLM's NIXL; None: it has none.
    speculation: SpeculationReport | None = None  # None: it has no source of drafts.
    experts: ExpertReport | None = None  # None: it has none, or is one process.
    # Kind of the store that it loads KV from by itself (LMCache, Mooncake); empty: none is seen.
    store: str = ""
    progress: float = 0.0  # Counts what it computes, in tokens or steps; 0: not counted.


class Heartbeat(msgspec.Struct, frozen=True):
    """Each line of `GET /kvrs/v1/heartbeat?watch=SECONDS` of an instance or agent, written by a
    thread: while the event loop stalls, load reports and tokens stop, and heartbeats go on.
    """

    loop_age_s: Seconds  # Since the event loop last ran.


class KvTransferParams(msgspec.Struct, omit_defaults=False):
    """vLLM's hand-off parameters. A proxy forwards what prefill returned to decode, unchanged."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[str] | None = None  # Tags of the full pages, in hexadecimal.
    remote_host: str | None = None  # For the convention: peers are in the instance's registry.
    remote_port: int | None = None
    remote_request_id: str | None = None  # Names the retained hand-off, for its partial last page.


class SourceRange(msgspec.Struct, frozen=True):
    """Pages `[first_page, first_page + pages)` of the history, held by instance `id` if it is still
    in epoch `generation`.
    """

    id: InstanceId
    first_page: Natural
    pages: Natural
    generation: Natural  # The holder's epoch when the pages were made.
    # What has not come by then is computed; null: as long as its holder sends. With a time the
    # history is a new prompt, whose pages are of other streams.
    within_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class CheckpointTarget(msgspec.Struct, frozen=True):
    """An agent that gets the newly filled pages of the stream, with room reserved for the whole
    stream; with `backup.mode` peer an instance, which reserves none.
    """

    agent: InstanceId
    reserved_bytes: Natural


class KvrsParams(msgspec.Struct):
    """The `kvrs` object of a request: stream, attempt, and where the KV of its history lies."""

    stream: StreamId
    attempt: AttemptNumber
    # How many tokens of the history the client wrote; the rest was already sent to it.
    prompt_tokens: Natural
    owner_epoch: Natural = 0
    # In the order of their pages. What they leave out is computed; what lies before the first one,
    # while that is fetched.
    sources: list[SourceRange] = []
    checkpoints: list[CheckpointTarget] = []
    # The whole history of a chat: its template was rendered at the first attempt.
    token_ids: list[int] | None = None
    # The slot under which `sources` are fetched, which the target's agent may end; 0: counted by
    # the proxy only.
    slot_token: Natural = 0
    # Tokens that may follow the history, right or wrong: of a self-test. An engine that verifies
    # drafts proposes them before those of its own source; others ignore them.
    drafts: Annotated[list[DraftId], msgspec.Meta(max_length=MOST_DRAFTS)] = []


class LeaseUpdate(msgspec.Struct):
    """Body of `POST /kvrs/v1/leases`: one batched message per proxy and instance."""

    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    renew: list[StreamId] = []
    release: list[StreamId] = []


class LeaseAnswer(msgspec.Struct):
    """Streams of `renew` whose pages are no longer retained."""

    unknown: list[StreamId]


class FenceRequest(msgspec.Struct):
    """Body of `POST /kvrs/v1/fence`: every attempt below the one named is dropped; streams not
    named are left alone.

    With `slots_only`, from an agent whose slots have ended, only attempts that still fetch under a
    slot are dropped, and the instance keeps its epoch.
    """

    attempts: dict[StreamId, AttemptNumber]
    owner_epochs: dict[StreamId, Natural] = {}  # Of those attempts; not named: 0.
    slots_only: bool = False

    def numbers(self) -> dict[StreamId, tuple[int, int]]:
        """(owner_epoch, attempt) by stream."""
        return {
            stream: (self.owner_epochs.get(stream, 0), attempt)
            for stream, attempt in self.attempts.items()
        }


class RankRequest(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/ranks`: a rank leaves on purpose, while it can still be read, or comes
    back.
    """

    rank: Natural
    leaves: bool
    epoch: Natural  # Of the instance; another process of it refuses.


class RankAnswer(msgspec.Struct, frozen=True):
    refused: str | None = None  # Why; None: it is carried out.


class ExitReport(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/exits/{id}` at the admin port of a proxy: a supervisor tells how the
    process of an instance ended.
    """

    start: Natural  # Its number: that of the epochs from `start * EPOCHS_PER_START` on.
    cause: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    # It was ended from outside, so that no request caused it.
    is_external: bool


# Messages of a node's agent. It takes leases on checkpoints like an instance, and grants slots of
# the instances of its node, which bound their concurrent recovery transfers.


class SlotRequest(msgspec.Struct, frozen=True):
    """The attempt for which a slot is requested, renewed or released."""

    target: InstanceId
    stream: StreamId
    attempt: AttemptNumber
    owner_epoch: Natural = 0


class SlotUpdate(msgspec.Struct):
    """Body of `POST /kvrs/v1/slots`: one batched message per proxy and agent. Carried out in the
    order of the fields.
    """

    owner: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]  # One run of one proxy.
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    release: list[SlotRequest] = []
    renew: list[SlotRequest] = []
    acquire: list[SlotRequest] = []


class Slot(msgspec.Struct, frozen=True):
    """A granted slot, or a denial."""

    token: Natural  # Higher than that of every slot granted before; 0: denied.
    wait_s: Seconds = 0.0  # Until one may be had, where it was denied.


class SlotAnswer(msgspec.Struct):
    acquired: list[Slot]  # In the order of `acquire`.
    lost: list[StreamId] = []  # Of `renew`: their leases have ended, and so do their transfers.


class SlotCounts(msgspec.Struct, frozen=True):
    """Slots of one target."""

    held: Natural
    waiting: Natural  # Denied, and expected to be requested again.
    most: Natural  # That were ever held at a time.
    granted: Natural  # Since the agent's start, as those below.
    denied: Natural
    expired: Natural


class AgentInfo(msgspec.Struct, frozen=True):
    """Answer of `GET /kvrs/v1/agent`."""

    id: InstanceId
    node: NodeId
    # Rises with every start that finds something of the one before; a clean end leaves nothing.
    epoch: Natural
    pid: int
    page_port: int
    capacity_bytes: Natural
    host_to_device_bytes_per_s: float


class AgentReport(msgspec.Struct, frozen=True):
    """Answer of `GET /kvrs/v1/holdings`, and each line of its `?watch=SECONDS`."""

    epoch: Natural
    reserved_bytes: Natural
    held_bytes: Natural  # Whole pages, reserved and not.
    checkpoints: Natural  # Reservations.
    # Leading full pages held of each stream. On the first line of a watch of all streams, then of
    # those that changed.
    pages: dict[StreamId, Natural]
    denied: list[StreamId] = []  # Streams that found no room since the last line.
    # Slots of the targets that were ever requested, over all proxies.
    slots: dict[InstanceId, SlotCounts] = {}
    rows: RowsReport = NO_ROWS
