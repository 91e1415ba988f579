"""One of the two instances as which a DistServe server shows itself: a stage of the engine behind our instance protocol."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from distserve_patches.core import DecodeCore, RunCore
from distserve_patches.jobs import Stage, StageState
from kvrs.config import Config, InstanceSettings, NodeSettings
from kvrs.engine.chat import ChatTemplate
from kvrs.engine.checkpoints import Checkpointer
from kvrs.engine.fencing import Attempt
from kvrs.engine.fetching import PageFetcher
from kvrs.engine.instance import agents_of, peers_of, probe_links
from kvrs.engine.pages import EnginePages
from kvrs.engine.requests import Model
from kvrs.engine.served import EPOCHS_PER_START
from kvrs.engine.staging import PagePool
from kvrs.errors import RequestError, TransferError
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport, MeasuredPrefill
from kvrs.protocol.openai import ChatRequest, CompletionRequest
from kvrs.protocol.tags import Tag, root_tag
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.places import PlaceWait
from kvrs.text.pieces import TokenPieces
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, PinnedPages, PullRequest
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.pusher import PagePusher
from kvrs.transfer.server import PageServer


class StagePool(PagePool, Protocol):
    def close(self) -> None: ...


_EXPIRE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What both instances say of the model."""

    name: str
    served: Model
    pieces: TokenPieces
    chat_template: ChatTemplate | None
    fingerprint: str
    geometry: KvGeometry
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instance runs."""

    config: Config
    node: NodeSettings
    settings: InstanceSettings
    secret: bytes
    start: int  # Which start of its process this is.
    links: SendingLinks  # All that the process sends shares the links to the other nodes.
    older: Sequence[bytes] = ()  # Secrets that are accepted beside the one in use.


class _CurrentPages:
    """A `PageSource` that outlives the lives of a stage: in between nothing is held."""

    def __init__(self) -> None:
        self.source: EnginePages | None = None

    async def pin(self, request: PullRequest) -> PinnedPages:
        if (source := self.source) is None:
            raise TransferError("the stage that held these pages is down")
        pinned = await source.pin(request)
        return replace(pinned, token=(source, pinned))

    def unpin(self, pinned: PinnedPages) -> None:
        assert isinstance(pinned.token, tuple)
        source, inner = pinned.token
        source.unpin(inner)


class StageInstance:
    """`start` needs a running event loop; `stage_changed` is called for every life of the stage, and every end of one."""

    def __init__(
        self,
        place: Place,
        model: ServedModel,
        core: RunCore,
        which: Stage,
        pool: Callable[[], StagePool],
        own_prefill: InstanceId | None = None,
    ) -> None:
        """`pool`: of the stage's present life."""
        self.settings, self.secret, self.older = place.settings, place.secret, place.older
        self.model, self.served, self.pieces = model.name, model.served, model.pieces
        self.chat_template, self.max_model_len = model.chat_template, model.max_model_len
        self.registry = peers_of(place.config)
        self.core = core
        self.one_call = own_prefill is not None
        self.epoch = place.start * EPOCHS_PER_START
        self.prefill: PrefillTable | None = None
        self.tasks: list[asyncio.Task[None]] = []  # None of them ends by itself.
        self.on_down: Callable[[], None] = lambda: None
        self._own_prefill = own_prefill
        self._place, self._model = place, model
        self._which, self._new_pool = which, pool
        self._pool: StagePool | None = None
        self._places = PlaceWait()
        self._source = _CurrentPages()
        transfer = place.config.transfer
        self.page_server = PageServer(self.identity, self._source, place.secret, transfer, place.links, older=place.older)
        self.puller = PagePuller(self.identity, place.secret, transfer, time.monotonic)
        self.pusher = PagePusher(self.identity, place.secret, transfer, place.links)
        self._checkpointer: Checkpointer | None = None
        self._checkpointing: asyncio.Task[None] | None = None

    @property
    def stage(self) -> StageState:
        return self.core.engine.stage(self._which)

    @property
    def pages(self) -> PageManager:
        return self.stage.pages

    @property
    def faults(self) -> SendingFaults:
        return self.page_server.faults

    def identity(self) -> Identity:
        return Identity(
            instance=self.settings.id,
            node=self._place.node.id,
            epoch=self.epoch,
            fingerprint=self._model.fingerprint,
            page_bytes=self._model.geometry.page_bytes,
        )

    def root(self, cache_salt: str) -> Tag:
        """The tag from which all pages of one tenant are chained."""
        return root_tag(self._model.fingerprint, cache_salt)

    def refuse(self, asked: CompletionRequest | ChatRequest) -> None:
        """Raises RequestError: DistServe cannot do what is asked."""
        prefills = asked.kv_transfer_params is not None and asked.kv_transfer_params.do_remote_decode
        if prefills != (self._which is Stage.CONTEXT):
            does, allowed = ("only prefills", "true") if self._which is Stage.CONTEXT else ("does not prefill", "false")
            raise RequestError(f"this instance {does}; allowed: {allowed}", param="kv_transfer_params.do_remote_decode")
        if not prefills:
            _refuse_what_is_not_greedy(asked)

    def fence(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """Drop lower attempts; the raised epoch tells everybody that what they knew of this instance is void."""
        self.core.fence(attempts)
        self.epoch += 1

    def end_transfers(self, attempts: Mapping[StreamId, Attempt]) -> None:
        self.core.end_transfers(attempts)

    def down(self) -> str | None:
        return None if self.stage.alive else f"the {self._which} stage is down"

    def info(self) -> InstanceInfo:
        table, stage = self.prefill, self.stage
        assert table is not None, "it was measured before anybody was told"
        return InstanceInfo(
            id=self.settings.id,
            node=self._place.node.id,
            role=self.settings.role,
            epoch=self.epoch,
            pid=os.getpid(),
            model=self.model,
            fingerprint=self._model.fingerprint,
            geometry=self._model.geometry,
            max_model_len=self.max_model_len,
            page_port=self.settings.page_port,
            capabilities=_capabilities(stage),
            prefill=MeasuredPrefill(label=table.label, step_tokens=table.step_tokens, seconds=list(table.seconds)),
            own_prefill=self._own_prefill,
            worker_pids=list(stage.worker_pids),
        )

    def load(self) -> LoadReport:
        stage, pages = self.stage, self.pages
        return LoadReport(
            epoch=self.epoch,
            queued=stage.queued + (self.core.parked if isinstance(self.core, DecodeCore) else 0),
            running=stage.running,
            free_pages=pages.free_pages,
            queue_delay_s=self._queue_delay_s(),
            links=self.puller.link_reports(),
            checkpoint_lag_pages=0 if self._checkpointer is None else self._checkpointer.lag_pages,
            damaged_pages=self.puller.damaged_pages,
        )

    def _queue_delay_s(self) -> float:
        """At the context stage the prompts before; at the decoding stage the wait for room, where there is none."""
        if not isinstance(self.core, DecodeCore):
            return self.core.line.queue_delay_s
        now_s, waiting = time.monotonic(), self.core.reserving
        self._places.observe(now_s, self.core.ended_runs, full=waiting > 0)
        return self._places.expected_s(now_s, waiting)

    async def start(self) -> None:
        """Serve pages; the HTTP side and the engine are the caller's."""
        await self.page_server.start(self.settings.host, self.settings.page_port)
        interval_s = self._place.config.transfer.probe_interval_s
        works = (probe_links(self.puller, self.registry.values(), self.settings.id, interval_s), self._expire())
        self.tasks = [asyncio.get_running_loop().create_task(work) for work in works]

    def stage_changed(self) -> None:
        """The stage has died, or is there again: what belonged to its last life is over."""
        self.core.checkpoints, self._source.source, self._checkpointer = None, None, None
        if self._checkpointing is not None:
            self._checkpointing.cancel()
            self._checkpointing = None
        if self._pool is not None:
            self._pool.close()
        if not self.stage.alive:
            self.on_down()
            return
        self.epoch += 1
        self._pool = pool = self._new_pool()
        config = self._place.config
        self._source.source = EnginePages(self.pages, pool, released=_nobody_waits)
        checkpointer = Checkpointer(
            self.pages, pool, self.pusher, agents_of(config), config.backup, clock=time.monotonic, released=_nobody_waits
        )
        self._checkpointer = self.core.checkpoints = checkpointer
        self._checkpointing = asyncio.get_running_loop().create_task(checkpointer.run())
        if isinstance(self.core, DecodeCore):
            self.core.fetcher = PageFetcher(pool, self.puller, self.registry)

    def failed(self) -> BaseException | None:
        """The bug that ended one of the tasks, if one did."""
        tasks = self.tasks if self._checkpointing is None else [*self.tasks, self._checkpointing]
        return next((task.exception() for task in tasks if task.done() and not task.cancelled()), None)

    async def close(self) -> None:
        tasks = self.tasks if self._checkpointing is None else [*self.tasks, self._checkpointing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.page_server.close()
        await self.puller.close()
        await self.pusher.close()
        if self._pool is not None:
            self._pool.close()

    async def _expire(self) -> None:
        """End leases whose time has come, and look whether all work still goes on."""
        while (bug := self.failed()) is None:
            self.pages.expire(time.monotonic())
            await asyncio.sleep(_EXPIRE_INTERVAL_S)
        raise bug


def _nobody_waits() -> None:
    """DistServe's schedulers look for room in every step."""


def _capabilities(stage: StageState) -> list[Capability]:
    # Pages go between workers and server through shared memory.
    moves_pages = [Capability.PULL_PAGES, Capability.RETAIN, Capability.CHECKPOINT] if stage.workers_here else []
    return [*moves_pages, Capability.FENCE, Capability.EXACT_RESUME]


def _refuse_what_is_not_greedy(asked: CompletionRequest | ChatRequest) -> None:
    """DistServe's models answer with the likeliest token and with nothing else."""
    if asked.given_temperature:
        raise RequestError(f"DistServe chooses greedily, got temperature {asked.temperature}; allowed: 0", param="temperature")
    for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
        if (given := getattr(asked, name)) != neutral:
            raise RequestError(f"DistServe has no {name}, got {given}; allowed: {neutral}", param=name)
    if asked.wanted_logprobs is not None:
        raise RequestError("DistServe gives no log probabilities; allowed: none", param="logprobs")
    if asked.min_tokens and (asked.stop_token_ids or not asked.ignore_eos):
        raise RequestError(
            f"DistServe cannot keep an end token from being chosen, got min_tokens {asked.min_tokens}; "
            "allowed: 0, or ignore_eos without stop_token_ids",
            param="min_tokens",
        )
