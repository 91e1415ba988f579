"""A DistServe server as two instances of the cluster: the context stage is the node's prefill
instance, and the decoding stage the node's decode instance. Import after `upstream.load`.
"""

import asyncio
import hashlib
import logging
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from ray.exceptions import RayError, RayTaskError

from distserve_patches.core import DecodeCore, PrefillCore, PrefillQueue, StageCore
from distserve_patches.engine import RecoverableEngine
from distserve_patches.instances import StageInstance
from distserve_patches.jobs import Stage, StageState
from distserve_patches.measuring import WARM_UP_STEPS, measure_stages
from distserve_patches.watch import cause_of
from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.file import Config
from kvrs.errors import ConfigError, KvrsError
from kvrs.net.routes import Routes
from kvrs.protocol import frames
from kvrs.protocol.geometry import PAGE_LAYOUT, KvGeometry
from kvrs.protocol.instance import EPOCHS_PER_START, Role
from kvrs.text.output import TokenPieces, load_tokenizer
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs_engine.elastic import grain
from kvrs_engine.engine.chat import load_chat_template
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.probe import probe_digest
from kvrs_engine.engine.page_port import InstancePlace
from kvrs_engine.engine.requests import Vocabulary
from kvrs_engine.engine.served import ServedModel
from kvrs_engine.engine.server import serve_http
from kvrs_engine.engine.worker import end_tokens_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """The parsed command line."""

    config: Config
    node: NodeSettings
    flags: Namespace  # DistServe's flags.
    start: int  # Number of the start, which rises for a node.
    secret: bytes
    off_gpu: bool
    older: Sequence[bytes] = ()  # Other accepted secrets.

    def settings(self, role: Role) -> InstanceSettings:
        return next(instance for instance in self.node.instances if instance.role is role)


class Server:
    """Both instances of one node, created on the event loop that serves them."""

    def __init__(self, launch: Launch, engine: RecoverableEngine, model: ServedModel) -> None:
        self._launch = launch
        self._engine = engine
        config = launch.config
        links = SendingLinks(config.transfer, SendingFaults(), launch.node.id)
        self._queue = queue = PrefillQueue()
        epoch = launch.start * EPOCHS_PER_START
        lease_s = config.transfer.lease_s

        def instance_of(stage: Stage, core: StageCore, role: Role) -> StageInstance:
            settings = launch.settings(role)
            place = InstancePlace(
                config, launch.node, settings, launch.secret, epoch, links, launch.older
            )
            own_prefill = launch.settings(Role.PREFILL).id if role is Role.DECODE else None
            return StageInstance(place, model, core, stage, own_prefill)

        prefill_core = PrefillCore(engine, queue, clock=time.monotonic, lease_s=lease_s)
        self._decode_core = DecodeCore(engine, queue, clock=time.monotonic, lease_s=lease_s)
        self.instances = {
            Stage.CONTEXT: instance_of(Stage.CONTEXT, prefill_core, Role.PREFILL),
            Stage.DECODING: instance_of(Stage.DECODING, self._decode_core, Role.DECODE),
        }

    async def serve(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Serve until `stop` is set; `ready` is called once both instances take requests.

        Raises:
            KvrsError: DistServe did not start, or a port is in use.
        """
        engine = self._engine
        try:
            await engine.start()
        except RayError as error:
            # A worker's configuration error is passed on.
            cause = error.cause if isinstance(error, RayTaskError) else None
            raise (
                cause
                if isinstance(cause, KvrsError)
                else KvrsError(f"DistServe did not start: {cause_of(error)}")
            ) from error
        running = asyncio.ensure_future(engine.run())
        try:
            self._limit_lengths()
            await self._measure(running)
            engine.on_stage = self._stage_changed
            for instance in self.instances.values():
                instance.stage_changed()
            async with self._http(Stage.CONTEXT), self._http(Stage.DECODING):
                ready()
                await self._until_over(stop, running)
        finally:
            engine.on_stage = None
            running.cancel()
            # The workers end with the connection to Ray. An explicit end would wait for a Ray that
            # a signal may have ended.
            await asyncio.gather(running, return_exceptions=True)

    async def _until_over(self, stop: asyncio.Event, running: asyncio.Future[None]) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        tasks = [task for instance in self.instances.values() for task in instance.tasks]
        works: list[asyncio.Future[Any]] = [running, self._decode_core.bug, *tasks]
        await asyncio.wait([stopping, *works], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for over in works:
            if over.done():
                over.result()

    @asynccontextmanager
    async def _http(self, stage: Stage) -> AsyncIterator[Routes]:
        instance = self.instances[stage]
        async with serve_http(
            instance, allow_faults=self._launch.config.cluster.allow_faults
        ) as routes:
            instance.on_down = routes.cut_watches
            yield routes

    def _stage_changed(self, stage: Stage, state: StageState) -> None:
        self.instances[stage].stage_changed()
        self._decode_core.stage_changed(stage, alive=state.alive)

    def _limit_lengths(self) -> None:
        """Limit `max_model_len` to what either stage can hold.

        Raises:
            ConfigError: the requests for measurements do not fit.
        """
        stages = [self._engine.stage(stage).pages for stage in Stage]
        longest = min(pages.pages * pages.page_size_tokens for pages in stages)
        for instance in self.instances.values():
            instance.max_model_len = min(instance.max_model_len, longest)
            if instance.max_model_len < WARM_UP_STEPS:
                raise ConfigError(
                    f"the stages hold requests of {instance.max_model_len} tokens; "
                    f"allowed: at least {WARM_UP_STEPS} "
                    "(--gpu-memory-utilization, --max-num-blocks-per-req and "
                    "--context-max-tokens-per-batch limit them)"
                )

    async def _measure(self, running: asyncio.Future[None]) -> None:
        """Time prompts and steps before requests are taken, for each instance's own table."""
        measuring = asyncio.ensure_future(
            measure_stages(self._engine, self.instances[Stage.CONTEXT].max_model_len)
        )
        both: list[asyncio.Future[Any]] = [measuring, running]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not measuring.done():
            measuring.cancel()
            running.result()
        for stage, measured in measuring.result().items():
            instance = self.instances[stage]
            instance.prefill, instance.engine_step_s = measured.table, measured.engine_step_s
        self._queue.prefill = self.instances[Stage.CONTEXT].prefill


def describe_model(launch: Launch, geometry: KvGeometry) -> ServedModel:
    """Describe the served model, by its directory.

    Raises:
        ConfigError: the directory is missing or incomplete.
    """
    directory, flags = Path(launch.flags.model), launch.flags
    config = ModelConfig.from_directory(directory)
    tokenizer = load_tokenizer(directory)
    # The context stage computes a history again in one batch.
    longest = min(
        config.max_positions,
        flags.context_max_tokens_per_batch,
        min(flags.max_num_blocks_per_req, frames.MAX_TAGS) * flags.block_size,
    )
    return ServedModel(
        name=launch.config.cluster.served_name or directory.name,
        vocabulary=Vocabulary(tokenizer, config.vocab, end_tokens_of(config)),
        pieces=TokenPieces(tokenizer),
        chat_template=load_chat_template(directory),
        fingerprint=_fingerprint(directory, config, geometry, off_gpu=launch.off_gpu),
        geometry=geometry,
        max_model_len=longest,
    )


def _fingerprint(
    directory: Path, config: ModelConfig, geometry: KvGeometry, *, off_gpu: bool
) -> str:
    """A hash that is equal if and only if two servers' pages mean the same, for any parallel
    degrees and one kind of arithmetic. The field names of ModelConfig and KvGeometry are hashed.
    """
    total = hashlib.blake2b(digest_size=16, person=b"kvrs-distserve")
    fields = {
        name: value
        for name, value in msgspec.to_builtins(config).items()
        if name != "eos_token_ids"
    }
    arithmetic = (
        [
            torch.backends.cpu.get_cpu_capability(),
            str(torch.__version__),
            grain.VERSION,
            probe_digest(config, geometry.page_size_tokens, torch.device("cpu")).hex(),
        ]
        if off_gpu
        else ["SwiftTransformer"]
    )
    total.update(msgspec.json.encode([fields, geometry, PAGE_LAYOUT, arithmetic], order="sorted"))
    weights = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not weights:
        raise ConfigError(
            f"{directory}: no weights; allowed: a directory with *.safetensors or *.bin"
        )
    for path in weights:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, hashlib.blake2b).digest())
    return total.hexdigest()
