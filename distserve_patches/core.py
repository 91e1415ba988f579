"""The runs of DistServe's two instances: what each asks of the engine, what it says of its tokens, whose pages it keeps.

Needs no DistServe. Both cores share one engine: what comes to the decode instance without KV goes through the context stage.
"""

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from distserve_patches.jobs import Job, JobEnded, Stage, StageState
from kvrs.engine.core import CheckpointHooks
from kvrs.engine.fencing import AttemptBook
from kvrs.engine.fetching import PageFetcher
from kvrs.engine.requests import Run, Sampled, StepOutput
from kvrs.errors import RequestError, TransferError
from kvrs.ids import StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.sequences import Pull, Sequence
from kvrs.scheduling.sources import next_source
from kvrs.text.output import TextDelta

log = logging.getLogger(__name__)

_JOB_IDS = itertools.count()


class Engine(Protocol):
    """`distserve_patches.engine.RecoverableEngine`, as far as runs need it."""

    def begin(self, job: Job) -> None: ...
    async def reserve(self, job: Job) -> list[int]: ...
    def take_up(self, job: Job, kv_tokens: int) -> None: ...
    def blocks(self, job: Job, stage: Stage) -> list[int]: ...
    def abort(self, job: Job) -> None: ...
    def stage(self, which: Stage) -> StageState: ...
    def refusal(self, job: Job) -> str | None: ...


class ContextLine:
    """The prompts that the context stage has taken and not finished, and how long they will take it."""

    def __init__(self) -> None:
        self.prefill: PrefillTable | None = None  # Unknown until it was measured.
        self._waiting: dict[Job, float] = {}

    @property
    def queue_delay_s(self) -> float:
        return sum(self._waiting.values())

    def seconds(self, tokens: int) -> float:
        return 0.0 if self.prefill is None else self.prefill.seconds_for(tokens)

    def add(self, job: Job) -> None:
        self._waiting[job] = self.seconds(len(job.history))

    def remove(self, job: Job) -> None:
        """It is computed, or nobody wants it any more; to remove it twice is harmless."""
        self._waiting.pop(job, None)


class _Work:
    """One run, and the job that the engine has for it: its sink."""

    def __init__(self, core: "RunCore", run: Run, *, prefill_only: bool) -> None:
        self.core = core
        self.run = run
        self.decodes = False  # Its tokens come from the decoding stage by now, and its KV lies there.
        sequence = run.sequence
        left = max(1, run.max_tokens - run.produced_tokens)
        self.job = Job(next(_JOB_IDS), list(sequence.token_ids), left, prefill_only, self)

    @property
    def ended(self) -> bool:
        return self.core.works.get(self.run.sequence) is not self

    def prefilled(self) -> None:
        self.core.prefilled(self)

    def token(self, token_id: int) -> bool:
        return self.core.took(self, token_id)

    def failed(self, stage: Stage, cause: str) -> None:
        self.core.failed(self, f"the {stage} stage lost this stream: {cause}")


class RunCore(ABC):
    """What both instances do alike. All methods run on the event loop."""

    def __init__(self, engine: Engine, line: ContextLine, *, clock: Callable[[], float], lease_s: float) -> None:
        self.works: dict[Sequence, _Work] = {}
        self.ended_runs = 0
        self.checkpoints: CheckpointHooks | None = None  # Of the stage's present life.
        self.engine = engine
        self.line = line
        self.clock = clock
        self.lease_s = lease_s
        self._attempts = AttemptBook()

    def submit(self, run: Run) -> None:
        """Begin a run; a lower attempt at the same stream is over from now on.

        Raises:
            FencedError: a higher attempt was already seen.
            RequestError: it is longer than this server could ever take.
        """
        sequence = run.sequence
        self._attempts.admit(sequence.stream, sequence.attempt)
        self.fence({sequence.stream: sequence.attempt})
        if run.ending is not None:
            run.outputs.put_nowait(run.ending)
            return
        work = self._work(run)
        if (why := self.engine.refusal(work.job)) is not None:
            raise RequestError(why, param="prompt")
        self.works[sequence] = work
        if self.checkpoints is not None and run.checkpoints:
            self.checkpoints.began(run)
        self._begin(work)

    def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> None:
        """Drop every run below the attempt named for its stream, and refuse such from now on."""
        self._attempts.fence(attempts)
        for run in [w.run for s, w in self.works.items() if s.stream in attempts and s.attempt < attempts[s.stream]]:
            self.abort(run)

    def end_transfers(self, attempts: Mapping[StreamId, tuple[int, int]]) -> None:
        """Drop every run below the attempt named for its stream that still holds a slot, and refuse such from now on."""
        self._attempts.fence(attempts)
        works = self.works.items()
        for run in [w.run for s, w in works if w.run.holds_slot and s.attempt < attempts.get(s.stream, (0, 0))]:
            self.abort(run)

    def abort(self, run: Run) -> None:
        """Forget a run; nothing happens if it has ended."""
        if (work := self.works.get(run.sequence)) is not None:
            self.end(work, None)
            self.engine.abort(work.job)

    def failed(self, work: _Work, cause: str) -> None:
        if not work.ended:
            log.warning("run lost", extra={"stream": work.run.sequence.stream, "cause": cause})
            work.run.failure = cause
            self.end(work, None)

    def end(self, work: _Work, output: StepOutput | None) -> None:
        """Say the last word of a run; None: it was aborted, or has failed."""
        run = work.run
        del self.works[run.sequence]
        self.ended_runs += 1
        self.line.remove(work.job)
        if self.checkpoints is not None and run.checkpoints:
            self.checkpoints.ended(run.sequence)
        run.outputs.put_nowait(output)

    def compute(self, work: _Work) -> None:
        """Have the context stage compute the history."""
        work.run.sequence.extend_tags(self.engine.stage(Stage.CONTEXT).pages.page_size_tokens)
        self.line.add(work.job)
        self.engine.begin(work.job)

    def retain(self, work: _Work) -> None:
        """Keep what the context stage has computed, to be found by its tags and as this stream's."""
        sequence, pages = work.run.sequence, self.engine.stage(Stage.CONTEXT).pages
        blocks = self.engine.blocks(work.job, Stage.CONTEXT)
        # Equal pages of another stream may be registered: then those are found, and kept.
        full = [pages.register(block, tag) for block, tag in zip(blocks, sequence.tags, strict=False)]
        tokens = sequence.history_tokens
        kept = [*full, *blocks[len(full) : -(-tokens // pages.page_size_tokens)]]
        pages.retain(sequence.stream, kept, tokens, self.clock() + self.lease_s)

    @abstractmethod
    def _work(self, run: Run) -> _Work: ...

    @abstractmethod
    def _begin(self, work: _Work) -> None: ...

    @abstractmethod
    def prefilled(self, work: _Work) -> None:
        """The context stage's blocks hold the KV of the history."""

    @abstractmethod
    def took(self, work: _Work, token_id: int) -> bool:
        """A token of the job came. Whether it wants more."""


class PrefillCore(RunCore):
    """Computes prompts and keeps their KV for whoever comes for it."""

    def _work(self, run: Run) -> _Work:
        return _Work(self, run, prefill_only=True)

    def _begin(self, work: _Work) -> None:
        self.compute(work)

    def prefilled(self, work: _Work) -> None:
        sequence = work.run.sequence
        self.retain(work)
        sequence.computed_tokens = sequence.history_tokens
        if self.checkpoints is not None and work.run.checkpoints:
            self.checkpoints.filled(sequence)
        self.end(work, StepOutput([], TextDelta(""), "length"))

    def took(self, work: _Work, token_id: int) -> bool:
        return False


class DecodeCore(RunCore):
    """Produces tokens: from KV that peers hold, or through its own server's context stage."""

    def __init__(self, engine: Engine, line: ContextLine, *, clock: Callable[[], float], lease_s: float) -> None:
        super().__init__(engine, line, clock=clock, lease_s=lease_s)
        self.fetcher: PageFetcher | None = None  # Of the stage's present life.
        self.reserving = 0  # Runs that wait for room for their history.
        self._parked: list[_Work] = []  # Runs that need the context stage, which is down.
        self.bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # Ends with what ended a pull.
        self._pulls: set[asyncio.Task[None]] = set()

    def _work(self, run: Run) -> _Work:
        return _Work(self, run, prefill_only=False)

    @property
    def parked(self) -> int:
        """How many runs wait until the context stage is up again."""
        return sum(not work.ended for work in self._parked)

    def stage_changed(self, stage: Stage, *, alive: bool) -> None:
        """What the engine was not told of goes the same way as what it was."""
        if alive == (stage is Stage.CONTEXT):
            parked, self._parked = self._parked, []
            for work in parked:
                if alive and not work.ended:
                    self.compute(work)
                elif not alive:
                    self.failed(work, "the decoding stage is down")

    def compute(self, work: _Work) -> None:
        # Nobody else may be left who could: it will be back in a moment, or whoever asked gives up.
        if self.engine.stage(Stage.CONTEXT).alive:
            super().compute(work)
        elif self.engine.stage(Stage.DECODING).alive:
            self._parked.append(work)
        else:
            self.failed(work, "both stages are down")

    def _begin(self, work: _Work) -> None:
        if work.run.sources:
            pull = asyncio.get_running_loop().create_task(self._take_over(work))
            self._pulls.add(pull)
            pull.add_done_callback(self._pull_ended)
        else:
            self.compute(work)

    def prefilled(self, work: _Work) -> None:
        self.line.remove(work.job)
        self.retain(work)

    def took(self, work: _Work, token_id: int) -> bool:
        run, sequence = work.run, work.run.sequence
        if work.decodes:
            # This step has read the token before, and left its KV behind.
            self._note_filled(work)
        work.decodes = True
        sequence.token_ids.append(token_id)
        output = run.take(Sampled(token_id))
        if output.finish_reason is not None:
            self.end(work, output)
            return False
        run.outputs.put_nowait(output)
        return True

    def _note_filled(self, work: _Work) -> None:
        """Let pages be found that are full by now, when they have become more."""
        run, sequence, pages = work.run, work.run.sequence, self.engine.stage(Stage.DECODING).pages
        full_pages = len(sequence.token_ids) // pages.page_size_tokens
        if full_pages == run.told_pages:
            return
        blocks = self.engine.blocks(work.job, Stage.DECODING)
        # After a swap they are other ones.
        known = run.told_pages if blocks[: run.told_pages] == sequence.pages[: run.told_pages] else 0
        sequence.extend_tags(pages.page_size_tokens)
        _register(pages, sequence, blocks, range(known, full_pages))
        sequence.computed_tokens = len(sequence.token_ids)
        run.told_pages = full_pages
        if self.checkpoints is not None and run.checkpoints:
            self.checkpoints.filled(sequence)

    def _pull_ended(self, task: asyncio.Task[None]) -> None:
        self._pulls.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None and not self.bug.done():
            self.bug.set_exception(bug)

    async def _take_over(self, work: _Work) -> None:
        """Fetch what peers hold of the history into blocks of the decoding stage, and go on from there."""
        job, pages = work.job, self.engine.stage(Stage.DECODING).pages
        self.reserving += 1
        try:
            blocks = await self.engine.reserve(job)
        except JobEnded:
            return
        finally:
            self.reserving -= 1
        work.run.sequence.extend_tags(pages.page_size_tokens)
        # They stay where they are while a peer's bytes are written into them, even when the run is aborted meanwhile.
        for block in blocks:
            pages.pin(block)
        try:
            arrived = await self._pull(work, blocks)
        except TransferError as error:
            # The workers could not take the pages: where their stage died the run has ended already.
            arrived = 0
            if not work.ended:
                self.failed(work, str(error))
                self.engine.abort(job)
        finally:
            pages.release(blocks)
        if not work.ended:
            self._go_on(work, arrived)

    def _go_on(self, work: _Work, arrived: int) -> None:
        """From the KV of the first `arrived` tokens, unless it is quicker to compute the whole history again."""
        run, sequence, pages = work.run, work.run.sequence, self.engine.stage(Stage.DECODING).pages
        # The last known token is always read again: what comes after it is the first new one.
        kv_tokens = min(arrived, sequence.history_tokens - 1)
        if kv_tokens == 0 or self._is_quicker_to_compute(sequence.history_tokens, kv_tokens):
            self.engine.abort(work.job)
            self.compute(work)
            return
        # Of a page that came whole the last token is written again: it can be found when it was.
        full_pages = kv_tokens // pages.page_size_tokens
        _register(pages, sequence, sequence.pages, range(full_pages))
        sequence.computed_tokens = full_pages * pages.page_size_tokens
        run.told_pages = full_pages
        if self.checkpoints is not None and run.checkpoints:
            self.checkpoints.filled(sequence)
        work.decodes = True
        self.engine.take_up(work.job, kv_tokens)

    def _is_quicker_to_compute(self, history_tokens: int, kv_tokens: int) -> bool:
        """Known tokens behind the KV that arrived take a decoding step each. A peer may have had less than was hoped."""
        context, step_s = self.engine.stage(Stage.CONTEXT), self.engine.stage(Stage.DECODING).step_s
        steps_s = (history_tokens - kv_tokens) * step_s
        return context.alive and self.line.queue_delay_s + self.line.seconds(history_tokens) < steps_s - step_s

    async def _pull(self, work: _Work, blocks: list[int]) -> int:
        """Of how many leading tokens the KV has arrived. Peers are asked one after the other, each from where the last ended."""
        sequence = work.run.sequence
        pull = _wanted(sequence, blocks, self.engine.stage(Stage.DECODING).pages.page_size_tokens)
        assert self.fetcher is not None
        sources, held, tail = list(work.run.sources), 0, False
        step = next_source(sources, pull, held) if pull is not None else None
        # What lies before the pages of a peer cannot be computed here, so they are of no use.
        while pull is not None and step is not None and not work.ended and step[1].start == held:
            source, wanted = step
            result = await self.fetcher.fetch(pull, source, wanted)
            held, tail = held + result.full_pages, result.tail
            step = next_source(sources, pull, held)
        return held * self.engine.stage(Stage.DECODING).pages.page_size_tokens + (pull.tail_tokens if pull and tail else 0)


def _wanted(sequence: Sequence, blocks: list[int], page_size_tokens: int) -> Pull | None:
    """All of the history; None: it is no page long, and nobody has what there is of one."""
    full_pages, rest = divmod(sequence.history_tokens, page_size_tokens)
    sequence.pages = list(blocks)
    tail_index = full_pages if rest and sequence.pull_tail else None
    if not full_pages and tail_index is None:
        return None
    return Pull(sequence, (range(full_pages),) if full_pages else (), tail_index, rest)


def _register(pages: PageManager, sequence: Sequence, blocks: list[int], which: Iterable[int]) -> None:
    for index in which:
        pages.register(blocks[index], sequence.tags[index])
    sequence.pages = list(blocks)
