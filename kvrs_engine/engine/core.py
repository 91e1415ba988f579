"""The loop of the embedded engine: admit, pull, compute, emit.

Scheduler and page manager run on the event loop only; the computing thread gets chunks and tensors.
So no lock is needed, and a page changes its owner only between two batches.
"""

import asyncio
import collections.abc
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
from torch import Tensor

from kvrs.errors import RanksLostError, TransferError
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import FetchReport
from kvrs.protocol.openai.chunks import NOT_A_NUMBER
from kvrs.protocol.pages import Cell, TrafficClass
from kvrs.text.output import TextDelta
from kvrs.transfer.puller import RecentReports
from kvrs_engine.engine.fetching import PageFetcher
from kvrs_engine.engine.hooks import Batch, DraftSource, StepHook
from kvrs_engine.engine.requests import GenerationRun, StepOutput
from kvrs_engine.engine.runs import RunCore
from kvrs_engine.engine.worker import ModelWorker
from kvrs_engine.scheduling.admission_wait import AdmissionWaitEstimator
from kvrs_engine.scheduling.fair_queue import order
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_engine.scheduling.sequences import Chunk, Pull, Sequence, SequencePhase, pages_for
from kvrs_engine.scheduling.sources import PullSource, next_source
from kvrs_engine.scheduling.step_times import StepTimes


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A running batch."""

    batch: Batch
    began_s: float
    outputs: "asyncio.Future[dict[Sequence, list[StepOutput]]]"


class EngineCore(RunCore):
    """Drives one worker: admits, pulls, batches and emits tokens."""

    def __init__(
        self,
        worker: ModelWorker,
        scheduler: BatchScheduler,
        pages: PageManager,
        fetcher: PageFetcher,
        *,
        clock: Callable[[], float],
        lease_s: float,
        prefill: PrefillTable,
        hooks: Iterable[StepHook] = (),
        drafts: DraftSource | None = None,
        batches: int = 1,
    ) -> None:
        """`drafts` is used as a hook too. `batches` is the number of concurrent batches, each in
        its own thread.
        """
        super().__init__(clock, hooks if drafts is None else [*hooks, drafts])
        self._drafts = drafts
        self._batches = batches
        self._in_flight: list[_Flight] = []  # Running batches in order of begin.
        # Batches that failed with lost ranks, until the worker can compute again: other ranks may
        # still write into their pages.
        self._lost_batches: list[Batch] = []
        # Number of pages with KV of each stream when cells were lost.
        self.missing_pages: dict[StreamId, int] = {}
        self.held_pages: dict[StreamId, int] = {}  # Number of these pages that an agent has.
        self.replicated_pages: dict[StreamId, int] = {}  # Number of pages that come with a loan.
        # Lost cells by the base of a page, until all runs have restarted.
        self._lost_cells: dict[int, frozenset[Cell]] = {}
        self.worker = worker
        self.scheduler = scheduler
        self.pages = pages
        self.prefill = prefill
        self.step_times = StepTimes(prefill)
        self._lease_s = lease_s
        self.admission_wait = AdmissionWaitEstimator()
        self._fetcher = fetcher
        self._wake = asyncio.Event()
        self._pulls: dict[Sequence, asyncio.Task[None]] = {}
        # Transfers into the pages of restarted sequences that had begun before the restart.
        self._coming: dict[Sequence, asyncio.Task[None]] = {}
        self.computed_tokens = 0  # Number of computed tokens since the start.
        self.fetched_pages = 0  # Number of pages fetched from peers since the start.
        self.recent_fetches = RecentReports[FetchReport](clock)
        # Lease on the pages of an aborted run: its stream may fetch them from elsewhere.
        self.keep_aborted_s = 0.0
        self.is_draining = False  # The instance reports that it is about to end.
        self._bug: BaseException | None = None  # An error that `run` raises.
        self._thread = ThreadPoolExecutor(batches, thread_name_prefix="worker")

    def _prepare(self, run: GenerationRun) -> None:
        for hook in self.hooks:
            hook.place(run.sequence, self._runs)

    def _begin(self, run: GenerationRun) -> None:
        self.scheduler.add(run.sequence)
        self.wake()

    def _cancel(self, run: GenerationRun) -> None:
        retain_until_s = self._clock() + self.keep_aborted_s if self.keep_aborted_s else None
        self._end(run, None, retain_until_s=retain_until_s)
        self.wake()

    def fail(self, error: BaseException) -> None:
        """Make `run` fail with this error."""
        self._bug = error
        self.wake()

    def lose_cells(self, cells: Mapping[int, frozenset[Cell]]) -> None:
        """Handle the loss of these cells of all pages, by the base of a page: every run restarts in
        the same attempt.
        """
        # Runs that still lack cells of an earlier loss keep their count of missing pages.
        size, before = self.pages.page_size_tokens, self.missing_pages
        self.missing_pages = {
            sequence.stream: missing
            for sequence in self._runs
            if (
                missing := max(
                    pages_for(sequence.computed_tokens, size), before.get(sequence.stream, 0)
                )
            )
        }
        self.held_pages = {
            run.sequence.stream: min(held, self.missing_pages.get(run.sequence.stream, 0))
            for run in self._runs.values()
            if (held := max(self._held_by_agents(run).values(), default=0))
        }
        self.replicated_pages = {
            run.sequence.stream: count
            for run in self._runs.values()
            if (count := max((hook.replicated(run) for hook in self.hooks), default=0))
        }
        for base, gone in cells.items():
            self._lost_cells[base] = self._lost_cells.get(base, frozenset()) | gone
        self.wake()

    def wake(self) -> None:
        """Wake the loop to look for work."""
        self._wake.set()

    @property
    def batches_in_flight(self) -> int:
        return len(self._in_flight)

    def queue_delay_s(self) -> float:
        """Predicted time until a new request starts its prefill: the longer of the time of the
        queued work, by the table and what steps take of it, and, if the engine is full, the wait
        for admission. While ranks re-form, the time counts from the end of the re-forming.
        """
        return max(
            self.scheduler.queued_s(self.prefill) * (self.step_times.slowness or 1.0),
            self.admission_wait.expected_s(
                self._clock(), self.scheduler.waiting, self.scheduler.running
            ),
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while self._bug is None:
                if self._lost_cells and not self._in_flight:
                    self._restart_runs()
                self.pages.expire(self._clock())
                if all(hook.admits() for hook in self.hooks):
                    for pull in self.scheduler.admit():
                        self._start_pull(pull)
                self.admission_wait.observe(
                    self._clock(), self.scheduler.departures, self.scheduler.full
                )
                if self._lost_batches and not self._in_flight:
                    await loop.run_in_executor(self._thread, self._wait_for_ranks)
                    for batch in self._lost_batches:
                        self.scheduler.abandon(batch)
                    self._lost_batches.clear()
                    continue
                self._launch()
                if len(self._in_flight) == self._batches or (
                    self._in_flight and self._in_flight[0].outputs.done()
                ):
                    await self._land()
                else:
                    await self._sleep()
            raise self._bug
        finally:
            for task in self._pulls.values():
                task.cancel()
            for flight in self._in_flight:
                # No task awaits the result any more.
                if not flight.outputs.cancel() and not flight.outputs.cancelled():
                    flight.outputs.exception()
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _launch(self) -> None:
        """Start batches until none is ready or the limit of batches in flight is reached."""
        drafts, proposals = self._drafts, None
        if drafts is not None and (drafts.active or any(run.drafts for run in self._runs.values())):
            proposals = partial(self._propose, drafts)
        while (
            len(self._in_flight) < self._batches
            and not (self._lost_cells or self._lost_batches)
            and (batch := self.scheduler.next_batch(proposals))
        ):
            for hook in self.hooks:
                hook.before_batch(batch)
            began_s = self._clock()
            outputs = asyncio.get_running_loop().run_in_executor(self._thread, self._compute, batch)
            self._in_flight.append(_Flight(batch, began_s, outputs))
            if self._batches > 1:
                outputs.add_done_callback(lambda _: self.wake())

    def _propose(
        self, drafts: DraftSource, sequence: Sequence, most: int
    ) -> collections.abc.Sequence[int]:
        run = self._runs[sequence]
        # The last wanted token needs no draft after it.
        most = min(most, run.max_tokens - run.produced_tokens - 1)
        return run.drafts_ahead(most) or (drafts.propose(run, most) if drafts.active else ())

    async def _land(self) -> None:
        """Wait for the oldest batch in flight, and emit its tokens."""
        flight = self._in_flight[0]
        try:
            outputs = await flight.outputs
        except RanksLostError:
            del self._in_flight[0]
            self._lost_batches.append(flight.batch)
            return
        took_s = self._clock() - flight.began_s
        for hook in self.hooks:
            await hook.after_logits(flight.batch, took_s)
        del self._in_flight[0]
        self._take(flight.batch, outputs)
        # Let outputs reach their sockets before the next batch occupies the interpreter.
        await asyncio.sleep(0)
        self.step_times.note((chunk for _, chunk in flight.batch), self._clock() - flight.began_s)

    def _wait_for_ranks(self) -> None:
        for hook in self.hooks:
            hook.on_lost()

    def _restart_runs(self) -> None:
        """Restart every run from the remaining pages here and the pages at agents; no batch may be
        in flight.
        """
        lost, self._lost_cells = self._lost_cells, {}
        runs = sorted(self._runs.values(), key=lambda run: order(run.sequence))
        for run in runs:
            old = run.sequence
            held = self._held_by_agents(run)
            self.scheduler.finish(old)
            for hook in self.hooks:
                hook.ended(run)
            run.sources = tuple(
                PullSource(agent, None, range(count), TrafficClass.RECOVERY)
                for agent, count in sorted(held.items(), key=lambda item: -item[1])
                if count
            )
            run.sequence, run.reported_pages = old.again([one.pages for one in run.sources]), 0
            coming = self._pulls.get(old) or self._coming.pop(old, None)
            if coming is not None:
                self._coming[run.sequence] = coming
            del self._runs[old]
            self._runs[run.sequence] = run
            for hook in self.hooks:
                hook.began(run)
            self.scheduler.add(run.sequence)
        # Pages that lost cells are no longer found by tag, so no other run gets them.
        bases = self.pages.bases
        self.pages.lose(lambda page: lost.get(bases[page], frozenset()))
        for hook in self.hooks:
            hook.on_restart()

    def _held_by_agents(self, run: GenerationRun) -> dict[InstanceId, int]:
        """Return the leading full pages at each agent, by its last answer; before the first answer,
        by the previous loss of cells or by the proxy.
        """
        agents = {target.agent for target in run.checkpoints}
        held = {
            source.instance: source.pages.stop
            for source in run.sources
            if source.instance in agents and source.pages.start == 0
        }
        for hook in self.hooks:
            for agent, pages in hook.held(run).items():
                held[agent] = max(pages, held.get(agent, 0))
        return held

    async def _sleep(self) -> None:
        """Wait for work, at most a second, so that leases expire in time; after an idle second,
        check the invariants.
        """
        self._wake.clear()
        try:
            async with asyncio.timeout(1.0):
                await self._wake.wait()
        except TimeoutError:
            self.pages.check()
            self.scheduler.check()

    def _compute(self, batch: Batch) -> dict[Sequence, list[StepOutput]]:
        """Run one forward pass and sample the next tokens; called in the computing thread."""
        logits = self.worker.execute([chunk for _, chunk in batch])
        outputs: dict[Sequence, list[StepOutput]] = {}
        end = 0
        for sequence, chunk in batch:
            if not chunk.logits:
                continue
            first, end = end, end + chunk.logits
            rows, drafts = logits[first:end], chunk.token_ids[len(chunk.token_ids) - chunk.drafts :]
            if drafts and rows.isnan().any():
                rows, drafts = _without_drafts(self.worker, chunk), ()
            # A run may have been aborted meanwhile.
            if (run := self._runs.get(sequence)) is not None:
                outputs[sequence] = run.step(rows, drafts)
        return outputs

    def _take(self, batch: Batch, outputs: dict[Sequence, list[StepOutput]]) -> None:
        """Apply a computed batch to the scheduler, and emit its tokens."""
        prefilled = self.scheduler.complete(
            batch,
            {
                sequence: [token_id for output in steps for token_id in output.token_ids]
                for sequence, steps in outputs.items()
            },
        )
        for sequence, chunk in batch:
            self.computed_tokens += len(chunk.token_ids)
            if (run := self._runs.get(sequence)) is not None:
                self._note_filled(run)
                if chunk.drafts and self._drafts is not None:
                    self._drafts.verified(run, chunk.drafts, len(outputs[sequence]) - 1)
        for sequence in prefilled:
            if (run := self._runs.get(sequence)) is not None:
                self._end(
                    run,
                    StepOutput([], TextDelta(""), "length"),
                    retain_until_s=self._clock() + self._lease_s,
                )
        for sequence, steps in outputs.items():
            run = self._runs.get(sequence)
            if run is None:
                continue
            *before, last = steps
            for output in before:
                run.outputs.put_nowait(output)
            if run.failure is not None:
                # A token whose logits are not numbers spoils all rows of its chunk, also earlier
                # ones.
                if run.failure_code == NOT_A_NUMBER:
                    self.pages.disown(run.sequence.pages)
                self._end(run, None)
            elif last.finish_reason is not None:
                self._end(run, last)
            else:
                run.outputs.put_nowait(last)

    def _note_filled(self, run: GenerationRun) -> None:
        full_pages = run.sequence.computed_tokens // self.pages.page_size_tokens
        # The number may fall after a preemption: pages are computed again.
        if full_pages != run.reported_pages:
            run.reported_pages = full_pages
            self._report_filled(run)

    def _end(
        self, run: GenerationRun, output: StepOutput | None, retain_until_s: float | None = None
    ) -> None:
        self.scheduler.finish(run.sequence, retain_until_s)
        self._coming.pop(run.sequence, None)
        super()._end(run, output)

    def _start_pull(self, pull: Pull) -> None:
        # An aborted sequence is never admitted, so the run exists.
        sequence, run = pull.sequence, self._runs[pull.sequence]
        run.fetched_pages = 0
        task = asyncio.get_running_loop().create_task(self._pull(pull, list(run.sources)))
        self._pulls[sequence] = task
        task.add_done_callback(partial(self._pull_ended, sequence))

    def _pull_ended(self, sequence: Sequence, task: asyncio.Task[None]) -> None:
        del self._pulls[sequence]
        if not task.cancelled() and (bug := task.exception()) is not None:
            # Otherwise the stream would wait for ever.
            self.fail(bug)

    async def _pull(self, pull: Pull, sources: list[PullSource]) -> None:
        """Fetch pages from the sources in order, each from where the previous one ended. Pages that
        do not arrive are computed in the same attempt.
        """
        sequence = pull.sequence
        if (coming := self._coming.pop(sequence, None)) is not None:
            # Wait for the transfer from before the restart, to fetch no page twice.
            await asyncio.wait({coming})
            if sequence.phase is not SequencePhase.FINISHED:
                own = sequence.pages
                sequence.gone = {
                    index: self.pages.damaged.gone(own[index]) for index in sequence.gone
                }
        arrived, tail = range(pull.first_page, pull.first_page), False
        step = next_source(sources, pull, arrived.stop)
        while step is not None and sequence.phase is not SequencePhase.FINISHED:
            source, wanted = step
            try:
                result = await self._fetcher.fetch(pull, source, wanted)
            except TransferError:
                break  # Cells of the pages were lost during the transfer.
            arrived, tail = range(wanted.start, wanted.start + result.full_pages), result.tail
            if (step := next_source(sources, pull, arrived.stop)) is not None:
                self._pulled(sequence, arrived, more_from=step[1].start)
                arrived = range(arrived.stop, arrived.stop)
        self._pulled(sequence, arrived, tail=tail)

    def _pulled(
        self,
        sequence: Sequence,
        arrived: range,
        *,
        tail: bool = False,
        more_from: int | None = None,
    ) -> None:
        run, fetched = self._runs.get(sequence), len(arrived) + tail
        if sequence.phase is not SequencePhase.FINISHED:
            self.fetched_pages += fetched
        if run is not None:
            run.fetched_pages += fetched
            if more_from is None and sequence.is_recovery:
                self.recent_fetches.note(run.fetch_report(self.pages.page_size_tokens))
        self.scheduler.pulled(sequence, arrived, tail=tail, more_from=more_from)
        self.wake()


def _without_drafts(worker: ModelWorker, chunk: Chunk) -> Tensor:
    """Compute the logits `[1, vocab]` of a chunk without its drafts, after the logits of a draft
    were not numbers: NaNs spoil earlier rows and, left in the page, later steps.
    """
    token_ids = [chunk.token_ids[0]] * len(chunk.token_ids)
    return worker.execute([msgspec.structs.replace(chunk, token_ids=token_ids)])[:1]
