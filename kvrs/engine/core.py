"""The one loop of an instance: admit, pull, compute, emit.

Scheduler and page manager are touched on the event loop only; the computing thread sees nothing but chunks and
tensors. So no lock is needed, and a page changes hands only between two batches.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvrs.engine.fencing import AttemptBook
from kvrs.engine.fetching import PageFetcher
from kvrs.engine.requests import Run, Sampled, StepOutput
from kvrs.engine.worker import Worker
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.scheduling.batches import BatchScheduler
from kvrs.scheduling.chunks import Chunk
from kvrs.scheduling.pace import Pace
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.places import PlaceWait
from kvrs.scheduling.sequences import Phase, Pull, Sequence
from kvrs.scheduling.sources import Source, next_source
from kvrs.text.output import TextDelta
from kvrs.transfer.peers import Peer
from kvrs.transfer.puller import PagePuller

Batch = list[tuple[Sequence, Chunk]]


class CheckpointHooks(Protocol):
    """What is told to whoever sends newly filled pages to agents. No call waits for anything, and none may fail."""

    def began(self, run: Run) -> None:
        """A run with checkpoints is about to be computed."""

    def filled(self, sequence: Sequence) -> None:
        """It has more full pages than before, computed, fetched or found here, or has them again after it was preempted.

        Called after a batch, while it owns them.
        """

    def ended(self, sequence: Sequence) -> None:
        """Nothing more is computed for it; its pages are only leased or cached from now on, if they are kept at all."""


class EngineCore:
    """Drives one worker. All methods run on the event loop."""

    def __init__(
        self,
        worker: Worker,
        scheduler: BatchScheduler,
        pages: PageManager,
        puller: PagePuller,
        registry: Mapping[InstanceId, Peer],
        *,
        clock: Callable[[], float],
        lease_s: float,
        prefill: PrefillTable,
        pace: Pace | None,
        checkpoints: CheckpointHooks | None = None,
    ) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self.pages = pages
        self.prefill = prefill
        self._clock = clock
        self._lease_s = lease_s
        self._pace = pace
        self._checkpoints = checkpoints
        self._places = PlaceWait()
        self._fetcher = PageFetcher(worker.pool, puller, registry)
        self._runs: dict[Sequence, Run] = {}
        self._attempts = AttemptBook()
        self._wake = asyncio.Event()
        self._pulls: set[asyncio.Task[None]] = set()
        self.keep_aborted_s = 0.0  # So long the pages of a run stay, which goes on elsewhere, for whoever fetches them.
        self._bug: BaseException | None = None  # It ended a pull, and is to end `run`.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")

    def submit(self, run: Run) -> None:
        """Queue a run; a lower attempt at the same stream is over from now on.

        Raises:
            FencedError: a higher attempt was already seen.
        """
        sequence = run.sequence
        self._attempts.admit(sequence.stream, sequence.attempt)
        self.fence({sequence.stream: sequence.attempt})
        if run.ending is not None:
            run.outputs.put_nowait(run.ending)
            return
        self._runs[sequence] = run
        if self._checkpoints is not None and run.checkpoints:
            self._checkpoints.began(run)
        self.scheduler.add(sequence)
        self.wake()

    def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> None:
        """Drop every run below the attempt named for its stream, and refuse such from now on."""
        self._attempts.fence(attempts)
        for run in [r for s, r in self._runs.items() if s.stream in attempts and s.attempt < attempts[s.stream]]:
            self.abort(run)

    def end_transfers(self, attempts: Mapping[StreamId, tuple[int, int]]) -> None:
        """Drop every run below the attempt named for its stream that still holds a slot, and refuse such from now on."""
        self._attempts.fence(attempts)
        for run in [r for s, r in self._runs.items() if r.holds_slot and s.attempt < attempts.get(s.stream, (0, 0))]:
            self.abort(run)

    def abort(self, run: Run) -> None:
        """Forget a run; nothing happens if it has ended."""
        if run.sequence in self._runs:
            self._end(run, None, retain_until_s=self._clock() + self.keep_aborted_s if self.keep_aborted_s else None)
            self.wake()

    @property
    def runs(self) -> int:
        return len(self._runs)

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def queue_delay_s(self) -> float:
        """Predicted time until a request that arrives now starts its prefill: what is to be computed before, or the wait for a
        place among those that run, where there is none left. Both pass at the same time, so the longer one counts.
        """
        return max(self.scheduler.queued_s(self.prefill), self._places.expected_s(self._clock(), self.scheduler.waiting))

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while self._bug is None:
                self.pages.expire(self._clock())
                for pull in self.scheduler.admit():
                    self._start_pull(pull)
                self._places.observe(self._clock(), self.scheduler.released_places, self.scheduler.full)
                batch = self.scheduler.next_batch()
                if not batch:
                    await self._sleep()
                    continue
                started_s = self._clock()
                sampled = await loop.run_in_executor(self._thread, self._compute, batch)
                if self._pace is not None:
                    await asyncio.sleep(self._pace.batch_s([chunk for _, chunk in batch]) - (self._clock() - started_s))
                self._take(batch, sampled)
                # Outputs reach their sockets before the next batch takes the interpreter.
                await asyncio.sleep(0)
            raise self._bug
        finally:
            for task in self._pulls:
                task.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _sleep(self) -> None:
        """Wait for work; leases are looked at once a second all the same, and in a quiet second the books are checked."""
        self._wake.clear()
        try:
            async with asyncio.timeout(1.0):
                await self._wake.wait()
        except TimeoutError:
            self.pages.check()
            self.scheduler.check()

    def _compute(self, batch: Batch) -> dict[Sequence, Sampled]:
        """On the worker thread: one forward pass and the next token of every sequence that wants one."""
        logits = self.worker.execute([chunk for _, chunk in batch])
        wanted = [sequence for sequence, chunk in batch if chunk.wants_logits]
        runs = [self._runs.get(sequence) for sequence in wanted]
        return {
            # Aborted meanwhile: the scheduler ignores what is sampled for it.
            sequence: Sampled(0) if run is None else run.choose(row)
            for sequence, run, row in zip(wanted, runs, logits, strict=True)
        }

    def _take(self, batch: Batch, sampled: dict[Sequence, Sampled]) -> None:
        """Give a finished batch back to the scheduler and its tokens to the streams."""
        prefilled = self.scheduler.complete(batch, {sequence: one.token_id for sequence, one in sampled.items()})
        if self._checkpoints is not None:
            for sequence, _ in batch:
                self._tell_filled(sequence)
        for sequence in prefilled:
            if (run := self._runs.get(sequence)) is not None:
                self._end(run, StepOutput([], TextDelta(""), "length"), retain_until_s=self._clock() + self._lease_s)
        for sequence, one in sampled.items():
            run = self._runs.get(sequence)
            if run is None:
                continue
            output = run.take(one)
            if output.finish_reason is not None:
                self._end(run, output)
            else:
                run.outputs.put_nowait(output)

    def _tell_filled(self, sequence: Sequence) -> None:
        run = self._runs.get(sequence)
        if self._checkpoints is None or run is None or not run.checkpoints:
            return
        # Fewer than before: it was preempted, and has some of them again.
        if (full_pages := sequence.computed_tokens // self.pages.page_size_tokens) != run.told_pages:
            run.told_pages = full_pages
            self._checkpoints.filled(sequence)

    def _end(self, run: Run, output: StepOutput | None, retain_until_s: float | None = None) -> None:
        """Say the last word of a run; None: it was aborted."""
        sequence = run.sequence
        del self._runs[sequence]
        self.scheduler.finish(sequence, retain_until_s)
        if self._checkpoints is not None and run.checkpoints:
            self._checkpoints.ended(sequence)
        run.outputs.put_nowait(output)

    def _start_pull(self, pull: Pull) -> None:
        # Who was aborted before it was admitted is not admitted, so there is a run.
        task = asyncio.get_running_loop().create_task(self._pull(pull, list(self._runs[pull.sequence].sources)))
        self._pulls.add(task)
        task.add_done_callback(self._pull_ended)

    def _pull_ended(self, task: asyncio.Task[None]) -> None:
        self._pulls.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            # Its stream would wait for ever.
            self._bug = bug
            self.wake()

    async def _pull(self, pull: Pull, sources: list[Source]) -> None:
        """Fetch what peers hold, one after the other, each from where the last one ended. Whatever does not arrive is computed
        here, in the same attempt.
        """
        sequence = pull.sequence
        arrived, tail = range(pull.first_page, pull.first_page), False
        step = next_source(sources, pull, arrived.stop)
        while step is not None and sequence.phase is not Phase.FINISHED:
            source, wanted = step
            result = await self._fetcher.fetch(pull, source, wanted)
            arrived, tail = range(wanted.start, wanted.start + result.full_pages), result.tail
            if (step := next_source(sources, pull, arrived.stop)) is not None:
                self._pulled(sequence, arrived, more_from=step[1].start)
                arrived = range(arrived.stop, arrived.stop)
        self._pulled(sequence, arrived, tail=tail)

    def _pulled(self, sequence: Sequence, arrived: range, *, tail: bool = False, more_from: int | None = None) -> None:
        self.scheduler.pulled(sequence, arrived, tail=tail, more_from=more_from)
        self.wake()
