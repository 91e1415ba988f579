"""DistServe's requests and schedulers, subclassed for jobs. Import after `upstream.load`."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from distserve.context_stage_scheduler import ContextStageFCFSScheduler
from distserve.decoding_stage_scheduler import DecodingStageFCFSScheduler
from distserve.request import Request, SamplingParams

from distserve_patches.jobs import Job, Stage

# Weight of the newest step in the average time of a step.
_NEWEST = 0.1


class JobRequest(Request):  # type: ignore[misc]  # Upstream has no types.
    """Upstream's request with its job, and the stage whose blocks it holds."""

    def __init__(self, job: Job, stage: Stage) -> None:
        tokens = 1 if job.prefill_only else job.max_new_tokens
        super().__init__(
            time.time(),
            job.id,
            "",
            job.history,
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens),
        )
        self.job = job
        # Stage whose blocks the request uses; DECODING from the copy of its blocks on.
        self.stage = stage
        # The tokens are dropped; the blocks are free, or will be after the step that uses them.
        self.ended = False
        self.replayed = False  # The newest token was known before.
        self.reserved: list[int] | None = None  # Unused blocks at the decoding stage.
        self.granted: asyncio.Future[None] | None = None  # Set with `reserved`.
        self._forced: deque[int] = deque()

    def resume(self, kv_tokens: int) -> None:
        """Continue from the KV of the first `kv_tokens` tokens of the history. Later tokens are
        decoded again, and each result is replaced by the known token.
        """
        history = self.job.history
        self.prompt_token_ids = history[:kv_tokens]
        self.generated_token_ids = [history[kv_tokens]]
        self.generated_tokens = [""]
        self._forced.extend(history[kv_tokens + 1 :])
        self.sampling_params.max_tokens = len(history) - kv_tokens + self.job.max_new_tokens

    def add_generated_token(self, token: str, token_id: int) -> None:
        self.replayed = bool(self._forced)
        super().add_generated_token(token, self._forced.popleft() if self._forced else token_id)


class Reservation:
    """An entry without blocks in the decoding stage's queue, in place of a request from the context
    stage.
    """

    def __init__(self, request: JobRequest) -> None:
        self.req = request


@dataclass
class StepTime:
    average_s: float = 0.0

    def observe(self, step_s: float) -> None:
        self.average_s += _NEWEST * (step_s - self.average_s) if self.average_s else step_s


class ContextScheduler(ContextStageFCFSScheduler):  # type: ignore[misc]  # Upstream has no types.
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.step_time = StepTime()
        self._begun_s: deque[float] = deque()

    def get_next_batch_and_pop(self) -> Any:
        batch = super().get_next_batch_and_pop()
        if len(batch):
            self._begun_s.append(time.perf_counter())
        return batch

    def on_finish_requests(self, batch: Any) -> None:
        self.step_time.observe(time.perf_counter() - self._begun_s.popleft())
        super().on_finish_requests(batch)

    def forget_unaccepted(self, request: JobRequest) -> None:
        if request in self.unaccepted_queue:
            self.unaccepted_queue.remove(request)


class DecodingScheduler(DecodingStageFCFSScheduler):  # type: ignore[misc]  # Upstream has no types.
    """Upstream's queues, with removal of requests.

    Upstream puts everything accepted into its waiting queue, even requests that have ended or only
    reserve blocks. `stale`: the queues must be swept before the next batch.
    """

    unaccepted_queue: list[Any]
    waiting_queue: list[JobRequest]
    swapped_queue: list[JobRequest]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stale = False
        self.step_time = StepTime()
        self._begun_s = [0.0] * len(self.batch_queues)

    async def add_request(self, migrating_req: Any) -> None:
        if not migrating_req.req.ended:
            await super().add_request(migrating_req)

    def get_next_batch(self) -> Any:
        if self.stale:
            self.waiting_queue = [
                request
                for request in self.waiting_queue
                if not request.ended and request.reserved is None
            ]
            self.swapped_queue = [request for request in self.swapped_queue if not request.ended]
            self.stale = False
        batch = super().get_next_batch()
        if self.swapped_queue and self.waiting_queue and not self.get_processing_num_requests():
            batch = self._admit_waiting_first()
        while len(self.waiting_queue) > 1 and not self.get_processing_num_requests():
            batch = self._swap_out_last_waiting()
        self._begun_s[self.cur_index] = time.perf_counter()
        return batch

    def _admit_waiting_first(self) -> Any:
        """Admit waiting requests before swapped ones. Upstream lets no request pass a swapped one,
        which may not fit beside the blocks of the waiting requests.
        """
        swapped, self.swapped_queue = self.swapped_queue, []
        self.cur_index -= 1
        batch = super().get_next_batch()
        self.swapped_queue = swapped + self.swapped_queue
        return batch

    def _swap_out_last_waiting(self) -> Any:
        """Swap out the last waiting request: waiting requests may own all blocks while the first
        needs one more, and upstream swaps out only computing requests.
        """
        request = self.waiting_queue.pop()
        self.swapped_queue.append(request)
        self.block_manager.swap_out_requests([request])
        return self._admit_waiting_first()

    def pop_finished_requests(self) -> Any:
        begun_s = self._begun_s[(self.cur_index + 1) % len(self._begun_s)]
        self.step_time.observe(time.perf_counter() - begun_s)
        return super().pop_finished_requests()

    def _check_add_to_cur_batch(self, request: JobRequest) -> bool:
        if request.ended:  # No swap space was left for the request.
            return False
        if not self.waiting_queue or self.waiting_queue[0] is not request:
            return bool(super()._check_add_to_cur_batch(request))
        # Upstream would count the request twice, as waiting and as added, and never admit a prompt
        # above half of all blocks.
        del self.waiting_queue[0]
        fits = bool(super()._check_add_to_cur_batch(request))
        self.waiting_queue.insert(0, request)
        return fits

    def forget(self, request: JobRequest) -> None:
        """Remove a request, outside of a computing batch, from every queue."""
        self.unaccepted_queue = [
            entry for entry in self.unaccepted_queue if entry.req is not request
        ]
        for queue in (
            self.waiting_queue,
            self.swapped_queue,
            *(batch.requests for batch in self.batch_queues),
        ):
            if request in queue:
                queue.remove(request)
