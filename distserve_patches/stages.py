"""DistServe's two stages, subclassed: a job can be ended at any moment, and a stage that died can live again.

Import after `upstream.load`. Where a request is, and whose blocks it holds:

    begin ──▶ waiting ──▶ in a batch ──▶ bridge, unaccepted ──▶ being copied ──▶ waiting ──▶ in a batch ◀──▶ swapped
              └ none ┘    └──────── blocks of the context stage ───────────┘  ┌──┘    blocks of the decoding stage
                                                                   reserve, take_up

Blocks that a step or a copy writes into are freed when it is done; all others at once.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from distserve.single_stage_engine import ContextStageLLMEngine, DecodingStageLLMEngine, SingleStageLLMEngine
from ray.exceptions import RayError, RayTaskError

from distserve_patches.blocks import PagedBlockManager
from distserve_patches.jobs import JobEnded, Stage
from distserve_patches.requests import ContextLine, DecodingLine, JobRequest, Reservation
from distserve_patches.watch import Worker, cause_of, first_death, locate

log = logging.getLogger(__name__)


class _NoText:
    """Upstream decodes every token by itself, which is not what the tokens mean together; the server makes the text."""

    @staticmethod
    def decode(_: int) -> str:
        return ""


class _LivingStage(SingleStageLLMEngine):  # type: ignore[misc]  # Upstream has no types.
    """What both stages share. One object serves every life of its stage."""

    name: Stage
    block_manager: PagedBlockManager
    workers: list[list[Any]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tokenizer = _NoText()
        self.located: list[Worker] = []
        self._helpers: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        """Start new workers, until the stage could serve.

        Raises:
            RayError: it did not come to that.
        """
        self.workers = []
        self.located = []
        self.batches_in_pipeline: list[Any] = []
        self.batches_ret_futures: list[Any] = []
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        start = asyncio.create_task(self.initialize())
        try:
            # Ranks wait for each other while they start: when one dies, the others may never answer.
            await asyncio.wait({start, self.death}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                raise RayError(self.death.result())
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        start.result()

    def die(self, cause: str) -> None:
        if not self.death.done():
            self.death.set_result(cause)

    def end_workers(self) -> None:
        """What is left of a stage that lost a worker can neither compute nor be joined by another."""
        for helper in self._helpers:
            helper.cancel()
        for actor in (actor for rank in self.workers for actor in rank):
            ray.kill(actor)

    async def _init_workers(self) -> None:
        await super()._init_workers()
        self.located = await locate([actor for rank in self.workers for actor in rank])
        self._help(self._watch())

    async def _watch(self) -> None:
        self.die(await first_death(self.located))

    async def _expect(self, references: list[Any]) -> None:
        try:
            await asyncio.gather(*references)
        except RayError as error:
            self.die(cause_of(error))

    def _help(self, work: Any) -> None:
        helper = asyncio.create_task(work)
        self._helpers.add(helper)
        helper.add_done_callback(self._helpers.discard)

    async def _step(self) -> None:
        try:
            await super()._step()
        except RayError as error:
            self.die(cause_of(error))
            # Upstream's loops do not end each other; they wait here until all of them are cancelled.
            await asyncio.Future()

    def _remote_call_all_workers_async(self, func_name: str, *args: Any) -> Any:
        if func_name == "clear_request_resource_batched":
            # Upstream sends the requests themselves after every step, even when there are none.
            for request in args[0]:
                super()._remote_call_all_workers_async("clear_request_resource", request.request_id)
            return []
        if func_name == "swap_blocks":
            # Workers remember swaps by what they are given, and look them up by id: copies of requests they would never find.
            requests, *rest = args
            references = super()._remote_call_all_workers_async(func_name, [request.request_id for request in requests], *rest)
            # Nobody waits for a swap, so nobody would hear that it failed.
            self._help(self._expect(references))
            return references
        return super()._remote_call_all_workers_async(func_name, *args)

    def _pages(self) -> PagedBlockManager:
        return PagedBlockManager(
            self.stage,
            self.num_gpu_blocks,
            self.num_cpu_blocks,
            self.model_config,
            self.parallel_config,
            self.cache_config,
            self._remote_call_all_workers_async,
        )

    def _computes(self, request: JobRequest) -> bool:
        return any(request in batch.requests for batch in self.batches_in_pipeline)

    def _free(self, request: JobRequest) -> None:
        if request.request_id in self.block_manager.block_table:
            self.block_manager.free_blocks(request.request_id)
            self._remote_call_all_workers_async("clear_request_resource", request.request_id)


class ContextStage(_LivingStage, ContextStageLLMEngine):  # type: ignore[misc]  # Upstream has no types.
    name = Stage.CONTEXT
    scheduler: ContextLine

    def _get_scheduler(self) -> ContextLine:
        self.block_manager = self._pages()
        return ContextLine(self.sched_config, self.parallel_config, self.block_manager)

    def clear_migrated_blocks_callback(self, migrated_request: Any) -> None:
        # The copy of a job that has ended finds them given back, or gone with the life that it copied from.
        if migrated_request.req.request_id in self.block_manager.block_table:
            super().clear_migrated_blocks_callback(migrated_request)

    def discard(self, request: JobRequest) -> None:
        """The request has ended. Its blocks stay while a step writes into them; nobody wants what a copy of them reads."""
        if request in self.scheduler.waiting_queue:
            self.scheduler.waiting_queue.remove(request)
        elif self._computes(request):
            self.scheduler.forget_unaccepted(request)
            request.is_finished = True  # Upstream frees what is finished after its step.
        else:
            self.scheduler.forget_unaccepted(request)
            self._free(request)

    @property
    def queued(self) -> int:
        return len(self.scheduler.waiting_queue)

    @property
    def running(self) -> int:
        return sum(map(len, self.batches_in_pipeline))


class DecodingStage(_LivingStage, DecodingStageLLMEngine):  # type: ignore[misc]  # Upstream has no types.
    name = Stage.DECODING
    scheduler: DecodingLine

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Called with a request that cannot go on, though the stage can; it holds no blocks any more.
        self.on_failed: Callable[[JobRequest, str], None]

    def _get_scheduler(self) -> DecodingLine:
        self.block_manager = self._pages()
        self.block_manager.on_swap_full = self._swap_full
        return DecodingLine(self.sched_config, self.parallel_config, self.block_manager, self._migrate_blocks)

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
            log.warning("the blocks of request %s could not be copied: %s", request.request_id, cause_of(error))
            self.block_manager.free_blocks(request.request_id)
            self.clear_migrated_blocks_callback(migrating_req)
            if not request.ended:
                self.on_failed(request, f"its blocks could not be copied: {cause_of(error)}")
        else:
            request.stage = Stage.DECODING
            if request.ended:
                self._free(request)
        self.scheduler.stale |= request.ended

    def _grant(self, request: JobRequest) -> None:
        request.reserved = self.block_manager.pages.allocate(self.block_manager.get_num_blocks_needed(request))
        assert request.reserved is not None, "upstream's line accepts what there is room for"
        self.scheduler.stale = True
        # Whoever waited may have been cancelled, and is about to say so.
        if request.granted is not None and not request.granted.done():
            request.granted.set_result(None)

    async def reserve(self, request: JobRequest) -> None:
        """Blocks for the whole history, when it is the request's turn and there is room.

        Raises:
            JobEnded: the request ended while it waited.
        """
        request.granted = asyncio.get_running_loop().create_future()
        self.scheduler.unaccepted_queue.append(Reservation(request))
        await request.granted
        # Whoever fills them does not wait in the workers' queue, behind what is still being copied out of them.
        await self.block_manager.swapped_out()

    def take_up(self, request: JobRequest, kv_tokens: int) -> None:
        assert request.reserved is not None, f"job {request.request_id} has no blocks reserved"
        request.resume(kv_tokens)
        self.block_manager.adopt(request, request.reserved)
        request.reserved = None
        if request not in self.scheduler.waiting_queue:
            self.scheduler.waiting_queue.append(request)

    def discard(self, request: JobRequest) -> None:
        """The request has ended. Its blocks stay while a step uses them."""
        if request.granted is not None and not request.granted.done():
            request.granted.set_exception(JobEnded(f"job {request.request_id} ended before it got blocks"))
        if self._computes(request):
            request.is_finished = True  # Upstream frees what is finished after its step.
            return
        self.scheduler.forget(request)
        self._free(request)
        if request.reserved is not None:
            self.block_manager.pages.release(request.reserved)
            request.reserved = None

    @property
    def queued(self) -> int:
        line = self.scheduler
        return int(self.bridge_queue.qsize()) + sum(map(len, (line.unaccepted_queue, line.waiting_queue, line.swapped_queue)))

    @property
    def running(self) -> int:
        return int(self.scheduler.get_processing_num_requests())
