"""DistServe's engine, with stages that restart separately. Import after `upstream.load`."""

import asyncio
import contextlib
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import distserve.engine
import distserve.llm
import ray
from ray.exceptions import RayActorError, RayError

from distserve_patches.jobs import Job, JobEnded, Stage, StageState
from distserve_patches.pool import StagePool, geometry_of
from distserve_patches.requests import JobRequest
from distserve_patches.stages import ContextStage, DecodingStage
from distserve_patches.watch import WorkerProcess, cause_of, memory_cause
from kvrs.errors import KvrsError
from kvrs.protocol.geometry import KvGeometry
from kvrs_engine.scheduling.pages import PageManager

log = logging.getLogger(__name__)

# Pause between attempts to start a stage, doubled by every failure.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

Configs = tuple[Any, Any, Any, Any, Any]  # Arguments of upstream's LLMEngine.


class RecoverableEngine:
    """DistServe's engine for jobs. Its stages may die, and are restarted one at a time.

    All calls are on one event loop and one thread.
    """

    def __init__(self, *configs: Any) -> None:
        """Take the arguments of upstream's LLMEngine. Ray runs, and `upstream.use_worker` was
        called.
        """
        # Called at every death and restart of a stage, but not at the start.
        self.on_stage: Callable[[Stage, StageState], None] | None = None
        self._requests: dict[int, JobRequest] = {}
        self._upstream = _Upstream(self._on_output, *configs)
        self._context: ContextStage = self._upstream.context_engine
        self._decoding: DecodingStage = self._upstream.decoding_engine
        self._stages: dict[Stage, ContextStage | DecodingStage] = {
            stage.name: stage for stage in (self._context, self._decoding)
        }
        self._decoding.on_failed = lambda request, cause: self._fail(request, Stage.DECODING, cause)
        nothing = PageManager(0, self._upstream.cache_config.block_size)
        self._states = {stage: StageState(stage, nothing) for stage in Stage}
        self._connected = 0, 0  # Generations of both stages at their last connection for copies.

    @classmethod
    def from_args(cls, args: Namespace) -> "RecoverableEngine":
        """Create an engine by DistServe's flags, before any event loop: upstream starts its own."""

        class Configured:
            def __init__(self, *configs: Any) -> None:
                self.configs = configs

            async def initialize(self) -> None:
                pass

        with _exchanged(distserve.llm, LLMEngine=Configured):
            return cls(*distserve.llm.AsyncLLM.from_engine_args(args).engine.configs)

    # Stages.

    async def start(self) -> None:
        """Start both stages.

        Raises:
            RayError: a worker could not be started; no process is left.
        """
        try:
            await asyncio.gather(
                self._start_stage(self._context), self._start_stage(self._decoding)
            )
        except BaseException:
            self.close()
            raise

    async def run(self) -> None:
        """Serve, and restart dead stages, until cancellation or an unexpected error."""
        async with asyncio.TaskGroup() as supervisors:
            supervisors.create_task(self._supervise(self._context))
            supervisors.create_task(self._supervise(self._decoding))

    def close(self) -> None:
        """End all workers, after the end of `run`."""
        for stage in (self._context, self._decoding):
            stage.end_workers()
            self._states[stage.name].alive = False
        for group in self._context.placement_groups:
            ray.util.remove_placement_group(group)

    async def model_s(self, which: Stage) -> float:
        """Return the seconds that the stage's steps so far have spent in the model, by the rank
        whose answers count: the first of the last pipeline stage.

        Raises:
            KvrsError: the worker has died.
        """
        try:
            return float(await self._stages[which].workers[-1][0].model_s.remote())
        except RayError as error:
            raise KvrsError(
                f"the {which} stage died while it was measured: {cause_of(error)}"
            ) from error

    async def _supervise(self, stage: ContextStage | DecodingStage) -> None:
        while True:
            await self._run(stage)
            workers = stage.located
            self._fail_victims(stage)
            explaining = asyncio.create_task(_explain(self._states[stage.name], workers))
            try:
                await self._restart(stage)
            finally:
                explaining.cancel()

    async def _run(self, stage: ContextStage | DecodingStage) -> None:
        loops = asyncio.create_task(stage.start_event_loop())
        try:
            await asyncio.wait({loops, stage.death}, return_when=asyncio.FIRST_COMPLETED)
            if loops.done():
                loops.result()
            # No job that needs this stage begins from here on.
            self._states[stage.name].alive = False
        finally:
            loops.cancel()
            await asyncio.gather(loops, return_exceptions=True)

    def _fail_victims(self, stage: ContextStage | DecodingStage) -> None:
        """End all workers of a dead stage and every request that needs it. Their blocks at the
        other stage are freed.
        """
        cause = self._states[stage.name].death = stage.death.result()
        log.error("the %s stage is dead: %s", stage.name, cause)
        stage.end_workers()
        victims = [request for request in self._requests.values() if _needs(request, stage.name)]
        for request in victims:
            self._end(request)
        if self.on_stage is not None:
            self.on_stage(stage.name, self.stage(stage.name))
        for request in victims:
            request.job.sink.failed(stage.name, cause)

    async def _restart(self, stage: ContextStage | DecodingStage) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._start_stage(stage)
            except RayError as error:
                stage.end_workers()
                log.warning(
                    "the %s stage did not come up, next try in %s s: %s",
                    stage.name,
                    pause_s,
                    cause_of(error),
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                break
        log.info("the %s stage is up again", stage.name)
        if self.on_stage is not None:
            self.on_stage(stage.name, self.stage(stage.name))

    async def _start_stage(self, stage: ContextStage | DecodingStage) -> None:
        """Start a stage. Raises RayError: a worker did not start."""
        await stage.bring_up()
        context, decoding = self._states[Stage.CONTEXT], self._states[Stage.DECODING]
        state, other = (context, decoding) if stage is self._context else (decoding, context)
        state.generation += 1
        # The later stage connects both; meanwhile the other stage may die and restart.
        while other.alive and self._connected != (
            generations := (context.generation, decoding.generation)
        ):
            death = self._decoding.death
            try:
                await self._decoding.register_kvcache_mem_handles(
                    self._context.parallel_config, self._context.kv_cache_mem_handles
                )
            except RayActorError as error:
                if stage is self._decoding:
                    raise
                if not death.done():
                    death.set_result(cause_of(error))
            else:
                self._connected = generations
        state.pages = stage.block_manager.pages
        state.worker_pids = tuple(worker.pid for worker in stage.located)
        state.workers_here = all(worker.here for worker in stage.located)
        state.alive = True

    def stage(self, which: Stage) -> StageState:
        state = self._states[which]
        if state.alive:
            stage = self._stages[which]
            state.queued, state.running, state.full = stage.queued, stage.running, stage.full
            state.step_s = stage.scheduler.step_time.average_s
        return state

    @property
    def geometry(self) -> KvGeometry:
        return geometry_of(self._upstream.model_config, self._upstream.cache_config)

    def pool(self, which: Stage) -> StagePool:
        """Create a pool over the pages of the running stage; the caller closes it."""
        return StagePool.of(self._stages[which].block_manager)

    # Jobs.

    def refusal(self, job: Job) -> str | None:
        """Return why idle stages could never serve this job; None: they could. Both stages must be
        up.

        Upstream would keep such a job at the head of a queue for ever, and block the queue.
        """
        page_size = self._upstream.cache_config.block_size
        history, tokens = (
            len(job.history),
            len(job.history) + (0 if job.prefill_only else job.max_new_tokens - 1),
        )
        batch, per_request = (
            self._context.sched_config.max_tokens_per_batch,
            self._upstream.cache_config.max_num_blocks_per_req,
        )
        if history > batch:
            return f"{history} tokens are more than --context-max-tokens-per-batch, {batch}"
        limits = [
            (tokens, per_request, "--max-num-blocks-per-req"),
            (history, self._context.num_gpu_blocks, "the context stage"),
        ]
        if not job.prefill_only:
            limits.append((tokens, self._decoding.num_gpu_blocks, "the decoding stage"))
        for needed, blocks, limit in limits:
            if -(-needed // page_size) > blocks:
                return (
                    f"{needed} tokens do not fit into the {blocks} blocks of {page_size} "
                    f"tokens of {limit}"
                )
        return None

    def begin(self, job: Job) -> None:
        """Let the context stage compute the history, and the decoding stage continue, unless
        `prefill_only`.

        A job that needs a dead stage fails at once, and so do all jobs when a stage dies.
        """
        request = self._enter(job, Stage.CONTEXT)
        if request is not None:
            self._context.add_request(request)

    async def reserve(self, job: Job) -> list[int]:
        """Reserve blocks of the decoding stage for the whole history, in the order of the queue.

        The blocks belong to the job until `take_up` or `abort`. A caller that writes into them
        stops before `abort`.

        Raises:
            JobEnded: the job was aborted, or the stage died and `failed` of the sink was called.
        """
        request = self._enter(job, Stage.DECODING)
        if request is None:
            raise JobEnded(f"job {job.id}: the decoding stage is down")
        try:
            await self._decoding.reserve(request)
        except RayError as error:
            # The blocks may still be read. A job of the stage's former generation has ended with
            # it.
            if not request.ended:
                self._decoding.mark_dead(cause_of(error))
            raise JobEnded(f"job {job.id}: {cause_of(error)}") from error
        except asyncio.CancelledError:
            self.abort(job)
            raise
        if request.reserved is None:
            raise JobEnded(f"job {job.id} ended while its blocks were made ready")
        return list(request.reserved)

    def take_up(self, job: Job, kv_tokens: int) -> None:
        """Continue a job with reserved blocks, which hold the KV of the first `kv_tokens` tokens of
        its history: at least one, and not the last.

        The other tokens are decoded again, one per step. A job that has ended stays ended.
        """
        assert 0 < kv_tokens < len(job.history), "else the context stage computes the history"
        if (request := self._requests.get(job.id)) is not None:
            self._decoding.take_up(request, kv_tokens)

    def blocks(self, job: Job, stage: Stage) -> list[int]:
        """The job's blocks at a stage, in order; empty if the job has none or is swapped out."""
        request = self._requests.get(job.id)
        if request is None:
            return []
        return list(request.reserved or self._stages[stage].block_manager.gpu_blocks(job.id))

    def abort(self, job: Job) -> None:
        """End a job: its sink is not called again, and its blocks are free when no step or copy
        uses them.

        Any call is allowed, at any time.
        """
        request = self._requests.get(job.id)
        if request is not None:
            self._end(request)

    def _enter(self, job: Job, stage: Stage) -> JobRequest | None:
        assert job.id not in self._requests, f"job {job.id} is there already"
        request = self._requests[job.id] = JobRequest(job, stage)
        for needed in Stage:
            if _needs(request, needed) and not self._states[needed].alive:
                # The sink must not be called within `begin`.
                asyncio.get_running_loop().call_soon(self._fail, request, needed, "it is down")
                return None
        return request

    def _end(self, request: JobRequest) -> None:
        self._forget(request)
        if request.stage is Stage.CONTEXT:
            self._decoding.scheduler.forget(request)
            self._context.discard(request)
        else:
            self._decoding.discard(request)

    def _fail(self, request: JobRequest, stage: Stage, cause: str) -> None:
        """Fail a request, which holds no blocks at either stage."""
        if not request.ended:
            self._forget(request)
            request.job.sink.failed(stage, cause)

    def _forget(self, request: JobRequest) -> None:
        request.ended = True
        del self._requests[request.request_id]

    def _on_output(self, _: int, output: Any) -> None:
        """Take one request's output of a step, while upstream goes through its batch."""
        request: JobRequest = output.request
        if request.ended or request.replayed:
            return
        sink = request.job.sink
        at_context = request.stage is Stage.CONTEXT
        if at_context:
            sink.prefilled()
            if request.ended:
                return
        if not sink.token(output.new_token_id):
            request.is_finished = True
            if at_context:
                self._context.scheduler.forget_unaccepted(request)
        if request.is_finished and not request.ended:
            self._forget(request)


def _needs(request: JobRequest, stage: Stage) -> bool:
    return request.stage is stage or (stage is Stage.DECODING and not request.job.prefill_only)


class _Upstream(distserve.engine.LLMEngine):  # type: ignore[misc]  # Upstream has no types.
    def __init__(self, on_output: Callable[[int, Any], None], *configs: Any) -> None:
        # A plain attribute saves one call per token.
        self._on_new_step_output_callback = on_output
        with _exchanged(
            distserve.engine,
            ContextStageLLMEngine=ContextStage,
            DecodingStageLLMEngine=DecodingStage,
        ):
            super().__init__(*configs)

    def _on_new_lifetime_event_callback(self, *_: Any) -> None:
        """Drop the events, which upstream keeps for ever."""


@contextlib.contextmanager
def _exchanged(module: Any, **replacements: Any) -> Iterator[None]:
    originals = {name: getattr(module, name) for name in replacements}
    vars(module).update(replacements)
    try:
        yield
    finally:
        vars(module).update(originals)


async def _explain(state: StageState, workers: list[WorkerProcess]) -> None:
    """Note and log a cause of a stage's death that Ray tells some time after it."""
    if (cause := await memory_cause(workers)) is not None:
        log.error("the %s stage is dead: %s", state.stage, cause)
        state.death = cause
