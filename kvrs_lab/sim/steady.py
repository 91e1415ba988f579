"""Decode steps of a simulated instance in which nothing happens to a sequence but one more token,
or one that fills a page.

That is so from its second token to the last but one, and the sequence is steady meanwhile. The
scheduler counts it in each batch and does not name it, its tokens go to the proxy as a flow, and it
is brought up to date when its page is full or it is looked at, with the state and at the times that
it had if each step were worked out by itself. None is steady while pages are so short that one may
be preempted.
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

FEWEST_STEPS = 2  # For which it is worth while.


class SteadyScheduler(BatchScheduler):
    @property
    def steady(self) -> set[Sequence]:
        return self._in_flight.steady

    @property
    def is_short(self) -> bool:
        """The next decode steps may need more pages than there are."""
        return self._pages.free_pages <= len(self._admitted)

    def next_batch(self, proposals: Proposals | None = None) -> Batch:
        if proposals is None and len(self.steady) == len(self._admitted):
            self._stalled = []
            return []
        return super().next_batch(proposals)

    def fill(self, sequence: Sequence, token: int, index: int) -> None:
        """The next step of a steady sequence, which fills the page of that index."""
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
        """Sequences that were steady are in this batch in flight as others are."""
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
    steps: int  # Up to which the sequence is up to date.
    end: int  # Before the step of its last token.


class SteadyDecodes:
    """The steady sequences of one instance."""

    def __init__(
        self,
        instance: InstanceId,
        scheduler: SteadyScheduler,
        page_size: int,
        filled: Callable[[Sequence, int], None],
    ) -> None:
        """`filled`: the sequence has computed the page of that index, which is registered then."""
        self.context_tokens = 0  # Of the next step, of all together.
        self._instance = instance
        self._scheduler = scheduler
        self._page_size = page_size
        self._filled = filled
        self.members: dict[Sequence, _Steady] = {}
        self.flows: dict[Asker, TokenFlow] = {}  # By which the tokens of a step go.
        self._all_flows: dict[Asker, TokenFlow] = {}
        self._steps = 0
        # By the step before which each is looked at: it fills a page, or is steady no more.
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._filling: list[Sequence] = []  # With the next step.
        self._beginning: list[Sequence] = []  # A page, with the next step.

    def take(self, run: SimRun) -> None:
        """From the next step on, if it has some before anything happens to it."""
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
        """The tokens of a step that ends now come behind all that was sent before."""
        for asker, flow in self.flows.items():
            if not flow.keeps_order(asker.arrives_s(self._instance)):
                return False
        return True

    def fill_pages(self) -> list[Sequence]:
        """A step is over: register the pages that are full by it; return their sequences."""
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
        """Its tokens have been sent; those whose time is over leave."""
        self._steps += 1
        self.context_tokens += len(self.members)
        for sequence in self._due.pop(self._steps, ()):
            member = self.members[sequence]
            if member.end == self._steps:
                self._leave(sequence)
            else:
                self._catch_up(sequence, member)
                # The tag of its page is there before the page is.
                sequence.extend_tags(self._page_size)
                self._filling.append(sequence)
                self._due[min(self._steps + self._page_size, member.end)].append(sequence)

    def begin_pages(self) -> Iterator[int]:
        """The next step begins: each page that a steady sequence gets for it."""
        beginning, self._beginning = self._beginning, []
        return (self._scheduler.begin_page(each) for each in beginning if each in self.members)

    def catch_up(self) -> None:
        """Bring all up to date."""
        for sequence, member in self.members.items():
            self._catch_up(sequence, member)

    def stop(self, batch: Batch | None) -> None:
        """None is steady any more; those that were are in `batch`, if one is in flight."""
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
