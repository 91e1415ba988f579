"""Continuous batching with chunked prefill over paged KV.

The laws, which `check` and the tests hold it to:
1. Everybody has a place in line, given on arrival, which never changes: three queues share the engine by the laws of `line.py`,
   and while nothing is recovering that is first come, first served. Sequences are admitted, prefilled and kept by place.
2. When pages run short the last in line of those that run is preempted, and only for one before it. It keeps its tokens and
   computes again, mostly from the prefix cache. Who finds nobody behind it waits where it is, and nobody new is admitted
   meanwhile. So the first of the admitted always proceeds and nobody passes the head of the line; and since only a bounded
   number of later ones get a place before a given one, nobody starves.
   A recovery is placed before those that wait for their prefill, never before those that had it: a stream that is running
   is not preempted because another one is being recovered.
3. A page that somebody outside may still be writing into (the executor: a batch in flight; a socket: a pull) is not
   given back, whatever happened to its sequence, before `complete` or `pulled` says that the writing is over.
4. A page is registered in the prefix cache only when all its tokens are computed or have arrived.
5. Every position of a history is written once: by a pull or by computing, never by both. A sequence computes in the order of
   its positions, each only when the KV of all before it is there: up to the first page that a pull may still be writing, from
   behind the last of those that have arrived without a gap. So what lies before the pages of a pull is computed while they
   come (Phase.SPLIT), and what did not come is computed after that.
6. A sequence into whose pages a pull may still be writing is not preempted: by law 3 that would give nothing back at once.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Run
from itertools import pairwise

from kvrs.profiles.tables import PrefillTable
from kvrs.scheduling.chunks import Chunk
from kvrs.scheduling.config import BatchSettings
from kvrs.scheduling.line import Line, order
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.sequences import Phase, Pull, Queue, Sequence
from kvrs.scheduling.spans import at_least, union


class BatchScheduler:
    """Drive it as: `admit`, then `next_batch`; if that is not empty execute it, `complete`, and `finish` who is done.

    Between `next_batch` and `complete` everything else may be called. After `add`, `abort`, `pulled`, and after
    a peer's pins were released, another round may find more to do.
    """

    def __init__(self, settings: BatchSettings, pages: PageManager) -> None:
        assert settings.page_size_tokens == pages.page_size_tokens
        self._max_batch_tokens = settings.max_batch_tokens
        self._max_running = settings.max_running
        self._page_size = settings.page_size_tokens
        self._pages = pages
        self._line = Line()
        self._admitted: list[Sequence] = []  # PULLING, SPLIT and RUNNING.
        self._pulls: dict[Sequence, Pull] = {}  # Of the PULLING and SPLIT, and of those that were aborted as such.
        self._in_flight: frozenset[Sequence] = frozenset()
        self._stalled: list[Sequence] = []  # Had no page for its decode step in the last batch, nor anyone to preempt.
        self._queued_tokens = 0
        self._released_places = 0
        # The head of the line that did not fit, and the free pages when we last looked: nothing is tried again before
        # there are more, since a try walks over all the tags of a history.
        self._blocked: Sequence | None = None
        self._seen_free_pages = 0

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def waiting_by_queue(self) -> dict[Queue, int]:
        return self._line.lengths()

    @property
    def pulling(self) -> int:
        """How many wait for pages of a peer, whether or not they have something to compute meanwhile."""
        return sum(sequence.phase is not Phase.FINISHED for sequence in self._pulls)

    @property
    def running(self) -> int:
        return len(self._admitted) - self.pulling

    @property
    def queued_tokens(self) -> int:
        """What is left to compute of all sequences that are not finished, if all arrives that is hoped for."""
        return self._queued_tokens

    def queued_s(self, prefill: PrefillTable) -> float:
        """How long it takes to compute what is queued. O(sequences).

        Attention stays within a sequence, so each is looked up by itself; a step's overhead is paid once for all that share it.
        """
        overhead_s = prefill.step_overhead_s
        steps = -(-self._queued_tokens // self._max_batch_tokens)
        queued = ((len(one.token_ids) - one.work_tokens, one.work_tokens) for one in (*self._line, *self._admitted))
        return steps * overhead_s + sum(prefill.extra(there, new) - overhead_s for there, new in queued if new)

    @property
    def full(self) -> bool:
        """Whether somebody new would have to wait for a place. Right after `admit`, which fills the places that there are."""
        return len(self._admitted) >= self._max_running or self._blocked is not None or self._somebody_stalls

    @property
    def released_places(self) -> int:
        """How many sequences ended that had a place, ever."""
        return self._released_places

    def fits(self, history_tokens: int, max_new_tokens: int) -> bool:
        """Whether such a sequence could finish if it were alone. The last token produced needs no KV."""
        return self._pages_for(history_tokens + max(0, max_new_tokens - 1)) <= self._pages.pages

    def add(self, sequence: Sequence) -> None:
        assert self.fits(len(sequence.token_ids), 0), "refuse what `fits` refuses: it would wait for ever"
        sequence.extend_tags(self._page_size)
        sequence.awaited = self._hoped(sequence, 0)
        self._queued_tokens += sequence.work_tokens
        # What a pull is hoped to bring costs the others nothing; if it fails, the place is not taken back.
        self._line.join(sequence, sequence.work_tokens)

    # From the line to pages of one's own.

    def admit(self) -> list[Pull]:
        """Give pages to waiting sequences, in line, while there are any. Returns what shall be fetched for them."""
        pulls: list[Pull] = []
        # Pages that come free belong to who is stalled; a newcomer that starts to pull could not be made to return them.
        if self._somebody_stalls:
            return pulls
        while len(self._admitted) < self._max_running and (sequence := self._line.head()) is not None:
            if not self._reserve(sequence):
                break
            self._line.leave(sequence)
            insort(self._admitted, sequence, key=order)
            if sequence.awaited:
                pull = self._pulls[sequence] = self._pull(sequence)
                pulls.append(pull)
            self._settle(sequence)
        return pulls

    def _reserve(self, sequence: Sequence) -> bool:
        """Pages for the whole history: from the prefix cache what is there, else new ones."""
        free_pages, seen = self._pages.free_pages, self._seen_free_pages
        self._seen_free_pages = free_pages
        if self._blocked is sequence and free_pages <= seen:
            return False
        self._blocked = None  # Who was the head before, and is passed, shall not be judged by what another one saw.
        found = self._pages.match(sequence.tags[: self._coverable_pages(sequence)])
        missing = self._pages_for(len(sequence.token_ids)) - len(found)
        # One page of headroom for each that is producing, so that a newcomer is not preempted, or in the way, at once.
        headroom = sum(not admitted.prefill_only for admitted in self._admitted)
        new = self._pages.allocate(missing) if missing + headroom <= self._pages.free_pages else None
        if new is None:
            self._pages.release(found)
            self._blocked = sequence
            return False
        sequence.pages = found + new
        self._change(sequence, len(found) * self._page_size, awaited=self._hoped(sequence, len(found)))
        return True

    def _hoped(self, sequence: Sequence, first_page: int) -> tuple[range, ...]:
        """The positions, from that page on, whose KV peers are believed to hold."""
        size, coverable = self._page_size, self._coverable_pages(sequence)
        spans = union(sequence.pulls, first_page, coverable)
        hoped = [range(span.start * size, span.stop * size) for span in spans]
        end_page = spans[-1].stop if spans else first_page
        if sequence.pull_tail and end_page == coverable and (tail_tokens := (len(sequence.token_ids) - 1) % size):
            start = hoped.pop().start if hoped else end_page * size
            hoped.append(range(start, end_page * size + tail_tokens))
        return tuple(hoped)

    def _pull(self, sequence: Sequence) -> Pull:
        size = self._page_size
        tail_index, tail_tokens = divmod(sequence.awaited[-1].stop, size)
        spans = tuple(range(one.start // size, one.stop // size) for one in sequence.awaited)
        return Pull(sequence, tuple(filter(None, spans)), tail_index if tail_tokens else None, tail_tokens)

    def pulled(self, sequence: Sequence, arrived: range, *, tail: bool = False, more_from: int | None = None) -> None:
        """A source has given what it could: the full pages `arrived`, and behind them perhaps the partial one.

        Nobody writes any more into pages before `more_from`, where the next source will begin; None: the pull is over. What
        of them has not arrived by now will be computed.
        """
        pull, size = self._pulls[sequence], self._page_size
        assert more_from is None or arrived.stop <= more_from
        assert not tail or (more_from is None and arrived.stop == pull.tail_index), "a partial page is behind all the others"
        if more_from is None:
            del self._pulls[sequence]
        if sequence.phase is Phase.FINISHED:
            self._give_back(sequence)
            return
        new = range(arrived.start * size, arrived.stop * size + (pull.tail_tokens if tail else 0))
        assert not new or any(one.start <= new.start and new.stop <= one.stop for one in sequence.awaited), (
            "nobody asked for that"
        )
        self._register(sequence, arrived)
        awaited = at_least(sequence.awaited, more_from * size) if more_from is not None else ()
        assert more_from is None or awaited, "more of nothing"
        self._change(sequence, sequence.computed_tokens, (*sequence.arrived, new) if new else sequence.arrived, awaited)
        self._settle(sequence)

    # From pages to tokens.

    def next_batch(self) -> list[tuple[Sequence, Chunk]]:
        """What to compute next: the decode steps, then prefill with what is left of the token budget. May be empty."""
        assert not self._in_flight, "one batch at a time"
        self._stalled = []
        batch: list[tuple[Sequence, Chunk]] = []
        budget = self._max_batch_tokens
        first = next((one for one in self._admitted if one.phase is not Phase.PULLING), None)
        # Where decode steps alone can fill a batch, the first in line would wait for ever to prefill while others come and go.
        reserved = 1 if first is not None and first.uncomputed_tokens > 1 else 0
        for sequence in [one for one in self._admitted if one.phase is Phase.RUNNING and one.uncomputed_tokens == 1]:
            if budget == reserved:
                break
            # One before it may have preempted it a moment ago.
            if sequence.phase is Phase.RUNNING and self._has_page(sequence):
                batch.append((sequence, self._chunk(sequence, 1)))
                budget -= 1
        for sequence in [one for one in self._admitted if one.phase is not Phase.PULLING and one.uncomputed_tokens > 1]:
            if budget == 0:
                break
            tokens = min(budget, sequence.computable_tokens)
            batch.append((sequence, self._chunk(sequence, tokens)))
            budget -= tokens
        self._in_flight = frozenset(sequence for sequence, _ in batch)
        return batch

    def _chunk(self, sequence: Sequence, tokens: int) -> Chunk:
        # Copies, because the executor reads them while we may be changing the sequence.
        end = sequence.computed_tokens + tokens
        return Chunk(
            token_ids=sequence.token_ids[sequence.computed_tokens : end],
            first_position=sequence.computed_tokens,
            pages=sequence.pages[: self._pages_for(end)],
            wants_logits=end == len(sequence.token_ids) and not sequence.prefill_only,
        )

    def _has_page(self, sequence: Sequence) -> bool:
        """Make sure that there is a page for the decode step, at the cost of sequences behind it if need be."""
        if sequence.computed_tokens < len(sequence.pages) * self._page_size:
            return True
        while (page := self._pages.allocate(1)) is None:
            last = next(one for one in reversed(self._admitted) if one.phase is Phase.RUNNING)
            if last is sequence:
                # The rest is with those before it, with pulls, or with peers that are being sent pages: it will come free.
                assert len(sequence.pages) < self._pages.pages, "refuse what `fits` refuses: it has outgrown all pages"
                self._stalled.append(sequence)
                return False
            self._preempt(last)
        sequence.pages += page
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._admitted.remove(sequence)
        self._give_back(sequence)
        self._change(sequence, 0)
        # What it pulled is in the prefix cache now, and the peer may have let go of its pages.
        sequence.pulls, sequence.pull_tail = (), False
        sequence.phase = Phase.WAITING
        self._line.put_back(sequence)

    def complete(self, batch: Run[tuple[Sequence, Chunk]], sampled: Mapping[Sequence, int]) -> list[Sequence]:
        """The batch is computed; `sampled` has the next token of every chunk that wanted logits and is still wanted.

        Returns the `prefill_only` sequences that are now computed whole; they are to be finished before the next batch.
        """
        assert frozenset(sequence for sequence, _ in batch) == self._in_flight, "not the batch that is in flight"
        self._in_flight = frozenset()
        prefilled: list[Sequence] = []
        for sequence, chunk in batch:
            if sequence.phase is Phase.FINISHED:
                self._give_back(sequence)
                continue
            first, end = sequence.computed_tokens, sequence.computed_tokens + len(chunk.token_ids)
            self._change(sequence, end, sequence.arrived, sequence.awaited)
            self._register(sequence, range(first // self._page_size, end // self._page_size))
            self._settle(sequence)
            if end >= sequence.history_tokens:
                self._line.served(sequence)
            if chunk.wants_logits:
                sequence.token_ids.append(sampled[sequence])
                sequence.extend_tags(self._page_size)
                self._queued_tokens += 1
            elif sequence.uncomputed_tokens == 0:
                prefilled.append(sequence)
        return prefilled

    # The end.

    def finish(self, sequence: Sequence, retain_until_s: float | None = None) -> None:
        """End a sequence in any phase; to end it twice is harmless.

        With `retain_until_s` everything that a RUNNING sequence has computed stays under a lease named by its stream.
        """
        match sequence.phase:
            case Phase.FINISHED:
                return
            case Phase.WAITING:
                self._line.leave(sequence)
            case Phase.PULLING | Phase.SPLIT:
                self._leave(sequence)
            case Phase.RUNNING:
                self._leave(sequence)
                if retain_until_s is not None and sequence.computed_tokens:
                    pages = sequence.pages[: self._pages_for(sequence.computed_tokens)]
                    self._pages.retain(sequence.stream, pages, sequence.computed_tokens, retain_until_s)
        self._queued_tokens -= sequence.work_tokens
        sequence.phase = Phase.FINISHED
        self._give_back(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in any phase and keep nothing. Nothing more is sampled for it."""
        self.finish(sequence)

    # Small change.

    @property
    def _somebody_stalls(self) -> bool:
        return any(sequence.phase is Phase.RUNNING for sequence in self._stalled)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _coverable_pages(self, sequence: Sequence) -> int:
        """How many full pages may come from elsewhere: the last position is always computed here, for its logits."""
        return (len(sequence.token_ids) - 1) // self._page_size

    def _change(
        self, sequence: Sequence, computed: int, arrived: tuple[range, ...] = (), awaited: tuple[range, ...] = ()
    ) -> None:
        """That many leading tokens are computed; and what has arrived right behind them counts as such."""
        before = sequence.work_tokens
        while arrived and arrived[0].start == computed:
            computed, arrived = arrived[0].stop, arrived[1:]
        sequence.computed_tokens, sequence.arrived, sequence.awaited = computed, arrived, awaited
        self._queued_tokens += sequence.work_tokens - before

    def _settle(self, sequence: Sequence) -> None:
        """Give an admitted sequence the phase that it is in now."""
        if sequence not in self._pulls:
            sequence.phase = Phase.RUNNING
        else:
            sequence.phase = Phase.SPLIT if sequence.computable_tokens else Phase.PULLING

    def _leave(self, sequence: Sequence) -> None:
        self._admitted.remove(sequence)
        self._released_places += 1

    def _register(self, sequence: Sequence, indexes: Iterable[int]) -> None:
        for index in indexes:
            page = sequence.pages[index]
            found = self._pages.register(page, sequence.tags[index])
            if found != page:
                # Someone computed the same page meanwhile. Two copies would waste one, and a lease on ours would
                # protect the copy that nobody finds.
                self._pages.pin(found)
                self._pages.release([page])
                sequence.pages[index] = found

    def _give_back(self, sequence: Sequence) -> None:
        """Its pages, as soon as nobody writes into them."""
        if sequence in self._in_flight or sequence in self._pulls:
            return
        self._pages.release(sequence.pages)
        sequence.pages = []
        self._blocked = None

    def check(self) -> None:
        """Assert the laws and that all books agree. O(sequences and their pages)."""
        leaving = {one for one in self._in_flight | self._pulls.keys() if one.phase is Phase.FINISHED}
        assert all(one.phase is Phase.WAITING and not one.pages and not one.computed_tokens for one in self._line)
        assert all(one.phase in (Phase.PULLING, Phase.SPLIT, Phase.RUNNING) for one in self._admitted)
        assert {one for one in self._admitted if one.phase is not Phase.RUNNING} == self._pulls.keys() - leaving
        assert all(one.phase in (Phase.SPLIT, Phase.RUNNING, Phase.FINISHED) for one in self._in_flight)
        assert all(order(earlier) < order(later) for earlier, later in pairwise(self._admitted))
        self._line.check()
        assert len(self._admitted) <= self._max_running
        assert self._queued_tokens == sum(one.work_tokens for one in (*self._line, *self._admitted))
        for one in (*self._line, *self._admitted):
            assert len(one.tags) == len(one.token_ids) // self._page_size
            assert one.phase is Phase.WAITING or one.computed_tokens <= len(one.pages) * self._page_size
            assert one.work_tokens > 0 or one.prefill_only, "the last position is always computed here"
        for one in self._admitted:
            spans = (range(one.computed_tokens), *one.arrived, *one.awaited)
            assert all(earlier.stop <= later.start < later.stop for earlier, later in pairwise(spans)), "a position twice"
            assert bool(one.awaited) == (one.phase is not Phase.RUNNING), "somebody waits for nothing"
            assert not one.awaited or (one.computable_tokens == 0) == (one.phase is Phase.PULLING)
        owners = Counter(page for one in (*self._admitted, *leaving) for page in one.pages)
        assert all(self._pages.references(page) >= count for page, count in owners.items()), "a page is owned without a pin"
