"""The kvrs connector for vLLM, which loads it from outside its tree: `--kv-transfer-config` is

    {"kv_connector": "KvrsConnector", "kv_connector_module_path": "kvrs.vllm.connector",
     "kv_role": "kv_both",
     "kv_connector_extra_config": {"kvrs": {"config": "cluster.yaml", "instance": "d0"}}}

Only this file knows vLLM's types. What the connector cannot serve it leaves alone, and says why.
Hooks that need none of their arguments take any.
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvrs.config.file import Config, load_config, read_secrets
from kvrs.errors import ConfigError, KvrsError, RequestError
from kvrs.ids import InstanceId
from kvrs.protocol.connector import FIELD, STAGING_BYTES, connector_key, staging_pages
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import EPOCHS_PER_START
from kvrs.vllm.block_table import BlockTable
from kvrs.vllm.blocks import Blocks, Ended, part_of
from kvrs.vllm.fingerprint import fingerprint_of
from kvrs.vllm.guard import Switch, guarded, log
from kvrs.vllm.port import ConnectorPort
from kvrs.vllm.scheduler import Done, SchedulerSide, WorkerStep
from kvrs.vllm.staging import Staging, pages_per_step
from kvrs.vllm.start_check import (
    faults_of_calls,
    faults_of_features,
    faults_of_hooks,
    faults_of_reads,
    fill_abstract,
)

_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Of a port that only says why the connector is off.
_NO_GEOMETRY = KvGeometry(1, 1, 1, 1, 1)
# A version without one of these must still be able to load the module.
_WorkerMetadata: Any = getattr(base, "KVConnectorWorkerMetadata", object)
_SupportsHMA: Any = getattr(base, "SupportsHMA", object)


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config.kvrs`."""

    config: str  # The cluster's YAML.
    instance: str  # An id in it.
    # How long a request waits for pages: without an end it could for ever.
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 2.0
    staging_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 40)] = STAGING_BYTES


class KvrsMetadata(base.KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not checked.
    def __init__(self, step: WorkerStep) -> None:
        self.step = step


class KvrsWorkerMetadata(_WorkerMetadata):  # type: ignore[misc]
    def __init__(self, done: Done) -> None:
        self.done = done

    def aggregate(self, other: "KvrsWorkerMetadata") -> "KvrsWorkerMetadata":
        self.done.add(other.done)
        return self


@dataclass(frozen=True, slots=True)
class _Copying:
    """Copies of a worker that have begun, or (`ended` is None) have failed: what it answers when
    they have ended, and the blocks that are loaded.
    """

    ended: Ended | None
    answer: Done
    blocks: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Load:
    """A load of a worker, of which a part is copied beside each step."""

    step: WorkerStep  # Names the staging memory.
    answer: Done
    blocks: frozenset[int]
    rest: list[tuple[int, int]]  # Slots and blocks that are not begun.


class KvrsConnector(base.KVConnectorBase_V1, _SupportsHMA):  # type: ignore[misc]
    """One in the scheduler's process, one in each worker's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.switch = Switch()
        self._scheduler: SchedulerSide | None = None
        self._port: ConnectorPort | None = None
        self._table = BlockTable()
        self._blocks: Blocks | None = None
        self._loads: deque[_Load] = deque()
        self._copying: list[_Copying] = []
        self._done = Done()
        self._failed_blocks: set[int] = set()
        # Blocks of requests whose load was not begun yet: vLLM waits for an answer for ever.
        self._awaited: dict[str, list[int]] = {}
        self._has_left_alone = False  # It was said.
        self._local_tokens = 0  # Of the request that was asked about last.
        self._reported: str | None = None  # Why this worker is off, as the scheduler knows it.
        self._geometry, fingerprint = _NO_GEOMETRY, ""
        is_scheduler = role is base.KVConnectorRole.SCHEDULER
        try:
            if faults := [*_faults()]:
                raise KvrsError("; ".join(faults))
            self._geometry = _geometry(vllm_config, kv_cache_config)
            if is_scheduler:
                fingerprint = _fingerprint(vllm_config, self._geometry)
        except Exception as error:
            self.switch.turn_off(_said(error))
        if is_scheduler:
            try:
                self._start(vllm_config, fingerprint)
            except Exception as error:
                self.switch.turn_off(_said(error))

    def _start(self, vllm_config: Any, fingerprint: str) -> None:
        """Start the side of the scheduler; of a connector that is off, only the port that says
        why.
        """
        options = _options((self._kv_transfer_config.kv_connector_extra_config or {}).get("kvrs"))
        name = InstanceId(options.instance)
        config = load_config(Path(options.config))
        node, settings = _instance(config, name)
        ring = read_secrets(config.security, os.environ)
        page_bytes = self._geometry.page_bytes
        staging_bytes = 0 if self.switch.off_reason else options.staging_bytes
        pages = staging_pages(staging_bytes, page_bytes)
        staging = Staging(pages, page_bytes)
        port = self._port = ConnectorPort(
            config,
            node,
            settings,
            ring,
            self._geometry,
            fingerprint,
            staging,
            lambda copy: scheduler.requested.append(copy),
            lambda: self.switch.off_reason,
            lambda: staging.used + scheduler.ended.pinned_blocks,
            int(100 * time.time()) * EPOCHS_PER_START,
        )
        scheduler = self._scheduler = SchedulerSide(
            port,
            staging.place,
            fingerprint,
            self._geometry.page_size_tokens,
            [connector_key(secret, settings.id) for secret in ring],
            ranks=vllm_config.parallel_config.world_size,
            deadline_s=options.deadline_s,
            clock=time.monotonic,
            max_pinned=min(config.backup.staging_pages, pages),
            max_saved=pages_per_step(page_bytes),
        )
        self.switch.turned_off = scheduler.close
        port.start()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, *_: Any, **__: Any) -> str | None:
        """Heads before tokens, by the name that this vLLM's own connectors have for it: two names
        in one `MultiConnector` end the engine.
        """
        try:
            names = import_module("vllm.v1.kv_cache_layout").KVCacheLayout
        except (ImportError, AttributeError):
            names = None
        return "LBHNC" if hasattr(names, "LBHNC") else "HND"

    # The scheduler's side.

    @guarded(lambda: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        # Blocks are pinned only where vLLM makes steps for them alone.
        if self._scheduler is not None and hasattr(
            base.KVConnectorBase_V1, "has_pending_push_work"
        ):
            self._scheduler.ended.pool = _Pool(gpu_block_pool)

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if self._scheduler is None or not isinstance(params, dict) or FIELD not in params:
            return
        embeds = getattr(request, "prompt_embeds", None)
        if request.lora_request is not None or request.mm_features or embeds is not None:
            if not self._has_left_alone:
                self._has_left_alone = True
                log.warning(
                    "request %s is neither saved nor restored, as all with an adapter, images or "
                    "embeddings: its KV is not of its tokens alone",
                    request.request_id,
                )
            return
        try:
            self._scheduler.arrived(
                request,
                params[FIELD],
                request.cache_salt or "",
                handed_over=bool(params.get("do_remote_prefill")),
            )
        except RequestError as error:
            log.warning("request %s: %s", request.request_id, error)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        self._local_tokens = num_computed_tokens
        tokens = self._scheduler.match(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
        if num_external_tokens:
            # Those before them are of vLLM's prefix cache, and of other requests as well.
            page = self._geometry.page_size_tokens
            first = self._local_tokens // page
            end = first + num_external_tokens // page
            self._awaited[request.request_id] = [*block_ids[first:end]]
        if self._scheduler is not None:
            self._scheduler.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, *output: Any, **more: Any) -> KvrsMetadata:
        step = self._step(*output, **more)
        if self.switch.off_reason is not None:
            # Workers report these as failed, since no staging is named: no block was filled.
            step.loads = [
                (request, [(0, block) for block in blocks])
                for request, blocks in self._awaited.items()
            ]
        for request, _ in step.loads:
            self._awaited.pop(request, None)
        return KvrsMetadata(step)

    @guarded(WorkerStep)
    def _step(self, scheduler_output: Any) -> WorkerStep:
        if self._scheduler is None:
            return WorkerStep()
        if self._port is not None and self._port.failure is not None:
            raise KvrsError(f"its port has ended: {self._port.failure}")
        self._table.update(scheduler_output)
        return self._scheduler.step(scheduler_output.num_scheduled_tokens, self._table.of)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, KvrsWorkerMetadata):
            self._scheduler.done(meta.done)
            if meta.done.off_reason is not None:
                self.switch.turn_off(f"a worker: {meta.done.off_reason}")

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        if self._scheduler is not None:
            # A prefill instance's part of a stream, which goes on elsewhere.
            params = request.kv_transfer_params
            handed_on = isinstance(params, dict) and bool(params.get("do_remote_decode"))
            whole = request.status.name == "FINISHED_LENGTH_CAPPED"
            self._scheduler.finished(request.request_id, block_ids, send_rest=handed_on and whole)
        return False, None

    @guarded(lambda: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Copies for requests that have ended are made in steps without any."""
        return self._scheduler is not None and self._scheduler.has_work

    @guarded(lambda: None)
    def reset_cache(self) -> None:
        """VLLM forgets what it has cached, as behind a change of its weights. Pages that agents
        have may be of the weights before, and the fingerprint does not tell them apart: none is
        loaded or saved any more.
        """
        self.switch.turn_off(
            "vLLM has reset its caches, as behind a change of weights; a restart turns it on again"
        )

    # The workers' side.

    @guarded(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        parallel = self._vllm_config.parallel_config
        layers = {}
        for name, tensor in kv_caches.items():
            if (found := _LAYER.search(name)) is None:
                raise KvrsError(f"a layer's name is {name!r}; allowed: one with .layers.N.")
            layers[int(found[1])] = tensor
        part = part_of(
            self._geometry.kv_heads,
            get_tensor_model_parallel_rank(),
            parallel.tensor_parallel_size,
        )
        self._blocks = Blocks(self._geometry, part, layers)

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Begin loads, with no more pages beside one step than other requests can wait for."""
        for request, copies in (step := _bound(self._connector_metadata)).loads:
            # A request whose load failed is reported all the same, with its blocks.
            blocks = frozenset(block for _, block in copies)
            self._loads.append(_Load(step, Done(loads={request: 1}), blocks, copies))
        room = pages_per_step(self._geometry.page_bytes)
        while self._loads and room:
            load = self._loads[0]
            part, load.rest = load.rest[:room], load.rest[room:]
            room -= len(part)
            # Parts end in their order. Behind one that has failed there is nothing to begin.
            ended = self._copy(load.step, Blocks.load, part)
            if ended is None or not load.rest:
                self._loads.popleft()
                self._copying.append(_Copying(ended, load.answer, load.blocks))

    def wait_for_save(self, *_: Any, **__: Any) -> None:
        step = _bound(self._connector_metadata)
        saves, step.saves = step.saves, []
        copies = [copy for _, job in saves for copy in job]
        if copies:
            answer = Done(saves=dict.fromkeys((job for job, _ in saves), 1))
            self._copying.append(_Copying(self._copy(step, Blocks.save, copies), answer))

    @guarded(lambda: None)
    def _copy(
        self, step: WorkerStep, way: Callable[[Blocks, Any], Ended], copies: Any
    ) -> Ended | None:
        if self._blocks is None or step.place is None:
            return None
        self._blocks.open(step.place)
        return way(self._blocks, copies)

    @guarded(lambda: None)
    def _has_ended(self, ended: Ended | None) -> bool | None:
        """None: it has failed, or that is not known."""
        return ended() if ended is not None else None

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """All layers are saved behind the step."""

    # And loaded before it.
    wait_for_layer_load = save_kv_layer
    # A `MultiConnector` passes the data of its other connectors, which vLLM's own hook may refuse.
    set_xfer_handshake_metadata_pp_aware = save_kv_layer

    def get_finished(self, *_: Any, **__: Any) -> tuple[None, set[str] | None]:
        self.wait_for_save()  # A step without a forward pass may come without the hook.
        copying, self._copying = self._copying, []
        for each in copying:
            if (has_ended := self._has_ended(each.ended)) is False:
                self._copying.append(each)
            elif has_ended:
                self._done.add(each.answer)
            else:
                self._done.add(Done(loads=each.answer.loads))
                self._failed_blocks |= each.blocks
        return None, set(self._done.loads) or None

    def get_block_ids_with_load_errors(self, *_: Any, **__: Any) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self, *_: Any, **__: Any) -> KvrsWorkerMetadata | None:
        done, self._done = self._done, Done()
        if self.switch.off_reason != self._reported:
            done.off_reason = self._reported = self.switch.off_reason
        return KvrsWorkerMetadata(done) if done != Done() else None

    def shutdown(self, *_: Any, **__: Any) -> None:
        if self._port is not None:
            self._port.close()


class _Pool:
    """vLLM's blocks, as `kvrs.vllm.ended.BlockPool`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        # The last pages are the first to be used anew, as at the end of a request.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(block_ids)])

    def content(self, block_id: int) -> object:
        return self._pool.blocks[block_id].block_hash


_UNKNOWN = fill_abstract(KvrsConnector)


def _faults() -> Iterator[str]:
    """Differences of vLLM's interface from the one that this connector knows."""
    known = base.KVConnectorBase_V1
    yield from (f"vLLM wants a hook {name}, which is not known" for name in _UNKNOWN)
    yield from faults_of_hooks(KvrsConnector, [known, _SupportsHMA])
    yield from faults_of_features([(base, "KVConnectorWorkerMetadata"), (base, "SupportsHMA")])
    yield from faults_of_reads()
    yield from faults_of_calls()


def _said(error: Exception) -> str:
    is_ours = isinstance(error, KvrsError | OSError | ValueError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


def _bound(metadata: Any) -> WorkerStep:
    """Copies beside this step; none in a run of vLLM's own, as for profiling."""
    return metadata.step if isinstance(metadata, KvrsMetadata) else WorkerStep()


def _options(given: object) -> _Options:
    """Raises ConfigError."""
    try:
        return msgspec.convert(given, _Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config.kvrs: got {given!r:.200}; allowed: an object with config "
            f"(the cluster's YAML), instance (an id in it), and if wanted deadline_s and "
            f"staging_bytes ({error})"
        ) from None


def _instance(config: Config, name: InstanceId) -> Any:
    for node, settings in config.cluster.instances():
        if settings.id == name:
            if settings.connector_port is None:
                raise ConfigError(f"cluster.nodes: instance {name!r} has no connector_port")
            return node, settings
    known = ", ".join(str(settings.id) for _, settings in config.cluster.instances())
    raise ConfigError(f"kv_connector_extra_config.kvrs.instance: {name!r}; allowed: {known}")


def _geometry(vllm_config: Any, kv_cache_config: Any) -> KvGeometry:
    """Raises KvrsError: this KV cache is not one that can be saved; the message says why."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise KvrsError(f"{len(groups)} groups of KV layers; allowed: 1 (no hybrid model)")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":
        raise KvrsError(f"KV of kind {type(spec).__name__}; allowed: FullAttentionSpec")
    if getattr(spec, "sliding_window", None) is not None:
        raise KvrsError("a sliding window; allowed: full attention")
    if (quantised := getattr(spec, "kv_quant_mode", None)) is not None and quantised.value:
        raise KvrsError(f"KV quantised as {quantised.name}; allowed: none")
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        raise KvrsError("keys and values of different sizes; allowed: equal ones")
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise KvrsError(f"{name}: got {getattr(parallel, name)}; allowed: 1")
    return KvGeometry(
        layers=model.hf_text_config.num_hidden_layers,
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=spec.head_size,
        dtype_bytes=spec.dtype.itemsize,
        page_size_tokens=spec.block_size,
    )


def _fingerprint(vllm_config: Any, geometry: KvGeometry) -> str:
    """Raises KvrsError."""
    model = vllm_config.model_config
    arithmetic = [
        str(model.dtype),
        vllm_config.cache_config.cache_dtype,
        str(model.quantization),
        repr(model.hf_overrides),
    ]
    return fingerprint_of(model.model, arithmetic, geometry)
