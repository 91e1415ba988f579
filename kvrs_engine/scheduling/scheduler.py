"""Continuous batching with chunked prefill over paged KV.

Batches are composed per iteration (Orca, OSDI 2022) of decode steps and pieces of prefill
(Sarathi-Serve, OSDI 2024); KV is paged (vLLM, SOSP 2023).

Invariants, checked by `check` and by tests:
1. Every sequence has a rank in the queue, given on arrival, which never changes: three classes
   share the engine by the invariants of `fair_queue.py`; without recoveries the order is first
   come, first served. Sequences are admitted, prefilled and kept by rank.
2. When pages run short the last running sequence is preempted, and only for an earlier sequence. A
   preempted sequence keeps its tokens and computes again, mostly from the prefix cache. The last
   sequence itself waits for pages, and no other is admitted meanwhile. So the first admitted
   sequence always proceeds, no sequence overtakes the head of the queue, and since only a bounded
   number of later sequences get an earlier rank, none starves. A recovery is ranked before
   sequences that wait for their prefill, never before running ones: a recovery does not preempt a
   running stream.
3. A page that may still be written (by a batch in flight or by a pull) is not released before
   `complete`, `abandon` or `pulled` ends the writing, even if its sequence has ended.
4. A page is registered in the prefix cache only when all its tokens are computed or have arrived.
5. Every position of a history is written once: by a pull or by computing, never by both. A sequence
   computes its positions in order, each after the KV of all earlier positions: from the end of the
   pages that have arrived without a gap, up to the first page that a pull may still write. So the
   tokens before a pull's pages are computed during the pull (Phase.SPLIT), and pages that did not
   arrive are computed after it.
6. A sequence is not preempted while a pull or a batch in flight may write into its pages: by
   invariant 3 that would release no page at once.
7. A sequence is in one batch in flight at most.
8. Drafts take no page that other work needs, and no batch that has tokens of a prompt has drafts.
   Drafts that `complete` does not accept leave no trace.
"""

import collections.abc
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import assert_never

from kvrs.config.cluster import BatchSettings
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

    One round: `admit`, then `next_batch`; execute a batch that is not empty, `complete` it (or
    `abandon` it after a failure), and `finish` the sequences that ended. All other methods may be
    called between `next_batch` and `complete`, also `next_batch` for sequences that are not in
    flight. After `add`, `finish`, `pulled`, and after the release of a peer's pins, another round
    may find more work.
    """

    def __init__(
        self, settings: BatchSettings, pages: PageManager, share: Share = in_line, depth: int = 1
    ) -> None:
        """`share` divides a batch's prefill tokens among sequences; the first in line must get one
        at least. `depth` is the number of batches that the engine computes at a time.
        """
        assert settings.page_size_tokens == pages.page_size_tokens
        self._max_batch_tokens, self._max_running = settings.max_batch_tokens, settings.max_running
        self._page_size = settings.page_size_tokens
        self._pages, self._share = pages, share
        self._queue = FairQueue()
        self._admitted: list[Sequence] = []  # Sequences in PULLING, SPLIT and RUNNING.
        # Pulls of sequences in PULLING and SPLIT, and of sequences that were aborted meanwhile.
        self._pulls: dict[Sequence, Pull] = {}
        self._in_flight = Flights(depth)
        # Sequences without a page for their decode step, and with no later one to preempt.
        self._stalled: list[Sequence] = []
        self._queued_tokens = 0
        self._departures = 0
        # The head of the queue that did not fit, and the free pages at that time. The next try
        # waits for more free pages, because a try takes O(tags of the history).
        self._blocked: Sequence | None = None
        self._seen_free_pages = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def queued(self) -> int:
        """Number of sequences that wait for admission or for a peer's pages, for load reports."""
        return self.waiting + self.pulling

    @property
    def waiting_by_queue(self) -> dict[Queue, int]:
        return self._queue.lengths()

    @property
    def pulling(self) -> int:
        """Number of sequences in PULLING and SPLIT."""
        return sum(sequence.phase is not SequencePhase.FINISHED for sequence in self._pulls)

    @property
    def running(self) -> int:
        return len(self._admitted) - self.pulling

    @property
    def queued_tokens(self) -> int:
        """Number of tokens left to compute for all unfinished sequences, if all pulls succeed."""
        return self._queued_tokens

    def queued_s(self, prefill: PrefillTable) -> float:
        """Return the predicted time of the queued work, without the tokens in the prefix cache."""
        in_order = (*self._admitted, *self._queue)
        return queued_s(in_order, self._pages, prefill, self._max_batch_tokens)

    @property
    def full(self) -> bool:
        """True if a new sequence could not be admitted at once; valid right after `admit`."""
        return (
            len(self._admitted) >= self._max_running
            or self._blocked is not None
            or _runs(self._stalled)
        )

    @property
    def departures(self) -> int:
        """Total number of admitted sequences that have ended."""
        return self._departures

    def fits(self, history_tokens: int, max_new_tokens: int) -> bool:
        """Return whether such a sequence fits into the pool. The last output token needs no KV."""
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
        # Pulled tokens cost other sequences no time; if the pull fails, the rank is kept.
        self._queue.append(sequence, sequence.work_tokens)

    # Admission.

    def admit(self) -> list[Pull]:
        """Admit waiting sequences in order while pages are free; return their pulls."""
        pulls: list[Pull] = []
        # Stalled sequences get free pages first: a new sequence that pulls could not be preempted.
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
        """Reserve pages for the sequence's whole history; False: they are not free."""
        free_pages, seen = self._pages.free_pages, self._seen_free_pages
        self._seen_free_pages = free_pages
        if self._blocked is sequence and free_pages <= seen:
            return False
        self._blocked = None
        # One page of headroom per decoding sequence, so that a new one does not preempt at once.
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
        """Note that a source is done, with the full pages `arrived` and, with `tail`, the partial
        page after them.

        `more_from` is the first page of the next source; None: the pull is over. Earlier pages that
        have not arrived will be computed.
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
            # The pulled prompt counts as cached.
            sequence.cached_tokens, sequence.pulls = sequence.computed_tokens, ()
        self._settle(sequence)

    # Batches.

    def next_batch(self, proposals: Proposals | None = None) -> list[tuple[Sequence, Chunk]]:
        """Return the next batch: decode steps, then prefill for the rest of the token budget, or
        drafts if no prompt wants it. May be empty.
        """
        self._stalled = []
        batch: list[tuple[Sequence, Chunk]] = []
        size, flying = self._page_size, self._in_flight.sequences
        budget = self._max_batch_tokens - len(self._in_flight.steady)
        running, pulling = SequencePhase.RUNNING, SequencePhase.PULLING
        ready = [one for one in self._admitted if one.phase is not pulling and one not in flying]
        # Without a reserved token, decode steps could fill every batch and starve the first
        # sequence's prefill.
        reserved = 1 if ready and ready[0].uncomputed_tokens > 1 else 0
        decoding = [
            one
            for one in ready
            if one.phase is running and len(one.token_ids) - one.computed_tokens == 1
        ]
        for sequence in decoding[: self._in_flight.share(len(decoding))]:
            if budget == reserved:
                break
            # An earlier sequence may have preempted this one in this loop.
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
            idle = 0 if any(one.computable_tokens for one in prefilling) else budget
            batch = with_drafts(batch, self._pages, len(self._admitted), idle, proposals)
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
        """Allocate a page for the decode step, preempting later sequences; False: none is free."""
        while (page := self._pages.allocate(1, sequence.base)) is None:
            flying = self._in_flight.sequences
            last = next(
                one
                for one in reversed(self._admitted)
                if one.phase is SequencePhase.RUNNING and one not in flying
            )
            if last is sequence:
                # All other pages belong to earlier sequences, batches in flight, pulls, or
                # transfers to peers, and will become free.
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
        # The pulled pages are in the prefix cache now, and the peer may have released its own.
        sequence.pulls, sequence.pull_tail = (), False
        sequence.phase = SequencePhase.WAITING
        self._queue.requeue(sequence)

    def complete(
        self,
        batch: Iterable[tuple[Sequence, Chunk]],
        sampled: Mapping[Sequence, collections.abc.Sequence[int]],
    ) -> list[Sequence]:
        """Apply a computed batch. `sampled` has the next tokens of every unfinished sequence whose
        chunk wanted logits: the accepted drafts, and one more token.

        Returns the `prefill_only` sequences that are now complete; the caller must finish them
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
        """Drop a failed batch; it has changed no state, and the next batch may be the same."""
        self._in_flight.end(batch)
        for sequence, chunk in batch:
            if sequence.phase is SequencePhase.FINISHED:
                self._give_back(sequence)
            elif chunk.drafts:
                take_back(sequence, self._pages)

    # The end.

    def finish(self, sequence: Sequence, retain_until_s: float | None = None) -> None:
        """End a sequence in any phase; a second call does nothing.

        With `retain_until_s` the computed pages of a RUNNING sequence are retained under a lease
        with the key of its stream.
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
        """Set the number of computed leading tokens, and the arrived and awaited ranges. Arrived
        ranges directly after the computed tokens count as computed.
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
        """Release a sequence's pages; if they may still be written, `complete` or `pulled` will."""
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
