"""An instance of a DistServe server: a stage of the engine behind the instance protocol."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from distserve_patches.core import DecodeCore, StageCore
from distserve_patches.jobs import Stage, StageState
from distserve_patches.pool import StagePool
from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs_engine.engine.page_port import InstancePlace
from kvrs_engine.engine.served import ServedInstance, ServedModel
from kvrs_engine.scheduling.admission_wait import AdmissionWaitEstimator
from kvrs_engine.scheduling.pages import PageManager

_EXPIRE_INTERVAL_S = 1.0


class StageInstance(ServedInstance):
    """A stage as an instance; `stage_changed` is called at every start and end of the stage."""

    def __init__(
        self,
        place: InstancePlace,
        model: ServedModel,
        core: StageCore,
        which: Stage,
        own_prefill: InstanceId | None = None,
    ) -> None:
        super().__init__(place, model)
        self.one_call = own_prefill is not None
        self.prefill: PrefillTable | None = None
        self.engine_step_s = 0.0  # Part of a step that the stage takes beside the model.
        self.on_down: Callable[[], None] = lambda: None
        self._core = core
        self._own_prefill = own_prefill
        self._which = which
        self._pool: StagePool | None = None  # Pages of the running stage.
        self._admission_wait = AdmissionWaitEstimator()
        self._checkpointing: asyncio.Task[None] | None = None

    @property
    def core(self) -> StageCore:
        return self._core

    @property
    def stage(self) -> StageState:
        return self.core.engine.stage(self._which)

    @property
    def pages(self) -> PageManager:
        return self.stage.pages

    def refuse(self, asked: CompletionRequest | ChatRequest) -> None:
        """Raises RequestError: DistServe cannot do what is asked."""
        prefills = (
            asked.kv_transfer_params is not None and asked.kv_transfer_params.do_remote_decode
        )
        if prefills != (self._which is Stage.CONTEXT):
            does, allowed = (
                ("only prefills", "true")
                if self._which is Stage.CONTEXT
                else ("does not prefill", "false")
            )
            raise RequestError(
                f"this instance {does}; allowed: {allowed}",
                param="kv_transfer_params.do_remote_decode",
            )
        if not prefills:
            _refuse_what_is_not_greedy(asked)

    def down(self) -> str | None:
        return None if self.stage.alive else f"the {self._which} stage is down: {self.stage.death}"

    def info(self) -> InstanceInfo:
        assert self.prefill is not None, "it was measured before requests are taken"
        info = self._describe(self.prefill, _capabilities(self.stage), gpus=None)
        return msgspec.structs.replace(
            info,
            prefill=msgspec.structs.replace(info.prefill, engine_step_s=self.engine_step_s),
            own_prefill=self._own_prefill,
            worker_pids=list(self.stage.worker_pids),
        )

    def load(self) -> LoadReport:
        stage, pages = self.stage, self.pages
        return LoadReport(
            epoch=self.epoch,
            queued=stage.queued + (self.core.parked if isinstance(self.core, DecodeCore) else 0),
            running=stage.running,
            free_pages=pages.free_pages,
            total_pages=pages.pages,
            queue_delay_s=self._queue_delay_s(),
            links=self.port.puller.link_reports(),
            checkpoint_lag_pages=self.port.lag_pages,
            damaged_pages=self.port.puller.damaged_pages,
            kv_bytes=self.port.kv_bytes(),
        )

    def _queue_delay_s(self) -> float:
        """Predicted wait: at the context stage for earlier prompts, at the decoding stage for a
        place or for blocks.
        """
        if not isinstance(self.core, DecodeCore):
            return self.core.queue.delay_s
        now_s, stage = time.monotonic(), self.stage
        self._admission_wait.observe(now_s, self.core.ended_runs, full=stage.full)
        return self._admission_wait.expected_s(now_s, stage.queued, stage.running)

    async def start(self) -> None:
        """Serve pages. The caller serves HTTP and runs the engine."""
        await self.port.start()
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(work) for work in (self.port.probe(), self._expire())]

    def stage_changed(self) -> None:
        """Replace the pool after the death or restart of the stage."""
        if self.port.checkpointer is not None:
            self.core.hooks.remove(self.port.checkpointer)
        self.port.detach()
        if self._checkpointing is not None:
            self._checkpointing.cancel()
            self._checkpointing = None
        if self._pool is not None:
            self._pool.close()
        if not self.stage.alive:
            self.on_down()
            return
        self.port.epoch += 1
        self._pool = self.core.engine.pool(self._which)
        fetcher, checkpointer = self.port.attach(self.pages, self._pool, released=_ignore)
        self.core.hooks.append(checkpointer)
        self._checkpointing = asyncio.get_running_loop().create_task(checkpointer.run())
        if isinstance(self.core, DecodeCore):
            self.core.fetcher = fetcher

    def _running(self) -> list[asyncio.Task[None]]:
        return self.tasks if self._checkpointing is None else [*self.tasks, self._checkpointing]

    async def close(self) -> None:
        await super().close()
        if self._pool is not None:
            self._pool.close()

    async def _expire(self) -> None:
        """End expired leases, and raise the error of another task."""
        while (bug := self.failed()) is None:
            self.pages.expire(time.monotonic())
            await asyncio.sleep(_EXPIRE_INTERVAL_S)
        raise bug


def _ignore() -> None:
    """Ignore released pages: DistServe's schedulers look for room in every step."""


def _capabilities(stage: StageState) -> list[Capability]:
    # Workers and server exchange pages through shared memory.
    moves_pages = (
        [Capability.PULL_PAGES, Capability.RETAIN, Capability.CHECKPOINT]
        if stage.workers_here
        else []
    )
    return [*moves_pages, Capability.FENCE, Capability.EXACT_RESUME]


def _refuse_what_is_not_greedy(asked: CompletionRequest | ChatRequest) -> None:
    """Raises RequestError: DistServe's models only choose greedily."""
    if asked.given_temperature:
        raise RequestError(
            f"DistServe chooses greedily, got temperature {asked.temperature}; allowed: 0",
            param="temperature",
        )
    for name, neutral in (
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
        ("repetition_penalty", 1),
    ):
        if (given := getattr(asked, name)) != neutral:
            raise RequestError(
                f"DistServe has no {name}, got {given}; allowed: {neutral}", param=name
            )
    if asked.wanted_logprobs is not None:
        raise RequestError("DistServe gives no log probabilities; allowed: none", param="logprobs")
    if asked.min_tokens and (asked.stop_token_ids or not asked.ignore_eos):
        raise RequestError(
            f"DistServe cannot keep an end token from being chosen, got min_tokens "
            f"{asked.min_tokens}; "
            "allowed: 0, or ignore_eos without stop_token_ids",
            param="min_tokens",
        )
