"""The one loop of an instance: admit, pull, compute, emit.

Scheduler and page manager are touched on the event loop only; the computing thread sees nothing but chunks and
tensors. So no lock is needed, and a page changes hands only between two batches.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from kvrs.engine.pace import Pace
from kvrs.engine.requests import Run, Sampled, StepOutput
from kvrs.engine.worker import Worker
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.scheduling.batches import BatchScheduler
from kvrs.scheduling.chunks import Chunk
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.sequences import Pull, Sequence
from kvrs.text.output import TextDelta
from kvrs.transfer.peers import Peer, PullRequest
from kvrs.transfer.puller import PagePuller

# Fencing remembers this many streams; older ones ended long ago.
ATTEMPTS_REMEMBERED = 100_000

Batch = list[tuple[Sequence, Chunk]]


class FencedError(Exception):
    """The request's attempt is lower than one already seen for its stream."""


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
    ) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self.pages = pages
        self.prefill = prefill
        self._puller = puller
        self._registry = registry
        self._clock = clock
        self._lease_s = lease_s
        self._pace = pace
        self._runs: dict[Sequence, Run] = {}
        self._attempts: OrderedDict[StreamId, tuple[int, int]] = OrderedDict()
        self._wake = asyncio.Event()
        self._pulls: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")

    def submit(self, run: Run) -> None:
        """Queue a run; a lower attempt at the same stream is over from now on.

        Raises:
            FencedError: a higher attempt was already seen.
        """
        sequence = run.sequence
        if sequence.attempt < self._attempts.get(sequence.stream, (0, 0)):
            raise FencedError(f"stream {sequence.stream} has an attempt above {sequence.attempt}")
        self.fence({sequence.stream: sequence.attempt})
        if run.ending is not None:
            run.outputs.put_nowait(run.ending)
            return
        self._runs[sequence] = run
        self.scheduler.add(sequence)
        self.wake()

    def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> None:
        """Drop every run below the attempt named for its stream, and refuse such from now on."""
        for stream, attempt in attempts.items():
            self._attempts[stream] = max(attempt, self._attempts.get(stream, (0, 0)))
            self._attempts.move_to_end(stream)
        while len(self._attempts) > ATTEMPTS_REMEMBERED:
            self._attempts.popitem(last=False)
        for run in [r for s, r in self._runs.items() if s.stream in attempts and s.attempt < attempts[s.stream]]:
            self.abort(run)

    def abort(self, run: Run) -> None:
        """Forget a run; nothing happens if it has ended."""
        if self._runs.pop(run.sequence, None) is not None:
            self.scheduler.abort(run.sequence)
            run.outputs.put_nowait(None)
            self.wake()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def queue_delay_s(self) -> float:
        """Predicted time until a request that arrives now starts its prefill."""
        return self.prefill.extra(0, queued) if (queued := self.scheduler.queued_tokens) else 0.0

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self.pages.expire(self._clock())
                for pull in self.scheduler.admit():
                    self._start_pull(pull)
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
        for sequence in self.scheduler.complete(batch, {sequence: one.token_id for sequence, one in sampled.items()}):
            self._end_prefill(sequence)
        for sequence, one in sampled.items():
            run = self._runs.get(sequence)
            if run is None:
                continue
            output = run.take(one)
            run.outputs.put_nowait(output)
            if output.finish_reason is not None:
                del self._runs[sequence]
                self.scheduler.finish(sequence)

    def _end_prefill(self, sequence: Sequence) -> None:
        if (run := self._runs.pop(sequence, None)) is not None:
            self.scheduler.finish(sequence, retain_until_s=self._clock() + self._lease_s)
            run.outputs.put_nowait(StepOutput([], TextDelta(""), "length"))

    def _start_pull(self, pull: Pull) -> None:
        run = self._runs.get(pull.sequence)
        task = asyncio.get_running_loop().create_task(self._pull(pull, run))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _pull(self, pull: Pull, run: Run | None) -> None:
        """Fetch what a peer holds; whatever does not arrive is computed here, in the same attempt."""
        full_pages, tail = 0, False
        source = run.source if run is not None else None
        peer = self._registry.get(source.instance) if source is not None else None
        if source is not None and peer is not None:
            pool = self.worker.pool
            wants_tail = pull.tail_page is not None and source.handoff is not None
            request = PullRequest(
                tags=pull.tags,
                handoff=StreamId(source.handoff) if wants_tail and source.handoff is not None else None,
                tail_index=pull.first_page + len(pull.tags) if wants_tail else None,
            )
            result = await self._puller.pull(
                peer,
                request,
                [pool.view(page) for page in pull.pages],
                pool.view(pull.tail_page) if wants_tail and pull.tail_page is not None else None,
                expected_epoch=source.epoch,
            )
            full_pages, tail = result.full_pages, result.tail
            for page in pull.pages[:full_pages]:
                pool.store(page)
            if tail and pull.tail_page is not None:
                pool.store(pull.tail_page)
        self.scheduler.pulled(pull.sequence, full_pages, tail)
        self.wake()
