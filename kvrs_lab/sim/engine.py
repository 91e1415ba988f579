"""A simulated instance: the real scheduler and page manager, with a profile's step times and tokens
from a formula.

The instance follows `kvrs_engine/engine/core.py` step by step, and knows the true contents of every
page.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from kvrs.config.sections import DraftSourceName
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import (
    Capability,
    InstanceInfo,
    LinkReport,
    LoadReport,
    MeasuredPrefill,
    Role,
)
from kvrs.protocol.pages import Tag
from kvrs.transfer.meter import PROBE_BYTES, LinkMeter
from kvrs_engine.scheduling.admission_wait import AdmissionWaitEstimator
from kvrs_engine.scheduling.fair_queue import order
from kvrs_engine.scheduling.pages import MOVED_KEPT_S, PageManager
from kvrs_engine.scheduling.replicas import ReplicaBook
from kvrs_engine.scheduling.sequences import Sequence
from kvrs_engine.scheduling.step_times import StepTimes
from kvrs_lab.sim.calls import (
    Answer,
    Asker,
    Batch,
    SimCall,
    SimRun,
    checkpoints_of,
    token_at,
)
from kvrs_lab.sim.checkpoints import SimCheckpointSender
from kvrs_lab.sim.computed_pages import note_computed, note_verified, verify
from kvrs_lab.sim.computing import ComputingInstance
from kvrs_lab.sim.drafts import SimDrafts, chosen_tokens
from kvrs_lab.sim.event_loop import SimLoop
from kvrs_lab.sim.pipelines import SimPipeline
from kvrs_lab.sim.process import Step, require
from kvrs_lab.sim.pulling import Pulling
from kvrs_lab.sim.ranks import SimRanks
from kvrs_lab.sim.site import OpenedPages, PageRequest, Site
from kvrs_lab.sim.steady import SteadyDecodes, SteadyScheduler

_POISON_ACTS_S = 0.005
_HANGS_LOOK_S = 0.05


class SimEngine(ComputingInstance):
    scheduler: SteadyScheduler

    def __init__(
        self, name: InstanceId, node: NodeId, role: Role, site: Site, ranks: int = 1
    ) -> None:
        """Create an instance, which is a pipeline if the site has hosts for its stages."""
        super().__init__(name, node, site.clock)
        self.role = role
        self.ranks: SimRanks | SimPipeline | None = None  # None: one process computes everything.
        self.reporting: list[Step] = []  # Senders of immediate reports of this process.
        self._rank_count = ranks
        self.slow_factor = 1.0
        self.pace_factor = 1.0  # Time of each step over that of the profile, in all lives.
        self.draining = False
        self.answer: str | None = None  # Error that every call gets.
        self.hangs = False  # The instance reports and takes calls, but computes nothing.
        self.most_calls: int | None = None  # Limit of calls.
        # Tokens of prompts that were computed for a hand-off, over all lives, and of those the
        # tokens found in the prefix cache.
        self.prompt_tokens = self.cached_tokens = 0
        # The instance's declaration, which tests change.
        self.declares: Callable[[InstanceInfo], InstanceInfo] = lambda info: info
        self.poisoned: Callable[[StreamId], None] | None = None  # Ends this process.
        self.given_up: Step | None = None  # Ends this process when too few ranks are left.
        self._site = site
        self._pace = site.pace
        self.settings = site.config.cluster.engine
        self._size = self.settings.page_size_tokens
        self._reset()

    def _reset(self) -> None:
        self.pages = PageManager(self.settings.pages, self._size)
        hosts = self._site.hosts.get(self.id, [])
        self._depth = max(1, len(hosts))
        self.scheduler = SteadyScheduler(self.settings, self.pages, depth=self._depth)
        self.steady = SteadyDecodes(
            self.id,
            self.scheduler,
            self._size,
            lambda sequence, index: self.received(sequence.pages[index], sequence.tags[index]),
        )
        self.places = AdmissionWaitEstimator()
        self.step_times = StepTimes(self._pace.queued_prefill)
        self.meter = LinkMeter(PROBE_BYTES)
        self.loop = SimLoop(lambda: self.clock.now_s, self.later)  # type: ignore[abstract]
        self.checkpoint_sender = SimCheckpointSender(self, self._site, self.loop)
        self.backlog = self.checkpoint_sender.backlog
        share = self._site.config.backup.replica_share(self.role)
        self.replicas = ReplicaBook(self.pages, share, lambda: self.clock.now_s)
        self.runs: dict[Sequence, SimRun] = {}
        self.unverified = set()
        self._attempts: dict[StreamId, tuple[int, int]] = {}
        self.contents: list[Tag | None] = [None] * self.settings.pages
        self.flights = []
        self.ranks = None
        if hosts:
            self.ranks = SimPipeline(self, self._site, hosts)
        elif self._rank_count > 1:
            self.ranks = SimRanks(self, self._site, self._rank_count)
        self.reporting = []
        drafts = self._site.config.speculation
        self.drafts = (
            SimDrafts(drafts.depth, self.clock) if drafts.source is DraftSourceName.DRAFT else None
        )

    def start(self) -> None:
        if self.life:  # The first life has the fresh state of `__init__`.
            self._reset()
        self.draining = self.hangs = False
        self.answer = None
        super().start()
        if self.ranks is not None:
            self.ranks.begin()

    def kill(self, *, silently: bool = False) -> None:
        """Kill the process; `silently`: the node is gone, and no kernel resets the connections."""
        self.steady.stop(None)
        super().kill()
        self.loop.close()
        self.slow_factor = 1.0
        if isinstance(self.ranks, SimPipeline):
            self.ranks.close()
        runs, self.runs = self.runs, {}
        if not silently:
            for run in runs.values():
                run.call.reply.broke("reset")

    # Calls of proxies.

    def submit(self, call: SimCall) -> None:
        if self.answer is not None:
            call.reply.broke(self.answer)
            return
        if self.most_calls is not None and len(self.runs) >= self.most_calls:
            call.reply.broke("HTTP 503")
            return
        if call.is_poison and not call.prefill_only and self.poisoned is not None:
            self.later(_POISON_ACTS_S, partial(self.poisoned, call.stream))
        if call.number < self._attempts.get(call.stream, (0, 0)):
            call.reply.broke("fenced")
            return
        self.fence({call.stream: call.number})
        if not self.scheduler.fits(
            len(call.token_ids), call.prompt_tokens + call.max_tokens - len(call.token_ids)
        ):
            call.reply.broke("too long")
            return
        sequence = Sequence(
            stream=call.stream,
            attempt=call.number,
            token_ids=call.token_ids,
            prompt_tokens=call.prompt_tokens,
            root=self._site.root,
            prefill_only=call.prefill_only,
            pulls=tuple(source.pages for source in call.sources if source.pages),
            pull_tail=any(source.handoff is not None for source in call.sources),
        )
        self.runs[sequence] = SimRun(call, sequence)
        self.unverified.add(sequence)
        if checkpoints := checkpoints_of(call, self._size, self._site.geometry.page_bytes):
            self.checkpoint_sender.learn_of(checkpoints)
            self.backlog.follow(sequence, checkpoints, handed_over=sequence.pull_tail)
        self.scheduler.add(sequence)
        self.look()

    def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> None:
        """Drop every run below the attempt named for its stream."""
        for stream, attempt in attempts.items():
            self._attempts[stream] = max(attempt, self._attempts.get(stream, (0, 0)))
        for run in [
            run
            for run in self.runs.values()
            if run.sequence.attempt < self._attempts[run.call.stream]
        ]:
            self._end(run)
        self.look()

    def fence_all(self, attempts: Mapping[StreamId, tuple[int, int]]) -> None:
        """Fence the runs for a proxy that had taken the instance for lost."""
        self.fence(attempts)
        self.epoch += 1

    def end_transfer(self, stream: StreamId, below: tuple[int, int]) -> None:
        self._attempts[stream] = max(below, self._attempts.get(stream, (0, 0)))
        for run in [
            run
            for run in self.runs.values()
            if run.call.stream == stream and run.sequence.attempt < below
        ]:
            if run.call.slot_token and len(run.sequence.token_ids) == run.sequence.history_tokens:
                self._end(run)
                run.call.reply.broke("fenced")
        self.look()

    def abort(self, stream: StreamId, number: tuple[int, int]) -> None:
        """End the run, since its connection was closed."""
        until_s = self.clock.now_s + MOVED_KEPT_S if self.draining else None
        for run in [
            run
            for run in self.runs.values()
            if (run.call.stream, run.call.number) == (stream, number)
        ]:
            self._end(run, until_s)
        self.look()

    def fail_one(self) -> StreamId | None:
        """Send an error event in the middle of a stream, as an engine does that caught its own
        fault.
        """
        run = next(iter(self.runs.values()), None)
        if run is None:
            return None
        self._end(run)
        run.call.reply.broke("error event")
        self.look()
        return run.call.stream

    def info(self) -> InstanceInfo:
        table = self._pace.prefill
        info = InstanceInfo(
            self.id,
            self.node,
            self.role,
            self.epoch,
            self.life,
            "simulated",
            "simulated",
            self._site.geometry,
            self.settings.max_model_len,
            0,
            list(Capability),
            MeasuredPrefill(
                table.label, table.step_tokens, list(table.seconds), table.covered_to_tokens
            ),
            gpus=[str(self.id)],
            step_tokens=self.settings.max_batch_tokens,
        )
        return self.declares(info)

    def load(self) -> LoadReport:
        scheduler, now_s = self.scheduler, self.clock.now_s
        self.steady.catch_up()
        queued = scheduler.queued_tokens
        slowness = self.step_times.slowness
        compute_s = scheduler.queued_s(self._pace.queued_prefill) if queued else 0.0
        compute_s *= slowness or 1.0
        admission_s = self.places.expected_s(now_s, scheduler.waiting, scheduler.running)
        links = self.meter.measurements(now_s)
        paces = self.ranks.factors if isinstance(self.ranks, SimRanks) else (None, None)
        return LoadReport(
            self.epoch,
            scheduler.queued,
            scheduler.running,
            self.pages.free_pages,
            max(compute_s, admission_s),
            [LinkReport(source, m.bytes_per_s, m.spread, m.age_s) for source, m in links.items()],
            checkpoint_lag_pages=self.backlog.lag_pages,
            draining=self.draining,
            reforming=None if self.ranks is None else self.ranks.load(),
            layout_number=0 if self.ranks is None else self.ranks.layout_number,
            degree=0 if self.ranks is None else self.ranks.degree,
            full_degree=0 if self.ranks is None else self.ranks.count,
            decode_factor=paces[0],
            prefill_factor=paces[1],
            speculation=None if self.drafts is None else self.drafts.report(),
            replicas=dict(self.replicas.changed()),
            step_s=self.step_times.step_s,
            slowness=slowness,
        )

    def renew(self, streams: Iterable[StreamId]) -> list[StreamId]:
        until_s = self.clock.now_s + self._site.config.transfer.lease_s
        return self.pages.renew(streams, until_s)

    def release(self, streams: Iterable[StreamId]) -> None:
        self.pages.unretain(streams)

    # The loop.

    def look(self) -> None:
        """Begin batches, if there is anything to compute and room for them in flight."""
        if len(self.flights) == self._depth or self.hangs:
            return
        if self.ranks is not None and not self.ranks.serves:
            return
        self.pages.expire(self.clock.now_s)
        for pull in self.scheduler.admit():
            Pulling(self, self._site, pull, list(self.runs[pull.sequence].call.sources)).begin()
        self.places.observe(self.clock.now_s, self.scheduler.departures, self.scheduler.full)
        while len(self.flights) < self._depth and self._begin_batch():
            pass

    def _begin_batch(self) -> bool:
        """Begin a batch; False: there is no batch to begin."""
        steady, members = self.steady, self.steady.members
        if members and not _can_be_steady(self):
            steady.stop(None)
        proposals = None if self.drafts is None else self.drafts.proposals(self.runs)
        if members:
            for page in steady.begin_pages():
                self.contents[page] = None
        batch = self.scheduler.next_batch(proposals)
        if self.drafts is not None:
            self.drafts.tell()
        if not batch and not members:
            return False
        if self.unverified:
            verify(self, batch)
        self.flights.append(batch)
        chunks = [chunk for _, chunk in batch]
        seconds = self._pace.pace.batch_s(chunks, len(members), steady.context_tokens)
        seconds *= self.slow_factor * self.pace_factor
        done = partial(self._complete, batch, self.clock.now_s)
        if self.ranks is None:
            self.later(seconds, done)
        else:
            if isinstance(self.ranks, SimRanks):
                self.step_times.prefill_factor = self.ranks.factors[1]
            self.ranks.compute(batch, seconds, done)
        return True

    def _complete(self, batch: Batch, began_s: float) -> None:
        if self.hangs:
            self.later(_HANGS_LOOK_S, lambda: self._complete(batch, began_s))
            return
        flights = [each for each in self.flights if each is not batch]
        if len(flights) == len(self.flights):
            return  # The batch was abandoned.
        self.step_times.note((chunk for _, chunk in batch), self.clock.now_s - began_s)
        steady = self.steady
        if steady.members and not steady.keeps_order():
            steady.stop(batch)
        self.flights = flights
        filled = steady.fill_pages()
        answers = self._apply(batch, filled) if batch else []
        if not batch:
            for sequence in filled:
                self.note_filled(sequence)
        self._answer(answers)
        steady.stepped()
        if answers and _can_be_steady(self):
            for run, _ in answers:
                if run.sequence in self.runs:
                    steady.take(run)
        self.look()

    def _apply(self, batch: Batch, filled: list[Sequence]) -> list[tuple[SimRun, list[int]]]:
        """Apply a batch's results, next to the pages that steady sequences have `filled`; return
        the tokens to send.
        """
        sampled = {
            sequence: chosen_tokens(sequence, chunk)
            if chunk.drafts
            else [token_at(sequence.stream, len(sequence.token_ids))]
            for sequence, chunk in batch
            if chunk.logits
        }
        drafted = note_computed(self, batch)
        prefilled = self.scheduler.complete(batch, sampled)
        note_verified(self, drafted, sampled)
        runs, size, answers = self.runs, self._size, list[tuple[SimRun, list[int]]]()
        if filled:
            decoding = (sequence for sequence, chunk in batch if len(chunk.token_ids) == 1)
            for sequence in sorted((*filled, *decoding), key=order):
                self.note_filled(sequence)
        for sequence, chunk in batch:
            if (run := runs.get(sequence)) is not None:
                if sequence.computed_tokens // size != run.noted_pages:
                    self.note_filled(sequence)
                if chunk.logits:
                    answers.append((run, sampled[sequence]))
        for sequence in prefilled:
            if (run := self.runs.get(sequence)) is not None:
                self._end(run, retain_until_s=self.clock.now_s + self._site.config.transfer.lease_s)
                cached_tokens = sequence.cached_tokens or 0
                self.prompt_tokens += sequence.history_tokens
                self.cached_tokens += cached_tokens
                run.call.reply.prefilled(sequence.history_tokens, cached_tokens)
        return answers

    def _answer(self, answers: list[tuple[SimRun, list[int]]]) -> None:
        """Send the tokens of a batch, grouped by proxy."""
        flows = self.steady.flows
        if not answers:
            for asker, flow in flows.items():
                asker.answered(self.id, [], flow)
            return
        together: dict[Asker, list[Answer]] = {}
        for run, tokens in answers:
            sequence, call = run.sequence, run.call
            produced = len(sequence.token_ids) - sequence.prompt_tokens
            if is_last := produced >= call.max_tokens:
                self._end(run)
            reply = call.reply
            if (answer := together.get(reply.asker)) is None:
                answer = together[reply.asker] = []
            for position, token in enumerate(tokens, produced - len(tokens)):
                answer.append((reply, position, token, is_last and position == produced - 1))
        for asker in dict.fromkeys((*flows, *together)):
            asker.answered(self.id, together.get(asker, []), flows.get(asker))

    def _end(self, run: SimRun, retain_until_s: float | None = None) -> None:
        sequence = run.sequence
        if sequence in self.steady.members:
            self.steady.stop(self.flights[0] if self.flights else None)
        del self.runs[sequence]
        self.unverified.discard(sequence)
        if self.drafts is not None:
            self.drafts.ended(sequence)
        self.scheduler.finish(sequence, retain_until_s)
        if run.call.places:
            whole = sequence.is_whole_prefill
            if whole:
                self.checkpoint_sender.wake(self.backlog.filled(sequence, self.clock.now_s))
            self.backlog.ended(sequence, send_rest=whole)

    def note_filled(self, sequence: Sequence) -> None:
        run, full_pages = self.runs.get(sequence), sequence.computed_tokens // self._size
        if run is not None and full_pages != run.noted_pages and run.call.places:
            run.noted_pages = full_pages
            self.checkpoint_sender.wake(self.backlog.filled(sequence, self.clock.now_s))

    # Pages.

    def open(self, asked: PageRequest) -> OpenedPages:
        if asked.epoch is not None and asked.epoch != self.epoch:
            return OpenedPages([], False, lambda: None)
        held = self.pages.match(asked.tags)
        contents = self.contents_of(held)
        tail = None
        if (
            asked.handoff is not None
            and asked.tail_index is not None
            and len(held) == len(asked.tags)
        ):
            tail = self.pages.retained_page(asked.handoff, asked.tail_index)
        if tail is not None:
            self.pages.pin(tail)
            held = [*held, tail]

        def close() -> None:
            self.pages.release(held)
            self.look()

        return OpenedPages(contents, tail is not None, close)

    def verify_found(self, sequence: Sequence) -> None:
        """Check that pages found by the sequence's tags hold what the tags stand for."""
        found = self.pages.match(sequence.tags)
        require(
            self.contents_of(found) == sequence.tags[: len(found)],
            f"{self.id} has registered pages that it does not have",
        )
        self.pages.release(found)

    def received(self, page: int, content: Tag) -> None:
        self.contents[page] = content
        if self.ranks is not None:
            self.ranks.filled(page)

    def check_at_rest(self) -> None:
        """Check that nothing runs, and no page is owned, read or waited for."""
        self.pages.expire(self.clock.now_s)
        self.pages.check()
        self.scheduler.check()
        self.backlog.check()
        if isinstance(self.ranks, SimPipeline):
            self.ranks.check_at_rest()
        require(
            not self.runs and not self.flights,
            f"{self.id} still runs {[run.call.stream for run in self.runs.values()]}",
        )
        counts = (
            self.scheduler.waiting,
            self.scheduler.running,
            self.scheduler.pulling,
            self.scheduler.queued_tokens,
        )
        require(counts == (0, 0, 0, 0), f"the scheduler of {self.id} is left with {counts}")
        require(self.pages.free_pages == self.pages.pages, f"{self.id} still has pages with owners")
        require(
            not self.backlog.lag_pages and not self.checkpoint_sender.lent_pages,
            f"{self.id} still sends checkpoints",
        )


def _can_be_steady(engine: SimEngine) -> bool:
    """Return whether all decode steps are alike and fit into each batch."""
    settings = engine.settings
    return (
        engine.ranks is None
        and (engine.drafts is None or engine.drafts.helper is None)
        and settings.max_running < settings.max_batch_tokens
        and not engine.scheduler.is_short
    )
