"""The runs of DistServe's two instances: their jobs at the engine, their tokens and pages.

The module needs no DistServe. Both cores share one engine: a run that arrives at the decode
instance without KV goes through the context stage.
"""

import asyncio
import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from distserve_patches.jobs import Job, JobEnded, Stage
from kvrs.errors import RequestError, TransferError
from kvrs.profiles.tables import PrefillTable
from kvrs.text.output import TextDelta
from kvrs_engine.engine.fetching import PageFetcher
from kvrs_engine.engine.requests import GenerationRun, Sampled, StepOutput
from kvrs_engine.engine.runs import RunCore
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Pull, Sequence
from kvrs_engine.scheduling.sources import next_source

if TYPE_CHECKING:  # The module needs DistServe.
    from distserve_patches.engine import RecoverableEngine

log = logging.getLogger(__name__)

_JOB_IDS = itertools.count()


class PrefillQueue:
    """The unfinished prompts of the context stage, with their predicted times."""

    def __init__(self) -> None:
        self.prefill: PrefillTable | None = None  # None until the measurement.
        self._waiting: dict[Job, float] = {}

    @property
    def delay_s(self) -> float:
        """Predicted time until a prompt that arrives now starts its prefill."""
        return sum(self._waiting.values())

    def seconds(self, tokens: int) -> float:
        """Predicted time of a prefill alone."""
        return 0.0 if self.prefill is None else self.prefill.seconds_for(tokens)

    def add(self, job: Job) -> None:
        self._waiting[job] = self.seconds(len(job.history))

    def remove(self, job: Job) -> None:
        """Remove a job that was computed or aborted, at most once."""
        self._waiting.pop(job, None)


class _JobRun:
    """One run with the engine's job, and the sink of the job."""

    def __init__(self, core: "StageCore", run: GenerationRun, *, prefill_only: bool) -> None:
        self.core = core
        self.run = run
        self.ended = False
        self.decodes = False  # The decoding stage has the KV and makes the tokens.
        sequence = run.sequence
        left = max(1, run.max_tokens - run.produced_tokens)
        self.job = Job(next(_JOB_IDS), list(sequence.token_ids), left, prefill_only, self)

    def prefilled(self) -> None:
        self.core.prefilled(self)

    def token(self, token_id: int) -> bool:
        return self.core.take(self, token_id)

    def failed(self, stage: Stage, cause: str) -> None:
        self.core.fail(self, f"the {stage} stage lost this stream: {cause}")


class StageCore(RunCore):
    """The common part of the cores of both stages."""

    prefill_only: bool

    def __init__(
        self,
        engine: "RecoverableEngine",
        queue: PrefillQueue,
        *,
        clock: Callable[[], float],
        lease_s: float,
    ) -> None:
        super().__init__(clock)
        self.job_runs: dict[Sequence, _JobRun] = {}
        self.ended_runs = 0
        self.engine = engine
        self.queue = queue
        self.lease_s = lease_s

    def _prepare(self, run: GenerationRun) -> None:
        job_run = _JobRun(self, run, prefill_only=self.prefill_only)
        if (why := self.engine.refusal(job_run.job)) is not None:
            raise RequestError(why, param="prompt")
        self.job_runs[run.sequence] = job_run

    def _begin(self, run: GenerationRun) -> None:
        self.compute(self.job_runs[run.sequence])

    def _cancel(self, run: GenerationRun) -> None:
        job_run = self.job_runs[run.sequence]
        self._end(run, None)
        self.engine.abort(job_run.job)

    def _end(self, run: GenerationRun, output: StepOutput | None) -> None:
        job_run = self.job_runs.pop(run.sequence)
        job_run.ended = True
        self.ended_runs += 1
        self.queue.remove(job_run.job)
        super()._end(run, output)

    def fail(self, job_run: _JobRun, cause: str) -> None:
        """End a run that the engine lost, unless it has ended."""
        if not job_run.ended:
            run = job_run.run
            log.warning("run lost", extra={"stream": run.sequence.stream, "cause": cause})
            run.failure = cause
            self._end(run, None)

    def compute(self, job_run: _JobRun) -> None:
        """Let the context stage compute the history."""
        pages = self.engine.stage(Stage.CONTEXT).pages
        job_run.run.sequence.extend_tags(pages.page_size_tokens)
        self.queue.add(job_run.job)
        self.engine.begin(job_run.job)

    def retain(self, job_run: _JobRun) -> None:
        """Lease the KV at the context stage, so that tags and stream find it."""
        sequence, pages = job_run.run.sequence, self.engine.stage(Stage.CONTEXT).pages
        blocks = self.engine.blocks(job_run.job, Stage.CONTEXT)
        # Equal pages of another stream may be registered: these are found, and kept.
        full = [
            pages.register(block, tag) for block, tag in zip(blocks, sequence.tags, strict=False)
        ]
        tokens = sequence.history_tokens
        kept = [*full, *blocks[len(full) : -(-tokens // pages.page_size_tokens)]]
        pages.retain(sequence.stream, kept, tokens, self._clock() + self.lease_s)

    @abstractmethod
    def prefilled(self, job_run: _JobRun) -> None:
        """Handle that the context stage's blocks hold the KV of the history."""

    @abstractmethod
    def take(self, job_run: _JobRun, token_id: int) -> bool:
        """Apply one output token of the job. Return whether more tokens are wanted."""


class PrefillCore(StageCore):
    """Computes prompts and leases their KV."""

    prefill_only = True

    def prefilled(self, job_run: _JobRun) -> None:
        sequence = job_run.run.sequence
        self.retain(job_run)
        sequence.computed_tokens = sequence.history_tokens
        self._report_filled(job_run.run)
        self._end(job_run.run, StepOutput([], TextDelta(""), "length"))

    def take(self, job_run: _JobRun, token_id: int) -> bool:
        return False


class DecodeCore(StageCore):
    """Produces tokens from KV of peers, or through the context stage of the same server."""

    prefill_only = False

    def __init__(
        self,
        engine: "RecoverableEngine",
        queue: PrefillQueue,
        *,
        clock: Callable[[], float],
        lease_s: float,
    ) -> None:
        super().__init__(engine, queue, clock=clock, lease_s=lease_s)
        self.fetcher: PageFetcher | None = None  # Fetcher of the running stage.
        self._parked: list[_JobRun] = []  # Runs that wait for the context stage, which is down.
        # Set to the unexpected error that ended a pull.
        self.bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pulls: set[asyncio.Task[None]] = set()

    @property
    def _pages(self) -> PageManager:
        return self.engine.stage(Stage.DECODING).pages

    @property
    def parked(self) -> int:
        """Number of runs that wait for the context stage."""
        return sum(not job_run.ended for job_run in self._parked)

    def stage_changed(self, stage: Stage, *, alive: bool) -> None:
        """Begin or fail the parked runs, which the engine does not have."""
        if alive == (stage is Stage.CONTEXT):
            parked, self._parked = self._parked, []
            for job_run in parked:
                if alive and not job_run.ended:
                    self.compute(job_run)
                elif not alive:
                    self.fail(job_run, "the decoding stage is down")

    def compute(self, job_run: _JobRun) -> None:
        # The context stage returns soon, or the client gives up: other instances may lack it too.
        if self.engine.stage(Stage.CONTEXT).alive:
            super().compute(job_run)
        elif self.engine.stage(Stage.DECODING).alive:
            self._parked.append(job_run)
        else:
            self.fail(job_run, "both stages are down")

    def _begin(self, run: GenerationRun) -> None:
        job_run = self.job_runs[run.sequence]
        if run.sources:
            pull = asyncio.get_running_loop().create_task(self._take_over(job_run))
            self._pulls.add(pull)
            pull.add_done_callback(self._pull_ended)
        else:
            self.compute(job_run)

    def prefilled(self, job_run: _JobRun) -> None:
        self.queue.remove(job_run.job)
        self.retain(job_run)

    def take(self, job_run: _JobRun, token_id: int) -> bool:
        run, sequence = job_run.run, job_run.run.sequence
        if job_run.decodes:
            # This step has read the previous token, and written its KV.
            self._note_filled(job_run)
        job_run.decodes = True
        sequence.token_ids.append(token_id)
        output = run.take(Sampled(token_id), run.produced_tokens)
        if output.finish_reason is not None:
            self._end(run, output)
            return False
        run.outputs.put_nowait(output)
        return True

    def _note_filled(self, job_run: _JobRun) -> None:
        """Register the pages that have become full since the last report."""
        run, sequence, pages = job_run.run, job_run.run.sequence, self._pages
        full_pages = len(sequence.token_ids) // pages.page_size_tokens
        if full_pages == run.reported_pages:
            return
        blocks = self.engine.blocks(job_run.job, Stage.DECODING)
        # A swap moves the pages to other blocks, which are registered anew.
        known = (
            run.reported_pages
            if blocks[: run.reported_pages] == sequence.pages[: run.reported_pages]
            else 0
        )
        sequence.extend_tags(pages.page_size_tokens)
        _register(pages, sequence, blocks, range(known, full_pages))
        sequence.computed_tokens = len(sequence.token_ids)
        run.reported_pages = full_pages
        self._report_filled(run)

    def _pull_ended(self, task: asyncio.Task[None]) -> None:
        self._pulls.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None and not self.bug.done():
            self.bug.set_exception(bug)

    async def _take_over(self, job_run: _JobRun) -> None:
        """Fetch the history's KV from peers into blocks of the decoding stage, and continue."""
        job, pages = job_run.job, self._pages
        try:
            blocks = await self.engine.reserve(job)
        except JobEnded:
            return
        job_run.run.sequence.extend_tags(pages.page_size_tokens)
        # The pins protect blocks while a peer's bytes arrive, even if the run is aborted.
        for block in blocks:
            pages.pin(block)
        try:
            arrived = await self._pull(job_run, blocks)
        except TransferError as error:
            # The workers could not take the pages. A dead stage has ended the run already.
            arrived = 0
            if not job_run.ended:
                self.fail(job_run, str(error))
                self.engine.abort(job)
        finally:
            pages.release(blocks)
        if not job_run.ended:
            self._continue_from(job_run, arrived)

    def _continue_from(self, job_run: _JobRun, arrived: int) -> None:
        """Continue from the KV of the first `arrived` tokens, unless a new computation of the whole
        history is faster.
        """
        run, sequence, pages = job_run.run, job_run.run.sequence, self._pages
        # The last known token is always read again, and gives the first new token.
        kv_tokens = min(arrived, sequence.history_tokens - 1)
        if kv_tokens == 0 or self._is_quicker_to_compute(sequence.history_tokens, kv_tokens):
            self.engine.abort(job_run.job)
            self.compute(job_run)
            return
        # The last token of the last whole page is written again before that page is registered.
        full_pages = kv_tokens // pages.page_size_tokens
        _register(pages, sequence, sequence.pages, range(full_pages))
        sequence.computed_tokens = full_pages * pages.page_size_tokens
        run.reported_pages = full_pages
        self._report_filled(run)
        job_run.decodes = True
        self.engine.take_up(job_run.job, kv_tokens)

    def _is_quicker_to_compute(self, history_tokens: int, kv_tokens: int) -> bool:
        """Return whether the context stage computes the history sooner than the decoding stage
        reads the tokens behind the KV, one per step.
        """
        context, step_s = self.engine.stage(Stage.CONTEXT), self.engine.stage(Stage.DECODING).step_s
        steps_s = (history_tokens - kv_tokens) * step_s
        return (
            context.alive
            and self.queue.delay_s + self.queue.seconds(history_tokens) < steps_s - step_s
        )

    async def _pull(self, job_run: _JobRun, blocks: list[int]) -> int:
        """Fetch the history from its sources, in page order.

        Returns:
            the number of leading tokens whose KV has arrived.
        """
        sequence = job_run.run.sequence
        pull = _wanted(sequence, blocks, self._pages.page_size_tokens)
        assert self.fetcher is not None
        sources, held, tail = list(job_run.run.sources), 0, False
        step = next_source(sources, pull, held) if pull is not None else None
        # The decoding stage cannot compute a gap, so later pages are of no use.
        while pull is not None and step is not None and not job_run.ended and step[1].start == held:
            source, wanted = step
            result = await self.fetcher.fetch(pull, source, wanted)
            held, tail = held + result.full_pages, result.tail
            step = next_source(sources, pull, held)
        return held * self._pages.page_size_tokens + (pull.tail_tokens if pull and tail else 0)


def _wanted(sequence: Sequence, blocks: list[int], page_size_tokens: int) -> Pull | None:
    """A pull of the whole history; None: no full page, and no partial page at a peer."""
    full_pages, rest = divmod(sequence.history_tokens, page_size_tokens)
    sequence.pages = list(blocks)
    tail_index = full_pages if rest and sequence.pull_tail else None
    if not full_pages and tail_index is None:
        return None
    return Pull(sequence, (range(full_pages),) if full_pages else (), tail_index, rest)


def _register(
    pages: PageManager, sequence: Sequence, blocks: list[int], which: Iterable[int]
) -> None:
    for index in which:
        pages.register(blocks[index], sequence.tags[index])
    sequence.pages = list(blocks)
