"""A simulated instance: the real scheduler and page manager, with a profile's clock and tokens out of a formula.

It does what `kvrs/engine/core.py` does around them, step by step, and knows what really lies in every page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.actions import Place
from kvrs.protocol.instance import Checkpoint, Role
from kvrs.protocol.tags import Tag
from kvrs.scheduling.backlog import Backlog
from kvrs.scheduling.batches import BatchScheduler
from kvrs.scheduling.chunks import Chunk
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.places import PlaceWait
from kvrs.scheduling.sequences import Phase, Pull, Sequence
from kvrs.scheduling.sources import Source, next_source
from kvrs.sim.couriers import Couriers
from kvrs.sim.process import require
from kvrs.sim.site import Asked, Fetch, Holder, Opened, Site
from kvrs.transfer.meter import LinkMeter

Batch = list[tuple[Sequence, Chunk]]


def token_at(stream: StreamId, position: int) -> int:
    """What the model says there: every attempt says the same, as with greedy decoding."""
    return crc32(f"{stream}:{position}".encode()) % 50_000


class Reply(Protocol):
    """The connection on which a call is answered."""

    def prefilled(self, history_tokens: int) -> None: ...

    def token(self, position: int, token: int, *, is_last: bool) -> None: ...

    def broke(self, cause: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a proxy."""

    stream: StreamId
    attempt: int
    token_ids: list[int]
    prompt_tokens: int
    max_tokens: int
    prefill_only: bool
    sources: tuple[Source, ...]
    places: tuple[Place, ...]
    reply: Reply
    slot_token: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    call: Call
    sequence: Sequence
    told_pages: int = 0
    verified: bool = False


class SimEngine(Holder):
    def __init__(self, name: InstanceId, node: NodeId, role: Role, site: Site) -> None:
        super().__init__(name, node, site.clock)
        self.role = role
        self.slow_factor = 1.0
        self._site = site
        self._settings = site.config.cluster.engine
        self._size = self._settings.page_size_tokens
        self._reset()

    def _reset(self) -> None:
        self.pages = PageManager(self._settings.pages, self._size)
        self.scheduler = BatchScheduler(self._settings, self.pages)
        self.places = PlaceWait()
        self.meter = LinkMeter(self._site.config.transfer.probe_bytes)
        self.backlog = Backlog(self._size)
        self.couriers = Couriers(self, self._site)
        self._runs: dict[Sequence, _Run] = {}
        self._attempts: dict[StreamId, tuple[int, int]] = {}
        self._contents: dict[int, Tag] = {}  # Of pages that were ever full.
        self._busy = False

    def start(self) -> None:
        self._reset()
        super().start()

    def kill(self, *, silently: bool = False) -> None:
        """Silently: its node is gone, and nobody is left to reset its connections."""
        super().kill()
        self.slow_factor = 1.0
        runs, self._runs = self._runs, {}
        if not silently:
            for run in runs.values():
                run.call.reply.broke("reset")

    # What proxies ask.

    def submit(self, call: Call) -> None:
        attempt = (0, call.attempt)
        if attempt < self._attempts.get(call.stream, (0, 0)):
            call.reply.broke("fenced")
            return
        self.fence({call.stream: call.attempt})
        if not self.scheduler.fits(len(call.token_ids), call.prompt_tokens + call.max_tokens - len(call.token_ids)):
            call.reply.broke("refused")
            return
        sequence = Sequence(
            stream=call.stream,
            attempt=attempt,
            token_ids=list(call.token_ids),
            prompt_tokens=call.prompt_tokens,
            root=self._site.root,
            prefill_only=call.prefill_only,
            pulls=tuple(source.pages for source in call.sources if source.pages),
            pull_tail=any(source.handoff is not None for source in call.sources),
        )
        self._runs[sequence] = _Run(call, sequence)
        if call.places:
            need_bytes = (call.prompt_tokens + call.max_tokens) // self._size * self._site.geometry.page_bytes
            checkpoints = [Checkpoint(place.holder, max(place.reserved_bytes, need_bytes)) for place in call.places]
            self.backlog.follow(sequence, checkpoints, handed_over=sequence.pull_tail)
        self.scheduler.add(sequence)
        self.look()

    def fence(self, attempts: Mapping[StreamId, int]) -> None:
        """Drop every run below the attempt named for its stream."""
        for stream, attempt in attempts.items():
            self._attempts[stream] = max((0, attempt), self._attempts.get(stream, (0, 0)))
        for run in [run for run in self._runs.values() if run.sequence.attempt < self._attempts[run.call.stream]]:
            self._end(run)
        self.look()

    def fence_all(self, attempts: Mapping[StreamId, int]) -> None:
        """A proxy that took it for dead has found it alive."""
        self.fence(attempts)
        self.epoch += 1

    def end_transfer(self, stream: StreamId, below: tuple[int, int]) -> None:
        self._attempts[stream] = max(below, self._attempts.get(stream, (0, 0)))
        for run in [run for run in self._runs.values() if run.call.stream == stream and run.sequence.attempt < below]:
            if run.call.slot_token and len(run.sequence.token_ids) == run.sequence.history_tokens:
                self._end(run)
                run.call.reply.broke("fenced")
        self.look()

    def abort(self, stream: StreamId, attempt: int) -> None:
        """The connection was closed."""
        for run in [run for run in self._runs.values() if (run.call.stream, run.call.attempt) == (stream, attempt)]:
            self._end(run)
        self.look()

    def fail_one(self) -> StreamId | None:
        """An error event in the middle of a stream, as an engine sends it that has caught a fault of its own."""
        run = next(iter(self._runs.values()), None)
        if run is None:
            return None
        self._end(run)
        run.call.reply.broke("error event")
        self.look()
        return run.call.stream

    def queue_delay_s(self) -> float:
        compute_s = self.scheduler.queued_s(self._site.pace.prefill)
        return max(compute_s, self.places.expected_s(self.clock.now_s, self.scheduler.waiting))

    # The loop.

    def look(self) -> None:
        """Begin a batch, if none is under way and there is anything to compute."""
        if self._busy:
            return
        self.pages.expire(self.clock.now_s)
        for pull in self.scheduler.admit():
            _Pulling(self, self._site, pull, list(self._runs[pull.sequence].call.sources)).begin()
        self.places.observe(self.clock.now_s, self.scheduler.released_places, self.scheduler.full)
        batch = self.scheduler.next_batch()
        if not batch:
            return
        for sequence, chunk in batch:
            self._verify(sequence, chunk)
        self._busy = True
        seconds = self._site.pace.batch_s([chunk for _, chunk in batch]) * self.slow_factor
        self.later(seconds, lambda: self._complete(batch))

    def _verify(self, sequence: Sequence, chunk: Chunk) -> None:
        """What is computed with is what the history says, however it got there."""
        run = self._runs.get(sequence)
        if run is not None and not run.verified:
            run.verified = True
            for index in range(chunk.first_position // self._size):
                right = self._contents.get(chunk.pages[index]) == sequence.tags[index]
                require(right, f"{self.id} computes {sequence.stream} with a wrong page {index}")

    def _complete(self, batch: Batch) -> None:
        self._busy = False
        sampled: dict[Sequence, int] = {}
        for sequence, chunk in batch:
            end = chunk.first_position + len(chunk.token_ids)
            for index in range(chunk.first_position // self._size, end // self._size):
                self._contents[chunk.pages[index]] = sequence.tags[index]
            if end % self._size:
                self._contents.pop(chunk.pages[-1], None)
            if chunk.wants_logits:
                sampled[sequence] = token_at(sequence.stream, len(sequence.token_ids))
        prefilled = self.scheduler.complete(batch, sampled)
        for sequence, _ in batch:
            self.tell_filled(sequence)
        for sequence in prefilled:
            if (run := self._runs.get(sequence)) is not None:
                self._end(run, retain_until_s=self.clock.now_s + self._site.config.transfer.lease_s)
                run.call.reply.prefilled(sequence.history_tokens)
        for sequence, token in sampled.items():
            if (run := self._runs.get(sequence)) is not None:
                self._emit(run, token)
        self.look()

    def _emit(self, run: _Run, token: int) -> None:
        sequence, call = run.sequence, run.call
        produced = len(sequence.token_ids) - sequence.prompt_tokens
        is_last = produced >= call.max_tokens
        if is_last:
            self._end(run)
        call.reply.token(produced - 1, token, is_last=is_last)

    def _end(self, run: _Run, retain_until_s: float | None = None) -> None:
        sequence = run.sequence
        del self._runs[sequence]
        self.scheduler.finish(sequence, retain_until_s)
        if run.call.places:
            whole = sequence.prefill_only and sequence.computed_tokens >= sequence.history_tokens
            if whole:
                self.backlog.filled(sequence, self.clock.now_s)
            self.backlog.ended(sequence, send_rest=whole)
            self.couriers.look()

    def tell_filled(self, sequence: Sequence) -> None:
        run = self._runs.get(sequence)
        if run is None or not run.call.places:
            return
        if (full_pages := sequence.computed_tokens // self._size) != run.told_pages:
            run.told_pages = full_pages
            self.backlog.filled(sequence, self.clock.now_s)
            self.couriers.look()

    # Pages.

    def open(self, asked: Asked) -> Opened:
        if asked.epoch is not None and asked.epoch != self.epoch:
            return Opened([], False, lambda: None)
        held = self.pages.match(asked.tags)
        contents = self.contents_of(held)
        tail = None
        if asked.handoff is not None and asked.tail_index is not None and len(held) == len(asked.tags):
            tail = self.pages.retained_page(asked.handoff, asked.tail_index)
        if tail is not None:
            self.pages.pin(tail)
            held = [*held, tail]

        def close() -> None:
            self.pages.release(held)
            self.look()

        return Opened(contents, tail is not None, close)

    def contents_of(self, pages: list[int]) -> list[Tag | None]:
        return [self._contents.get(page) for page in pages]

    def verify_found(self, sequence: Sequence) -> None:
        """What others find by its tags is what the tags say."""
        found = self.pages.match(sequence.tags)
        require(self.contents_of(found) == sequence.tags[: len(found)], f"{self.id} has registered pages that it does not have")
        self.pages.release(found)

    def received(self, page: int, content: Tag) -> None:
        self._contents[page] = content

    def check_at_rest(self) -> None:
        """No stream is left, so nothing runs, and nobody owns, reads or waits for a page."""
        self.pages.expire(self.clock.now_s)
        self.pages.check()
        self.scheduler.check()
        self.backlog.check()
        require(not self._runs and not self._busy, f"{self.id} still runs {[run.call.stream for run in self._runs.values()]}")
        counts = (self.scheduler.waiting, self.scheduler.running, self.scheduler.pulling, self.scheduler.queued_tokens)
        require(counts == (0, 0, 0, 0), f"the scheduler of {self.id} is left with {counts}")
        require(self.pages.free_pages == self.pages.pages, f"{self.id} still has pages with owners")
        require(not self.backlog.lag_pages and not self.couriers.pinned_pages, f"{self.id} still sends checkpoints")


class _Pulling:
    """The fetches of one sequence: source after source, each from where the last one ended."""

    def __init__(self, engine: SimEngine, site: Site, pull: Pull, sources: list[Source]) -> None:
        self._engine = engine
        self._site = site
        self._pull = pull
        self._sources = sources

    def begin(self) -> None:
        self._next(range(self._pull.first_page, self._pull.first_page), tail=False, is_first=True)

    def _next(self, arrived: range, *, tail: bool, is_first: bool = False) -> None:
        engine, pull = self._engine, self._pull
        step = next_source(self._sources, pull, arrived.stop)
        if step is None or pull.sequence.phase is Phase.FINISHED:
            self._pulled(arrived, tail=tail)
            return
        source, wanted = step
        if not is_first:
            self._pulled(arrived, more_from=wanted.start)
        has_tail = source.handoff is not None and wanted.stop == pull.tail_index
        tags = tuple(pull.sequence.tags[wanted.start : wanted.stop])
        asked = Asked(
            tags,
            source.traffic,
            source.epoch,
            source.handoff if has_tail else None,
            pull.tail_index if has_tail else None,
        )

        def page(index: int) -> None:
            engine.received(pull.sequence.pages[wanted.start + index], tags[index])

        def done(full_pages: int, tail: bool) -> None:
            self._next(range(wanted.start, wanted.start + full_pages), tail=tail)

        Fetch(self._site, engine, engine.meter, self._site.holders[source.instance], asked, page, done)

    def _pulled(self, arrived: range, *, tail: bool = False, more_from: int | None = None) -> None:
        self._engine.scheduler.pulled(self._pull.sequence, arrived, tail=tail, more_from=more_from)
        self._engine.verify_found(self._pull.sequence)
        self._engine.tell_filled(self._pull.sequence)
        self._engine.look()
