"""Decode steps of a simulated instance that add only a token to a sequence, or also fill a page.

A sequence is steady from its second token to the last but one. The scheduler counts a steady
sequence in each batch without naming it, and its tokens go to the proxy as a flow. The sequence is
updated when its page is full or when it is read, to the state and times of a simulation step by
step. No sequence is steady while pages are so short that a sequence may be preempted.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvrs.ids import InstanceId
from kvrs_engine.scheduling.drafts import Proposals
from kvrs_engine.scheduling.fair_queue import order
from kvrs_engine.scheduling.reservation import register
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_engine.scheduling.sequences import Sequence, next_chunk
from kvrs_lab.sim.calls import Asker, Batch, SimRun, token_at, tokens_at
from kvrs_lab.sim.flows import TokenFlow

FEWEST_STEPS = 2  # Fewest steps that make a steady sequence worth its cost.


class SteadyScheduler(BatchScheduler):
    @property
    def steady(self) -> set[Sequence]:
        return self._in_flight.steady

    @property
    def is_short(self) -> bool:
        """Return whether the next decode steps may need more pages than are free."""
        return self._pages.free_pages <= len(self._admitted)

    def next_batch(self, proposals: Proposals | None = None) -> Batch:
        if proposals is None and len(self.steady) == len(self._admitted):
            self._stalled = []
            return []
        return super().next_batch(proposals)

    def fill(self, sequence: Sequence, token: int, index: int) -> None:
        """Apply the step of a steady sequence that fills the page with this index."""
        sequence.token_ids.append(token)
        sequence.computed_tokens += 1
        register(self._pages, sequence, (index,))

    def begin_page(self, sequence: Sequence) -> int:
        """Give a steady sequence a page for its next step."""
        pages = self._pages.allocate(1, sequence.base)
        assert pages is not None, "none is steady where pages are short"
        sequence.pages += pages
        return pages[0]

    def name(self, batch: Batch, sequences: list[Sequence]) -> None:
        """Put sequences that were steady into this batch in flight."""
        if batch:
            self._in_flight.end(batch)
        size = self._page_size
        decodes = [each for each in batch if _decodes(each[0], each[1].first_position)]
        decodes += [(one, next_chunk(one, 1, size)) for one in sequences]
        others = [each for each in batch if not _decodes(each[0], each[1].first_position)]
        batch[:] = sorted(decodes, key=lambda each: order(each[0])) + others
        self._in_flight.begin(batch)


def _decodes(sequence: Sequence, first_position: int) -> bool:
    return first_position + 1 == len(sequence.token_ids)


@dataclass(slots=True, eq=False)
class _Steady:
    run: SimRun
    steps: int  # The sequence is up to date before this step.
    end: int  # Step of the last token.


class SteadyDecodes:
    """The steady sequences of one instance."""

    def __init__(
        self,
        instance: InstanceId,
        scheduler: SteadyScheduler,
        page_size: int,
        filled: Callable[[Sequence, int], None],
    ) -> None:
        """Create the set; `filled` gets the index of each computed page."""
        self.context_tokens = 0  # Total context of the next step.
        self._instance = instance
        self._scheduler = scheduler
        self._page_size = page_size
        self._filled = filled
        self.members: dict[Sequence, _Steady] = {}
        self.flows: dict[Asker, TokenFlow] = {}  # Flows of the next step.
        self._all_flows: dict[Asker, TokenFlow] = {}
        self._steps = 0
        # Sequences by their next step with an event: a full page, or the end.
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._filling: list[Sequence] = []  # Sequences whose page is filled by the next step.
        self._beginning: list[Sequence] = []  # Sequences that need a page for the next step.

    def take(self, run: SimRun) -> None:
        """Make a sequence steady from the next step on, if its next event is far enough."""
        sequence, call, page_size = run.sequence, run.call, self._page_size
        in_page = sequence.computed_tokens % page_size
        left = call.max_tokens - (len(sequence.token_ids) - sequence.prompt_tokens) - 1
        in_place = page_size - 1 - in_page
        if not in_page or not in_place or left < FEWEST_STEPS:
            return
        asker = call.reply.asker
        if (flow := self._all_flows.get(asker)) is None:
            flow = self._all_flows[asker] = call.reply.new_flow()
        if not call.reply.join(flow):
            return
        self.flows[asker] = flow
        self.members[sequence] = _Steady(run, self._steps, self._steps + left)
        self._scheduler.steady.add(sequence)
        self._due[self._steps + min(in_place, left)].append(sequence)
        self.context_tokens += sequence.computed_tokens + 1

    def keeps_order(self) -> bool:
        """Return whether tokens of a step that ends now arrive after all earlier tokens."""
        for asker, flow in self.flows.items():
            if not flow.keeps_order(asker.arrives_s(self._instance)):
                return False
        return True

    def fill_pages(self) -> list[Sequence]:
        """Register the pages that a finished step has filled; return their sequences."""
        if not self._filling:
            return []
        filled, self._filling = sorted(self._filling, key=order), []
        for sequence in filled:
            index = sequence.computed_tokens // self._page_size
            self._filled(sequence, index)
            token = token_at(sequence.stream, len(sequence.token_ids))
            self._scheduler.fill(sequence, token, index)
            self.members[sequence].steps += 1
        self._beginning = filled
        return filled

    def stepped(self) -> None:
        """Count a step whose tokens have been sent, and remove the sequences that end."""
        self._steps += 1
        self.context_tokens += len(self.members)
        for sequence in self._due.pop(self._steps, ()):
            member = self.members[sequence]
            if member.end == self._steps:
                self._leave(sequence)
            else:
                self._catch_up(sequence, member)
                # The tag of a page is set before the page is full.
                sequence.extend_tags(self._page_size)
                self._filling.append(sequence)
                self._due[min(self._steps + self._page_size, member.end)].append(sequence)

    def begin_pages(self) -> Iterator[int]:
        """Begin the next step; yield each new page of a steady sequence."""
        beginning, self._beginning = self._beginning, []
        return (self._scheduler.begin_page(each) for each in beginning if each in self.members)

    def catch_up(self) -> None:
        """Bring all sequences up to date."""
        for sequence, member in self.members.items():
            self._catch_up(sequence, member)

    def stop(self, batch: Batch | None) -> None:
        """End all steady decoding; name the sequences in `batch`, if in flight."""
        sequences = list(self.members)
        for sequence in sequences:
            self._leave(sequence)
        self._due.clear()
        self._filling, self._beginning = [], []
        if sequences and batch is not None:
            self._scheduler.name(batch, sequences)

    def _leave(self, sequence: Sequence) -> None:
        member = self.members.pop(sequence)
        self._catch_up(sequence, member)
        sequence.extend_tags(self._page_size)
        self._scheduler.steady.discard(sequence)
        self.context_tokens -= sequence.computed_tokens + 1
        reply = member.run.call.reply
        reply.leave()
        if not self.flows[reply.asker].calls:
            del self.flows[reply.asker]

    def _catch_up(self, sequence: Sequence, member: _Steady) -> None:
        if steps := self._steps - member.steps:
            member.steps = self._steps
            tokens = tokens_at(sequence.stream, len(sequence.token_ids), steps)
            sequence.token_ids.extend(tokens)
            sequence.computed_tokens += steps
