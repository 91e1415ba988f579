"""DistServe's two stages, subclassed: a job can end at any moment, and a dead stage can restart.

Import after `upstream.load`. The path of a request, and the stage whose blocks the request holds:

                              blocks held
    begin                     none
      ──▶ waiting             none
      ──▶ in a batch          context stage
      ──▶ bridge, unaccepted  context stage
      ──▶ being copied        both
    reserve, take_up join here
      ──▶ waiting             decoding stage
      ──▶ in a batch          decoding stage
      ◀─▶ swapped             none (swap space of the host)

Blocks are freed after the step or copy that writes into them; all others at once.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from distserve.single_stage_engine import (
    ContextStageLLMEngine,
    DecodingStageLLMEngine,
    SingleStageLLMEngine,
)
from ray.exceptions import RayError, RayTaskError

from distserve_patches.blocks import PagedBlockManager
from distserve_patches.jobs import JobEnded, Stage
from distserve_patches.requests import ContextScheduler, DecodingScheduler, JobRequest, Reservation
from distserve_patches.watch import WorkerProcess, cause_of, first_death, locate

log = logging.getLogger(__name__)


class _NoText:
    """Stands for upstream's tokenizer, which would decode tokens separately and break characters of
    several tokens. The server makes the text.
    """

    @staticmethod
    def decode(_: int) -> str:
        return ""


class _RestartableStage(SingleStageLLMEngine):  # type: ignore[misc]  # Upstream has no types.
    """The common part of both stages. One object serves its stage across restarts."""

    name: Stage
    block_manager: PagedBlockManager
    workers: list[list[Any]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tokenizer = _NoText()
        self.located: list[WorkerProcess] = []
        self._helpers: set[asyncio.Task[None]] = set()

    async def bring_up(self) -> None:
        """Start new workers, until the stage can serve.

        Raises:
            RayError: a worker did not start.
        """
        self.workers = []
        self.located = []
        self.batches_in_pipeline: list[Any] = []
        self.batches_ret_futures: list[Any] = []
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        start = asyncio.create_task(self.initialize())
        try:
            # Ranks wait for each other at the start: after a death the others may never answer.
            await asyncio.wait({start, self.death}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                raise RayError(self.death.result())
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        start.result()

    def mark_dead(self, cause: str) -> None:
        if not self.death.done():
            self.death.set_result(cause)

    def end_workers(self) -> None:
        """End the remaining workers: a stage with a dead worker can neither compute nor add
        workers.
        """
        for helper in self._helpers:
            helper.cancel()
        for actor in (actor for rank in self.workers for actor in rank):
            ray.kill(actor)

    async def _init_workers(self) -> None:
        await super()._init_workers()
        self.located = await locate([actor for rank in self.workers for actor in rank])
        self._run_helper(self._watch_workers())

    async def _watch_workers(self) -> None:
        self.mark_dead(await first_death(self.located))

    async def _watch_calls(self, references: list[Any]) -> None:
        try:
            await asyncio.gather(*references)
        except RayError as error:
            self.mark_dead(cause_of(error))

    def _run_helper(self, work: Any) -> None:
        helper = asyncio.create_task(work)
        self._helpers.add(helper)
        helper.add_done_callback(self._helpers.discard)

    async def _step(self) -> None:
        try:
            await super()._step()
        except RayError as error:
            self.mark_dead(cause_of(error))
            # Upstream's loops do not end each other: each waits here until all are cancelled.
            await asyncio.Future()

    def _remote_call_all_workers_async(self, func_name: str, *args: Any) -> Any:
        if func_name == "clear_request_resource_batched":
            # Upstream sends the requests themselves after every step, even when there are none.
            for request in args[0]:
                super()._remote_call_all_workers_async("clear_request_resource", request.request_id)
            return []
        if func_name == "swap_blocks":
            # Workers look swaps up by id, so they get ids: copies of requests would never be found.
            requests, *rest = args
            references = super()._remote_call_all_workers_async(
                func_name, [request.request_id for request in requests], *rest
            )
            # No call waits for a swap, so only this helper notices a failure.
            self._run_helper(self._watch_calls(references))
            return references
        return super()._remote_call_all_workers_async(func_name, *args)

    def _new_block_manager(self) -> PagedBlockManager:
        return PagedBlockManager(
            self.stage,
            self.num_gpu_blocks,
            self.num_cpu_blocks,
            self.model_config,
            self.parallel_config,
            self.cache_config,
            self._remote_call_all_workers_async,
        )

    def _is_computing(self, request: JobRequest) -> bool:
        return any(request in batch.requests for batch in self.batches_in_pipeline)

    def _free_blocks_of(self, request: JobRequest) -> None:
        if request.request_id in self.block_manager.block_table:
            self.block_manager.free_blocks(request.request_id)
            self._remote_call_all_workers_async("clear_request_resource", request.request_id)


class ContextStage(_RestartableStage, ContextStageLLMEngine):  # type: ignore[misc]  # Upstream has no types.
    name = Stage.CONTEXT
    scheduler: ContextScheduler

    def _get_scheduler(self) -> ContextScheduler:
        self.block_manager = self._new_block_manager()
        return ContextScheduler(self.sched_config, self.parallel_config, self.block_manager)

    def clear_migrated_blocks_callback(self, migrated_request: Any) -> None:
        # The job's end has freed the blocks, or a restart has removed them.
        if migrated_request.req.request_id in self.block_manager.block_table:
            super().clear_migrated_blocks_callback(migrated_request)

    def discard(self, request: JobRequest) -> None:
        """Free the blocks of an ended request, unless a step writes into them. A copy may still
        read them, but its result is not used.
        """
        if request in self.scheduler.waiting_queue:
            self.scheduler.waiting_queue.remove(request)
        elif self._is_computing(request):
            self.scheduler.forget_unaccepted(request)
            request.is_finished = True  # Upstream frees finished requests after its step.
        else:
            self.scheduler.forget_unaccepted(request)
            self._free_blocks_of(request)

    @property
    def queued(self) -> int:
        return len(self.scheduler.waiting_queue)

    @property
    def running(self) -> int:
        return sum(map(len, self.batches_in_pipeline))

    @property
    def full(self) -> bool:
        return False  # New prompts wait only for earlier prompts.


class DecodingStage(_RestartableStage, DecodingStageLLMEngine):  # type: ignore[misc]  # Upstream has no types.
    name = Stage.DECODING
    scheduler: DecodingScheduler

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Called with a request without blocks that cannot continue, though the stage can.
        self.on_failed: Callable[[JobRequest, str], None]

    def _get_scheduler(self) -> DecodingScheduler:
        self.block_manager = self._new_block_manager()
        self.block_manager.on_swap_full = self._swap_full
        return DecodingScheduler(
            self.sched_config, self.parallel_config, self.block_manager, self._migrate_blocks
        )

    def _swap_full(self, request: JobRequest) -> None:
        self.scheduler.stale = True
        self.on_failed(request, "no room is left, not even in swap space (--swap-space)")

    async def _migrate_blocks(self, migrating_req: Any) -> None:
        request: JobRequest = migrating_req.req
        if isinstance(migrating_req, Reservation):
            self._grant(request)
            return
        try:
            await super()._migrate_blocks(migrating_req)
        except RayTaskError as error:
            log.warning(
                "the blocks of request %s could not be copied: %s",
                request.request_id,
                cause_of(error),
            )
            self.block_manager.free_blocks(request.request_id)
            self.clear_migrated_blocks_callback(migrating_req)
            if not request.ended:
                self.on_failed(request, f"its blocks could not be copied: {cause_of(error)}")
        else:
            request.stage = Stage.DECODING
            if request.ended:
                self._free_blocks_of(request)
        self.scheduler.stale |= request.ended

    def _grant(self, request: JobRequest) -> None:
        request.reserved = self.block_manager.pages.allocate(
            self.block_manager.get_num_blocks_needed(request)
        )
        assert request.reserved is not None, "upstream's scheduler accepts what there is room for"
        self.scheduler.stale = True
        # The waiting call may have been cancelled, and is about to abort.
        if request.granted is not None and not request.granted.done():
            request.granted.set_result(None)

    async def reserve(self, request: JobRequest) -> None:
        """Reserve blocks for the whole history, in the order of the queue.

        Raises:
            JobEnded: the request ended during the wait.
        """
        request.granted = asyncio.get_running_loop().create_future()
        self.scheduler.unaccepted_queue.append(Reservation(request))
        await request.granted
        # Writes into the pages bypass the workers' queue, so they must wait for copies that still
        # read these blocks.
        await self.block_manager.swapped_out()

    def take_up(self, request: JobRequest, kv_tokens: int) -> None:
        assert request.reserved is not None, f"job {request.request_id} has no blocks reserved"
        request.resume(kv_tokens)
        self.block_manager.adopt(request, request.reserved)
        request.reserved = None
        if request not in self.scheduler.waiting_queue:
            self.scheduler.waiting_queue.append(request)

    def discard(self, request: JobRequest) -> None:
        """Free the blocks of an ended request, unless a step uses them."""
        if request.granted is not None and not request.granted.done():
            request.granted.set_exception(
                JobEnded(f"job {request.request_id} ended before it got blocks")
            )
        if self._is_computing(request):
            request.is_finished = True  # Upstream frees finished requests after its step.
            return
        self.scheduler.forget(request)
        self._free_blocks_of(request)
        if request.reserved is not None:
            self.block_manager.pages.release(request.reserved)
            request.reserved = None

    @property
    def queued(self) -> int:
        scheduler = self.scheduler
        return int(self.bridge_queue.qsize()) + sum(
            map(
                len,
                (
                    scheduler.unaccepted_queue,
                    scheduler.waiting_queue,
                    scheduler.swapped_queue,
                ),
            )
        )

    @property
    def running(self) -> int:
        return int(self.scheduler.get_processing_num_requests())

    @property
    def full(self) -> bool:
        """Return whether every batch is full, or blocks run short."""
        scheduler, blocks = self.scheduler, self.block_manager
        if self.running >= self.sched_config.max_batch_size * len(scheduler.batch_queues):
            return True
        # First request in the order of upstream.
        first = next(iter(scheduler.unaccepted_queue), None)
        return bool(scheduler.swapped_queue) or (
            first is not None
            and blocks.get_num_blocks_needed(first.req) > blocks.get_num_avail_gpu_blocks()
        )
