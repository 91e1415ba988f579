"""Continuous batching with chunked prefill over paged KV.

Batches are composed per iteration (Orca, OSDI 2022) of decode steps and pieces of prefill
(Sarathi-Serve, OSDI 2024); KV is paged (vLLM, SOSP 2023).

Invariants, which `check` and the tests hold it to:
1. Every sequence has a rank in the queue, given on arrival, which never changes: three classes
   share the engine by the invariants of `fair_queue.py`, and while nothing is recovering that is
   first come, first served. Sequences are admitted, prefilled and kept by rank.
2. When pages run short the last of the running sequences is preempted, and only for one before it.
   It keeps its tokens and computes again, mostly from the prefix cache. A sequence with none behind
   it waits where it is, and no other is admitted meanwhile. So the first of the admitted always
   proceeds and none passes the head of the queue; and since only a bounded number of later ones
   get a rank before a given one, none starves. A recovery is ranked before those that wait for
   their prefill, never before those that had it: a stream that is running is not preempted because
   another one is being recovered.
3. A page that may still be written from outside (by the executor: a batch in flight; by a socket:
   a pull) is not given back, whatever happened to its sequence, before `complete`, `abandon` or
   `pulled` ends the writing.
4. A page is registered in the prefix cache only when all its tokens are computed or have arrived.
5. Every position of a history is written once: by a pull or by computing, never by both. A sequence
   computes in the order of its positions, each only when the KV of all before it is there: up to
   the first page that a pull may still be writing, from behind the last of those that have arrived
   without a gap. So what lies before the pages of a pull is computed while they come (Phase.SPLIT),
   and what did not come is computed after that.
6. A sequence into whose pages a pull or a batch in flight may still be writing is not preempted: by
   invariant 3 that would give nothing back at once.
7. A sequence is in one batch in flight at most.
8. Drafts take no page from anyone; while prompts want more than a batch has, a stream has one at
   most. Those of which `complete` does not hear leave no trace in a book.
"""

import collections.abc
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import assert_never

from kvrs.config.engine import BatchSettings
from kvrs.profiles.tables import PrefillTable
from kvrs_engine.scheduling.drafts import Proposals, take_back, with_drafts
from kvrs_engine.scheduling.fair_queue import FairQueue, order
from kvrs_engine.scheduling.flights import Flights
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.queued_work import queued_s
from kvrs_engine.scheduling.reservation import find_late, register, reserve, spoil
from kvrs_engine.scheduling.sequences import (
    Chunk,
    Pull,
    Queue,
    Sequence,
    SequencePhase,
    at_least,
    expected_ranges,
    next_chunk,
    pages_for,
    pull_of,
)
from kvrs_engine.scheduling.shares import Share, Waiting, in_line


class BatchScheduler:
    """The scheduler of one engine.

    One round: `admit`, then `next_batch`; if that is not empty execute it, `complete` it, or
    `abandon` it where that failed, and `finish` the sequences that ended. Between `next_batch` and
    `complete` everything else may be called, also `next_batch`: for what is not in flight.
    After `add`, `finish`, `pulled`, and after a peer's pins were released, another round may find
    more to do.
    """

    def __init__(
        self, settings: BatchSettings, pages: PageManager, share: Share = in_line, depth: int = 1
    ) -> None:
        """`share`: of the prefill of a batch; of any the first in line gets a token at least.
        `depth`: batches that the engine computes at a time.
        """
        assert settings.page_size_tokens == pages.page_size_tokens
        self._max_batch_tokens, self._max_running = settings.max_batch_tokens, settings.max_running
        self._page_size = settings.page_size_tokens
        self._pages, self._share = pages, share
        self._queue = FairQueue()
        self._admitted: list[Sequence] = []  # PULLING, SPLIT and RUNNING.
        # Pulls of sequences in PULLING and SPLIT, and of those that were aborted as such.
        self._pulls: dict[Sequence, Pull] = {}
        self._in_flight = Flights(depth)
        # Had no page for their decode step in the last batch, and none behind them to preempt.
        self._stalled: list[Sequence] = []
        self._queued_tokens = 0
        self._departures = 0
        # The head of the queue that did not fit, and the free pages at the last try: it is tried
        # again when there are more, since a try walks over all the tags of a history.
        self._blocked: Sequence | None = None
        self._seen_free_pages = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def queued(self) -> int:
        """Sequences that wait for admission or for pages of a peer, as an instance reports them."""
        return self.waiting + self.pulling

    @property
    def waiting_by_queue(self) -> dict[Queue, int]:
        return self._queue.lengths()

    @property
    def pulling(self) -> int:
        """How many sequences wait for pages of a peer, whether or not they compute meanwhile."""
        return sum(sequence.phase is not SequencePhase.FINISHED for sequence in self._pulls)

    @property
    def running(self) -> int:
        return len(self._admitted) - self.pulling

    @property
    def queued_tokens(self) -> int:
        """Tokens left to compute of all unfinished sequences, if all pulls succeed."""
        return self._queued_tokens

    def queued_s(self, prefill: PrefillTable) -> float:
        """Predicted time to compute what is queued, behind what the prefix cache has of it."""
        in_order = (*self._admitted, *self._queue)
        return queued_s(in_order, self._pages, prefill, self._max_batch_tokens)

    @property
    def full(self) -> bool:
        """A new sequence could not be admitted at once. Valid right after `admit`."""
        return (
            len(self._admitted) >= self._max_running
            or self._blocked is not None
            or _runs(self._stalled)
        )

    @property
    def departures(self) -> int:
        """How many admitted sequences have ended, ever."""
        return self._departures

    def fits(self, history_tokens: int, max_new_tokens: int) -> bool:
        """Such a sequence could finish if it were alone. The last token produced needs no KV."""
        return (
            pages_for(history_tokens + max(0, max_new_tokens - 1), self._page_size)
            <= self._pages.pages
        )

    def add(self, sequence: Sequence) -> None:
        assert self.fits(len(sequence.token_ids), 0), (
            "refuse what `fits` refuses: it would wait for ever"
        )
        sequence.extend_tags(self._page_size)
        sequence.awaited = expected_ranges(sequence, 0, self._page_size)
        self._queued_tokens += sequence.work_tokens
        # Tokens that a pull is expected to bring cost the others nothing; if it fails, the rank is
        # kept.
        self._queue.append(sequence, sequence.work_tokens)

    # From the queue to own pages.

    def admit(self) -> list[Pull]:
        """Give pages to waiting sequences, in order, while there are any; return what to fetch."""
        pulls: list[Pull] = []
        # Pages that come free go to stalled sequences first; a new one that starts to pull could
        # not be preempted for them.
        if self._stalled and _runs(self._stalled):
            return pulls
        while (
            len(self._admitted) < self._max_running and (sequence := self._queue.head()) is not None
        ):
            if not self._reserve(sequence):
                break
            self._queue.remove(sequence)
            insort(self._admitted, sequence, key=order)
            if sequence.awaited:
                pull = self._pulls[sequence] = pull_of(sequence, self._page_size)
                pulls.append(pull)
            self._settle(sequence)
        return pulls

    def _reserve(self, sequence: Sequence) -> bool:
        """Pages for the whole history."""
        free_pages, seen = self._pages.free_pages, self._seen_free_pages
        self._seen_free_pages = free_pages
        if self._blocked is sequence and free_pages <= seen:
            return False
        # Free pages seen for one head do not count for another one.
        self._blocked = None
        # A page of headroom for each that produces, so that a new one does not preempt at once.
        headroom = sum(not admitted.prefill_only for admitted in self._admitted)
        found = reserve(self._pages, sequence, headroom)
        if found is None:
            self._blocked = sequence
            return False
        if sequence.cached_tokens is None:
            sequence.cached_tokens = found * self._page_size
        self._change(
            sequence,
            found * self._page_size,
            awaited=expected_ranges(sequence, found, self._page_size),
        )
        return True

    def pulled(
        self,
        sequence: Sequence,
        arrived: range,
        *,
        tail: bool = False,
        more_from: int | None = None,
    ) -> None:
        """A source is done: the full pages `arrived`, and with `tail` the partial one behind them.

        Pages before `more_from`, where the next source begins, are not written any more; None: the
        pull is over. Those of them that have not arrived will be computed.
        """
        pull, size = self._pulls[sequence], self._page_size
        assert more_from is None or arrived.stop <= more_from
        assert not tail or (more_from is None and arrived.stop == pull.tail_index), (
            "a partial page is behind all the others"
        )
        if more_from is None:
            del self._pulls[sequence]
        if sequence.phase is SequencePhase.FINISHED:
            self._give_back(sequence)
            return
        new = range(arrived.start * size, arrived.stop * size + (pull.tail_tokens if tail else 0))
        assert not new or any(
            one.start <= new.start and new.stop <= one.stop for one in sequence.awaited
        ), "pages arrived that were not asked for"
        register(self._pages, sequence, arrived)
        awaited = at_least(sequence.awaited, more_from * size) if more_from is not None else ()
        assert more_from is None or awaited, "more of nothing"
        self._change(
            sequence,
            sequence.computed_tokens,
            (*sequence.arrived, new) if new else sequence.arrived,
            awaited,
        )
        if more_from is None and not sequence.pull_tail and not sequence.is_recovery:
            sequence.cached_tokens, sequence.pulls = sequence.computed_tokens, ()  # As if found.
        self._settle(sequence)

    # From pages to tokens.

    def next_batch(self, proposals: Proposals | None = None) -> list[tuple[Sequence, Chunk]]:
        """Return the next batch: the decode steps with proposals behind them, then prefill with
        what is left of the token budget. May be empty.
        """
        self._stalled = []
        batch: list[tuple[Sequence, Chunk]] = []
        size, flying = self._page_size, self._in_flight.sequences
        budget = self._max_batch_tokens - len(self._in_flight.steady)
        running, pulling = SequencePhase.RUNNING, SequencePhase.PULLING
        ready = [one for one in self._admitted if one.phase is not pulling and one not in flying]
        # Where decode steps alone can fill a batch, the first sequence could wait for ever to
        # prefill while others come and go.
        reserved = 1 if ready and ready[0].uncomputed_tokens > 1 else 0
        decoding = [
            one
            for one in ready
            if one.phase is running and len(one.token_ids) - one.computed_tokens == 1
        ]
        for sequence in decoding[: self._in_flight.share(len(decoding))]:
            if budget == reserved:
                break
            # One before it may have preempted it in this loop.
            if sequence.phase is running and (
                sequence.computed_tokens < len(sequence.pages) * size or self._has_page(sequence)
            ):
                batch.append((sequence, next_chunk(sequence, 1, size)))
                budget -= 1
        prefilling = [
            one
            for one in ready
            if len(one.token_ids) - one.computed_tokens > 1
            and one.phase is not SequencePhase.WAITING
        ]
        for sequence in prefilling:
            if sequence.has_only_found and (found := find_late(self._pages, sequence)):
                sequence.cached_tokens = sequence.computed_tokens + found * size
                self._change(sequence, sequence.cached_tokens)
        if proposals is not None:
            wanted = sum(one.computable_tokens for one in prefilling)
            batch = with_drafts(batch, self._pages, len(self._admitted), budget, wanted, proposals)
            budget -= sum(chunk.drafts for _, chunk in batch)
        asked = [Waiting(it.base, it.computed_tokens, it.computable_tokens) for it in prefilling]
        shares = self._share(asked, budget) if asked and budget else []
        for sequence, tokens in zip(prefilling, shares, strict=False):
            if tokens:
                batch.append((sequence, next_chunk(sequence, tokens, self._page_size)))
                budget -= tokens
                if sequence.gone:
                    spoil(self._pages, sequence, tokens)
        self._in_flight.begin(batch)
        return batch

    def _has_page(self, sequence: Sequence) -> bool:
        """Allocate a page for the decode step, perhaps by preempting others; False: it cannot."""
        while (page := self._pages.allocate(1, sequence.base)) is None:
            flying = self._in_flight.sequences
            last = next(
                one
                for one in reversed(self._admitted)
                if one.phase is SequencePhase.RUNNING and one not in flying
            )
            if last is sequence:
                # The other pages belong to sequences before it or in flight, to pulls, or to peers
                # to which they are being sent: they will come free.
                assert len(sequence.pages) < self._pages.pages, (
                    "refuse what `fits` refuses: it has outgrown all pages"
                )
                self._stalled.append(sequence)
                return False
            self._preempt(last)
        sequence.pages += page
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._admitted.remove(sequence)
        self._give_back(sequence)
        self._change(sequence, 0)
        # What it pulled is in the prefix cache now, and the peer may have released its pages.
        sequence.pulls, sequence.pull_tail = (), False
        sequence.phase = SequencePhase.WAITING
        self._queue.requeue(sequence)

    def complete(
        self,
        batch: Iterable[tuple[Sequence, Chunk]],
        sampled: Mapping[Sequence, collections.abc.Sequence[int]],
    ) -> list[Sequence]:
        """Apply a computed batch; `sampled` has the next tokens of every chunk that wanted logits
        and whose sequence has not ended: drafts that are right, and one more.

        Returns the `prefill_only` sequences that are now computed whole; they are to be finished
        before the next batch.
        """
        self._in_flight.end(batch)
        size = self._page_size
        prefilled: list[Sequence] = []
        for sequence, chunk in batch:
            if sequence.phase is SequencePhase.FINISHED:
                self._give_back(sequence)
                continue
            first, end = sequence.computed_tokens, sequence.computed_tokens + len(chunk.token_ids)
            if chunk.logits:
                tokens = sampled[sequence]
                assert 0 < len(tokens) <= chunk.logits, "a token for each of some leading logits"
                end -= chunk.logits - len(tokens)
                sequence.token_ids.extend(tokens)
                if len(sequence.token_ids) % size < len(tokens):
                    sequence.extend_tags(size)
                self._queued_tokens += len(tokens)
            if sequence.arrived or sequence.awaited:
                self._change(sequence, end, sequence.arrived, sequence.awaited)
                self._settle(sequence)
            else:
                self._queued_tokens -= end - first
                sequence.computed_tokens = end
            if first // size != end // size:
                register(self._pages, sequence, range(first // size, end // size))
            if first < sequence.history_tokens <= end:
                self._queue.advance(sequence)
            if chunk.drafts:
                take_back(sequence, self._pages)
            if not chunk.logits and sequence.uncomputed_tokens == 0:
                prefilled.append(sequence)
        return prefilled

    def abandon(self, batch: Iterable[tuple[Sequence, Chunk]]) -> None:
        """Drop a batch that failed: no book has changed by it, and the next one may be the same."""
        self._in_flight.end(batch)
        for sequence, chunk in batch:
            if sequence.phase is SequencePhase.FINISHED:
                self._give_back(sequence)
            elif chunk.drafts:
                take_back(sequence, self._pages)

    # The end.

    def finish(self, sequence: Sequence, retain_until_s: float | None = None) -> None:
        """End a sequence in any phase, and sample nothing more for it; to end it twice is harmless.

        With `retain_until_s` everything that a RUNNING sequence has computed stays under a lease
        named by its stream.
        """
        match sequence.phase:
            case SequencePhase.FINISHED:
                return
            case SequencePhase.WAITING:
                self._queue.remove(sequence)
            case SequencePhase.PULLING | SequencePhase.SPLIT | SequencePhase.RUNNING:
                self._admitted.remove(sequence)
                self._departures += 1
                is_running = sequence.phase is SequencePhase.RUNNING
                if is_running and retain_until_s is not None and sequence.computed_tokens:
                    pages = sequence.pages[: pages_for(sequence.computed_tokens, self._page_size)]
                    self._pages.retain(
                        sequence.stream, pages, sequence.computed_tokens, retain_until_s
                    )
            case _:
                assert_never(sequence.phase)
        self._queued_tokens -= sequence.work_tokens
        sequence.phase = SequencePhase.FINISHED
        self._give_back(sequence)

    # Helpers.

    def _change(
        self,
        sequence: Sequence,
        computed: int,
        arrived: tuple[range, ...] = (),
        awaited: tuple[range, ...] = (),
    ) -> None:
        """Set how many leading tokens are computed; what has arrived right behind them counts as
        computed.
        """
        before = sequence.work_tokens
        while arrived and arrived[0].start == computed:
            computed, arrived = arrived[0].stop, arrived[1:]
        sequence.computed_tokens, sequence.arrived, sequence.awaited = computed, arrived, awaited
        self._queued_tokens += sequence.work_tokens - before

    def _settle(self, sequence: Sequence) -> None:
        """Update the phase of an admitted sequence."""
        if sequence not in self._pulls:
            sequence.phase = SequencePhase.RUNNING
        else:
            sequence.phase = (
                SequencePhase.SPLIT if sequence.computable_tokens else SequencePhase.PULLING
            )

    def _give_back(self, sequence: Sequence) -> None:
        """Release its pages, unless they may still be written; then `complete` or `pulled` does."""
        if sequence in self._in_flight or sequence in self._pulls:
            return
        self._pages.release(sequence.pages)
        sequence.pages = []
        self._blocked = None

    def check(self) -> None:
        """Assert the invariants, and that all counters agree. O(sequences and their pages)."""
        flying = self._in_flight.sequences
        leaving = {
            one for one in flying | self._pulls.keys() if one.phase is SequencePhase.FINISHED
        }
        self._in_flight.check()
        assert all(
            one.phase is SequencePhase.WAITING and not one.pages and not one.computed_tokens
            for one in self._queue
        )
        assert all(
            one.phase in (SequencePhase.PULLING, SequencePhase.SPLIT, SequencePhase.RUNNING)
            for one in self._admitted
        )
        assert {
            one for one in self._admitted if one.phase is not SequencePhase.RUNNING
        } == self._pulls.keys() - leaving
        assert all(
            one.phase in (SequencePhase.SPLIT, SequencePhase.RUNNING, SequencePhase.FINISHED)
            for one in flying
        )
        assert all(order(earlier) < order(later) for earlier, later in pairwise(self._admitted))
        self._queue.check()
        assert len(self._admitted) <= self._max_running
        assert self._queued_tokens == sum(
            one.work_tokens for one in (*self._queue, *self._admitted)
        )
        for one in (*self._queue, *self._admitted):
            assert len(one.tags) == len(one.token_ids) // self._page_size
            assert (
                one.phase is SequencePhase.WAITING
                or one.computed_tokens <= len(one.pages) * self._page_size
            )
            assert one.work_tokens > 0 or one.prefill_only, (
                "the last position is always computed here"
            )
        for one in self._admitted:
            spans = (range(one.computed_tokens), *one.arrived, *one.awaited)
            assert all(
                earlier.stop <= later.start < later.stop for earlier, later in pairwise(spans)
            ), "a position twice"
            assert bool(one.awaited) == (one.phase is not SequencePhase.RUNNING), (
                "a sequence waits for nothing"
            )
            assert not one.awaited or (one.computable_tokens == 0) == (
                one.phase is SequencePhase.PULLING
            )
        owners = Counter(page for one in (*self._admitted, *leaving) for page in one.pages)
        assert all(self._pages.references[page] >= count for page, count in owners.items()), (
            "a page is owned without a pin"
        )


def _runs(sequences: Iterable[Sequence]) -> bool:
    return any(sequence.phase is SequencePhase.RUNNING for sequence in sequences)
