"""The batch scheduler over random histories, with an engine whose KV can be read.

What a real engine writes for a position depends on all tokens up to it. The engine here writes a
hash of just that, made from the token and from what *the pages* hold for the position before. So if
a page is ever handed out too early, shared wrongly or registered before it is computed, some
sequence reads a wrong past, and it shows.
"""

from collections import abc
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from random import Random
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrs.config.cluster import BatchSettings
from kvrs.ids import StreamId
from kvrs.protocol.pages import Tag, page_tags, root_tag
from kvrs_engine.scheduling.fair_queue import order
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_engine.scheduling.sequences import Chunk, Pull, Queue, Sequence, SequencePhase
from kvrs_testkit.examples import examples

P = 4
ROOT = root_tag("model")
EMPTY, GARBAGE = b"empty", b"garbage"
FLOOD = [9] * 13
PROMPTS = {"one": [1] * 60, "like one": [1] * 9 + [2] * 51, "other": [3] * 60}


def kv(past: bytes, token: int) -> bytes:
    return blake2b(past + bytes([token]), digest_size=8).digest()


def kv_of(token_ids: abc.Sequence[int]) -> list[bytes]:
    """The KV that these tokens must have, position by position."""
    values: list[bytes] = []
    for token in token_ids:
        values.append(kv(values[-1] if values else EMPTY, token))
    return values


def next_token(last_kv: bytes) -> int:
    return 4 + last_kv[0] % 2


def continuation(prompt: abc.Sequence[int], tokens: int) -> list[int]:
    """The prompt and its continuation by an engine that is never disturbed."""
    token_ids = list(prompt)
    for _ in range(tokens):
        token_ids.append(next_token(kv_of(token_ids)[-1]))
    return token_ids


MAX_BATCHES = 3  # In flight.


class Sent(NamedTuple):
    """Pages that a peer is being sent: they must not change until it has them."""

    pages: list[int]
    content: list[list[bytes]]
    tail_tokens: int  # Of the last of them; P if it is full.


@dataclass(eq=False)
class Fetching:
    """A pull on its way. Its pages are named when it begins: the socket knows no other ones."""

    pull: Pull
    pages: dict[
        int, int
        # By index into the sequence: those that may still be written into. The partial one is the
        # last.
    ]

    @property
    def runs(self) -> list[range]:
        """The full pages among them, in unbroken runs."""
        full = [index for index in self.pages if index != self.pull.tail_index]
        starts = [index for index in full if index - 1 not in full]
        return [
            range(start, next(end for end in range(start, max(full) + 2) if end not in full))
            for start in starts
        ]


def fetching(pull: Pull) -> Fetching:
    indexes = [index for span in pull.spans for index in span]
    if pull.tail_index is not None:
        indexes.append(pull.tail_index)
    return Fetching(pull, {index: pull.sequence.pages[index] for index in indexes})


class Engine:
    """Pages one can read, and an executor that writes as late as it may."""

    def __init__(self, pages: int, max_batch_tokens: int, max_running: int) -> None:
        self.pages = PageManager(pages, P)
        batch_settings = BatchSettings(
            page_size_tokens=P,
            pages=pages,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
        )
        self.settings = batch_settings
        self.scheduler = BatchScheduler(batch_settings, self.pages)
        self.slots = [[GARBAGE] * P for _ in range(pages)]

    def execute(self, chunk: Chunk) -> list[int]:
        """Write the chunk's KV, reading its past from the pages; returns the next tokens: drafts
        that are right, and one more.
        """
        past, tokens = EMPTY, list[int]()
        end = chunk.first_position + len(chunk.token_ids)
        assert len(chunk.pages) == -(-end // P)
        for position in range(end):
            page, slot = chunk.pages[position // P], position % P
            if position >= chunk.first_position:
                self.slots[page][slot] = kv(past, chunk.token_ids[position - chunk.first_position])
            past = self.slots[page][slot]
            tokens.append(next_token(past))
        drafts = list(chunk.token_ids)[len(chunk.token_ids) - chunk.drafts :]
        tokens = tokens[-1 - len(drafts) :]
        right = next((at for at, draft in enumerate(drafts) if draft != tokens[at]), len(drafts))
        return tokens[: right + 1]

    def receive(self, one: Fetching, arrived: range, tail: bool, end: int | None) -> None:
        """Write what a peer sent; of what comes before page `end` the rest is rubbish, and no more
        comes.
        """
        right = kv_of(one.pull.sequence.token_ids)
        for index in [index for index in one.pages if end is None or index < end]:
            tokens = one.pull.tail_tokens if index == one.pull.tail_index else P
            whole = index in arrived or (tail and index == one.pull.tail_index)
            self.slots[one.pages.pop(index)][:tokens] = (
                right[index * P : index * P + tokens] if whole else [GARBAGE] * tokens
            )

    def read(self, pages: list[int], tokens: int) -> list[bytes]:
        return [slot for page in pages for slot in self.slots[page]][:tokens]


class BatchMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(4, 16),
        max_batch_tokens=st.integers(1, 12),
        max_running=st.integers(1, 5),
        seed=st.none() | st.integers(0, 99),
    )
    def start(
        self, pages: int, max_batch_tokens: int, max_running: int, seed: int | None = None
    ) -> None:
        """`seed`: of drafts, of which about half are right; None: there are none."""
        self.engine = Engine(pages, max_batch_tokens, max_running)
        self.drafts = None if seed is None else Random(seed)
        self.open: dict[Sequence, int] = {}  # With the number of tokens that each shall produce.
        self.pulls: list[Fetching] = []
        self.batches: list[list[tuple[Sequence, Chunk]]] = []  # In flight.
        self.sent: list[Sent] = []
        self.retained: dict[StreamId, abc.Sequence[int]] = {}
        self.content_by_tag: dict[Tag, list[bytes]] = {}
        self.now_s = 0.0

    @rule(
        prompt=st.sampled_from(sorted(PROMPTS)),
        length=st.integers(1, 40),
        produced_before=st.integers(0, 5),
        new=st.integers(0, 28),
        pulls=st.lists(
            st.builds(
                lambda first, pages: range(first, first + pages),
                st.integers(0, 8),
                st.integers(1, 6),
            ),
            max_size=3,
        ),
        pull_tail=st.booleans(),
        stream=st.sampled_from("abcdef"),
        attempt=st.sampled_from([1, 1, 1, 2]),
    )
    def add(
        self,
        prompt: str,
        length: int,
        produced_before: int,
        new: int,
        pulls: list[range],
        pull_tail: bool,
        stream: str,
        attempt: int,
    ) -> None:
        history = continuation(PROMPTS[prompt][:length], produced_before)
        if self.engine.scheduler.fits(len(history), new):
            prefill_only = new == 0
            self._add(
                Sequence(
                    StreamId(stream),
                    (0, attempt),
                    history,
                    length,
                    ROOT,
                    prefill_only,
                    tuple(pulls),
                    pull_tail,
                ),
                new,
            )

    @rule(
        prompt=st.sampled_from(sorted(PROMPTS)),
        front_pages=st.integers(1, 4),
        back_pages=st.integers(1, 4),
        gap_pages=st.integers(0, 2),
        rest=st.integers(1, P),
        new=st.integers(0, 6),
    )
    def add_a_recovery_whose_back_is_held(
        self, prompt: str, front_pages: int, back_pages: int, gap_pages: int, rest: int, new: int
    ) -> None:
        """By two peers, perhaps, with a gap between them."""
        end = front_pages + back_pages
        pulls = [range(front_pages, end), range(end + gap_pages, end + gap_pages + 1)]
        history = PROMPTS[prompt][: pulls[1].stop * P + rest]
        if self.engine.scheduler.fits(len(history), new):
            self._add(
                Sequence(
                    StreamId("back"), (0, 2), history, len(history), ROOT, new == 0, tuple(pulls)
                ),
                new,
            )

    def _add(self, sequence: Sequence, new: int) -> None:
        self.engine.scheduler.add(sequence)
        # Whatever its queue: not before one of its own queue, and not before one whose history is
        # computed.
        for one in self.open:
            served = one.computed_tokens >= one.history_tokens
            assert order(one) < order(sequence) or not (served or one.queue is sequence.queue)
        self.open[sequence] = new
        self._learn_tags(sequence.token_ids)

    @rule()
    def admit(self) -> None:
        self.pulls += map(fetching, self.engine.scheduler.admit())

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def a_peer_is_sending(self, data: st.DataObject) -> None:
        """Half a page is in one of those that are to be filled: it may not be read, nor have been
        written.
        """
        for page in data.draw(st.sampled_from(self.pulls)).pages.values():
            self.engine.slots[page][: P // 2] = [GARBAGE] * (P // 2)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def a_source_ends(self, data: st.DataObject) -> None:
        """Some run of what is wanted has arrived, what was wanted before it will not come; and the
        next source begins anywhere behind it, or there is none.
        """
        one = data.draw(st.sampled_from(self.pulls))
        arrived, tail, more_from = range(one.pull.first_page, one.pull.first_page), False, None
        if one.runs:
            run = data.draw(st.sampled_from(one.runs))
            start = data.draw(st.just(run.start) | st.integers(run.start, run.stop - 1))
            arrived = range(start, data.draw(st.just(run.stop) | st.integers(start, run.stop)))
        elif one.pull.tail_index is not None:
            arrived = range(one.pull.tail_index, one.pull.tail_index)
        if arrived.stop == one.pull.tail_index:
            tail = data.draw(st.booleans())
        behind = [index for index in one.pages if arrived.stop <= index != one.pull.tail_index]
        if behind and not tail and data.draw(st.booleans()):
            more_from = data.draw(st.sampled_from(behind))
        self._source_ended(one, arrived, tail, more_from)

    def _source_ended(
        self, one: Fetching, arrived: range, tail: bool, more_from: int | None
    ) -> None:
        self.engine.receive(one, arrived, tail, more_from)
        if more_from is None:
            self.pulls.remove(one)
        self.engine.scheduler.pulled(one.pull.sequence, arrived, tail=tail, more_from=more_from)

    @precondition(lambda self: len(self.batches) < MAX_BATCHES)
    @rule()
    def next_batch(self) -> None:
        cached: list[list[int]] = []  # When the batch is made, but for drafts.

        def proposals(sequence: Sequence, most: int) -> list[int]:
            assert self.drafts is not None
            cached.append(list(self.engine.pages._cached))
            most = min(most, self._remaining(sequence) - 1)
            count = self.drafts.randint(0, max(0, most))
            return [4 + self.drafts.randrange(2) for _ in range(count)]

        admitted = list(self.engine.scheduler._admitted)
        flying = {one for batch in self.batches for one, _ in batch}
        running = [
            one for one in admitted if one.phase is SequencePhase.RUNNING and one not in flying
        ]

        prompts = [one for one in admitted if one not in flying and one.uncomputed_tokens > 1]

        # A prompt of which all but a token is found late is none of them.
        decoding = {one for one in admitted if one.uncomputed_tokens == 1}

        batch = self.engine.scheduler.next_batch(proposals if self.drafts else None)

        if batch:
            self.batches.append(batch)
        assert all(pages == list(self.engine.pages._cached) for pages in cached), "drafts take"
        assert flying.isdisjoint(one for one, _ in batch), "a sequence is in two batches"

        # Only the last in the queue are preempted, of those not in flight, and never the first.
        preempted = [one for one in admitted if one.phase is SequencePhase.WAITING]
        still = [one for one in running if one.phase is SequencePhase.RUNNING]
        assert not preempted or (still and max(map(order, still)) < min(map(order, preempted)))
        assert set(preempted) <= set(running), "a pull may be writing into its pages"
        assert (
            sum(len(chunk.token_ids) for _, chunk in batch) <= self.engine.settings.max_batch_tokens
        )
        kinds = [one in decoding for one, _ in batch]
        assert kinds == sorted(kinds, reverse=True), "decode steps come first"
        assert all(
            order(earlier) < order(later)
            for (earlier, _), (later, _) in pairwise(batch)
            if (earlier in decoding) == (later in decoding)
        )
        for one, chunk in batch:
            known = list(chunk.token_ids)[: len(chunk.token_ids) - chunk.drafts]
            assert known == one.token_ids[chunk.first_position :][: len(known)]
            assert not chunk.drafts or len(known) == 1
        self._check_drafts(batch, prompts)

    def _check_drafts(self, batch: list[tuple[Sequence, Chunk]], prompts: list[Sequence]) -> None:
        """No stream has drafts where tokens of a prompt can be computed, behind what was found
        late.
        """
        got = {one: len(chunk.token_ids) for one, chunk in batch}
        if any(got.get(one, 0) or one.computable_tokens for one in prompts if one.pages):
            assert not any(chunk.drafts for _, chunk in batch)

    @precondition(lambda self: self.batches)
    @rule(retain=st.booleans(), data=st.data())
    def one_is_complete(self, retain: bool, data: st.DataObject) -> None:
        self.batches.append(self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1))))
        self.complete(retain)

    def complete(self, retain: bool) -> None:
        """The last of the batches in flight."""
        batch = self.batches.pop()
        # As late as possible: whatever was aborted, admitted or evicted meanwhile, these writes
        # still come.
        sampled = {sequence: self.engine.execute(chunk) for sequence, chunk in batch}
        wanted = {
            one: token
            for (one, token) in sampled.items()
            if one in self.open and not one.prefill_only
        }

        prefilled = self.engine.scheduler.complete(batch, wanted)

        # Also of those that end now: drafts that were right may fill a page.
        for one in self.open:
            self._learn_tags(one.token_ids)
        done = {one for one, _ in batch if one in self.open and not self._remaining(one)}
        assert {one for one in done if one.prefill_only} == set(prefilled)
        for sequence in done:
            assert sequence.token_ids == continuation(
                sequence.token_ids[: sequence.history_tokens], self.open[sequence]
            )
            self._finish(sequence, retain)

    @rule(rounds=st.integers(1, 12))
    def time_passes(self, rounds: int) -> None:
        """Long enough for pages to run short while pulls go on."""
        for _ in range(rounds):
            self.admit()
            if not self.batches:
                self.next_batch()
            if self.batches:
                self.complete(retain=False)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """A rank is lost within a batch: some of its KV is written, and no book has changed."""
        abandoned = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        for _, chunk in abandoned:
            end = chunk.first_position + len(chunk.token_ids)
            for position in range(chunk.first_position, end):
                if data.draw(st.booleans()):
                    self.engine.slots[chunk.pages[position // P]][position % P] = GARBAGE
        before = {one: (one.computed_tokens, list(one.token_ids)) for one in self.open}

        self.engine.scheduler.abandon(abandoned)

        assert before == {one: (one.computed_tokens, list(one.token_ids)) for one in self.open}
        if all(one in self.open for one, _ in abandoned) and not self.batches:
            self.next_batch()
            again = {one: chunk for batch in self.batches for one, chunk in batch}
            # Others before them may have come meanwhile.
            taken = sum(len(chunk.token_ids) for chunk in again.values())
            is_full = taken == self.engine.settings.max_batch_tokens
            assert {one for one, _ in abandoned} <= again.keys() or is_full or self.pulls

    @precondition(lambda self: self.open)
    @rule(data=st.data(), retain=st.booleans())
    def abort_or_stop(self, data: st.DataObject, retain: bool) -> None:
        sequence = data.draw(st.sampled_from(list(self.open)))
        if retain:
            self._finish(sequence, retain)
        else:
            self.engine.scheduler.finish(sequence)
            del self.open[sequence]

    @rule(
        prompt=st.sampled_from(sorted(PROMPTS)),
        full_pages=st.integers(0, 6),
        stream=st.sampled_from("abcdef"),
    )
    def send_to_peer(self, prompt: str, full_pages: int, stream: str) -> None:
        pages = self.engine.pages.match(page_tags(ROOT, PROMPTS[prompt], P)[:full_pages])
        tail_tokens = P
        tail = self.engine.pages.retained_page(StreamId(stream), len(pages))
        if tail is not None:
            tail_tokens = min(
                P, self.engine.pages.retained_tokens(StreamId(stream)) - len(pages) * P
            )
            self.engine.pages.pin(tail)
            pages.append(tail)
        if pages:
            self.sent.append(
                Sent(pages, [list(self.engine.slots[page]) for page in pages], tail_tokens)
            )

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def sent_to_peer(self, data: st.DataObject) -> None:
        self._sent_whole(self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1))))

    @rule(
        passes_s=st.integers(0, 6),
        renew=st.lists(st.sampled_from("abcdef")),
        release=st.lists(st.sampled_from("abcdef")),
    )
    def leases(self, passes_s: int, renew: list[str], release: list[str]) -> None:
        self.now_s += passes_s
        self.engine.pages.expire(self.now_s)
        self.engine.pages.renew([StreamId(key) for key in renew], self.now_s + 10)
        self.engine.pages.unretain([StreamId(key) for key in release])

    @rule()
    def reset_cache(self) -> None:
        self.engine.pages.reset_cache()

    @invariant()
    def books_agree(self) -> None:
        self.engine.pages.check()
        self.engine.scheduler.check()
        flying = {one for batch in self.batches for one, _ in batch}
        for one in set(self.open) - flying:
            assert len(one.pages) <= -(-len(one.token_ids) // P), "a page for drafts stays"

    @invariant()
    def no_page_is_written_that_could_be_given_away(self) -> None:
        written = [page for one in self.pulls for page in one.pages.values()]
        written += [
            page
            for batch in self.batches
            for _, chunk in batch
            for page in chunk.pages[chunk.first_position // P :]
        ]
        assert len(set(written)) == len(written), "two write into one page"
        assert all(self.engine.pages.references[page] for page in written)

    @invariant()
    def every_sequence_holds_its_own_history(self) -> None:
        for sequence in self.open:
            computed = sequence.computed_tokens
            right = kv_of(sequence.token_ids)
            assert self.engine.read(sequence.pages, computed) == right[:computed]
            for span in sequence.arrived:
                assert (
                    self.engine.read(sequence.pages, span.stop)[span.start :]
                    == right[span.start : span.stop]
                )

    @invariant()
    def what_is_found_by_a_tag_is_what_the_tag_says(self) -> None:
        for tag, page in self.engine.pages._page_by_tag.items():
            assert self.engine.slots[page] == self.content_by_tag[tag]

    @invariant()
    def what_is_retained_is_what_the_stream_computed(self) -> None:
        for stream, token_ids in self.retained.items():
            tokens = self.engine.pages.retained_tokens(stream)
            pages = [
                self.engine.pages.retained_page(stream, index) for index in range(-(-tokens // P))
            ]
            intact = [page for page in pages if page is not None]
            assert len(intact) == len(pages)
            assert self.engine.read(intact, tokens) == kv_of(token_ids)[:tokens]

    def teardown(self) -> None:
        """No sequence starves: when the outside world lets go, all finish, and every batch brings
        the first sequence on.

        Also when there is always one more recovery that wants to go first.
        """
        if not hasattr(self, "engine"):
            return
        while self.sent:
            self._sent_whole(self.sent.pop())
        while self.batches:
            self.complete(retain=False)
        self._end_pulls()
        waiting_long, rounds = set(self.open), 0
        while self.open:
            if waiting_long & self.open.keys() and self.engine.settings.max_batch_tokens >= 4:
                self._one_more_recovery()
            self.admit()
            self._end_pulls()
            first = min((one for one in self.open if one.phase is SequencePhase.RUNNING), key=order)
            before = first.uncomputed_tokens + self._remaining(first)
            self.next_batch()
            assert self.batches, "the first of those that run always proceeds"
            assert first in {one for one, _ in self.batches[-1]}, (
                "the first of those that run always proceeds"
            )
            self.complete(retain=True)
            self.books_agree()
            assert (
                first not in self.open or first.uncomputed_tokens + self._remaining(first) < before
            )
            rounds += 1
            assert rounds < 10_000, "a sequence starves"
        assert self.engine.pages.free_pages == self.engine.pages.pages, "a page is still held"
        assert (
            self.engine.scheduler.queued_tokens
            == self.engine.scheduler.waiting
            == self.engine.scheduler.running
            == 0
        )

    def _one_more_recovery(self) -> None:
        if not self.engine.scheduler.waiting_by_queue[Queue.RECOMPUTE]:
            self._add(
                Sequence(StreamId("flood"), (0, 2), FLOOD, len(FLOOD), ROOT, prefill_only=True), 0
            )

    def _end_pulls(self) -> None:
        while self.pulls:
            one = self.pulls[-1]
            # Of some nothing comes, of the others everything, run by run.
            come = one.runs if one.pull.first_page % 2 else []
            for run, following in pairwise(come):
                self._source_ended(one, run, tail=False, more_from=following.start)
            last = come[-1] if come else range(one.pull.first_page, one.pull.first_page)
            self._source_ended(
                one, last, tail=bool(come) and last.stop == one.pull.tail_index, more_from=None
            )

    def _finish(self, sequence: Sequence, retain: bool) -> None:
        del self.open[sequence]
        if retain and sequence.phase is SequencePhase.RUNNING and sequence.computed_tokens:
            self.retained[sequence.stream] = sequence.token_ids[: sequence.computed_tokens]
        self.engine.scheduler.finish(sequence, self.now_s + 5 if retain else None)

    def _remaining(self, sequence: Sequence) -> int:
        if sequence.prefill_only:
            return sequence.uncomputed_tokens
        return self.open[sequence] - (len(sequence.token_ids) - sequence.history_tokens)

    def _learn_tags(self, token_ids: abc.Sequence[int]) -> None:
        right = kv_of(token_ids)
        for index, tag in enumerate(page_tags(ROOT, token_ids, P)):
            self.content_by_tag[tag] = right[index * P : (index + 1) * P]

    def _sent_whole(self, sent: Sent) -> None:
        before = [slot for page in sent.content for slot in page][
            : (len(sent.pages) - 1) * P + sent.tail_tokens
        ]
        assert self.engine.read(sent.pages, len(before)) == before
        self.engine.pages.release(sent.pages)


@given(
    front_pages=st.integers(1, 3),
    back_pages=st.integers(1, 3),
    spare_pages=st.integers(1, 2),
    max_batch_tokens=st.integers(1, 3),
    ends_after=st.integers(0, 24),
    first=st.integers(0, 2),
    comes=st.integers(0, 3),
)
def test_pages_run_short_while_a_back_is_fetched(
    front_pages: int,
    back_pages: int,
    spare_pages: int,
    max_batch_tokens: int,
    ends_after: int,
    first: int,
    comes: int,
) -> None:
    """The invariants hold through it, whenever and however much of the back arrives; and as soon as
    it is over, a sequence that waits for a page gets it from the one behind. Rare among random
    histories, so these ones lead there.
    """
    tokens = (front_pages + back_pages) * P + 1
    world = BatchMachine()
    world.start(
        pages=1 + spare_pages + front_pages + back_pages + 1,
        max_batch_tokens=max_batch_tokens,
        max_running=3,
    )
    older = Sequence(StreamId("older"), (0, 1), [3] * (P - 1), P - 1, ROOT, prefill_only=False)
    world._add(older, new=6 * P if world.engine.scheduler.fits(P, 6 * P) else 3 * P)
    while older.uncomputed_tokens > 1:
        world.time_passes(1)
    split = Sequence(
        StreamId("split"),
        (0, 2),
        [1] * tokens,
        tokens,
        ROOT,
        False,
        (range(front_pages, tokens // P),),
    )
    world._add(split, new=2)

    for passed in range(30):
        world.time_passes(1)
        if passed >= ends_after and world.pulls:
            run = world.pulls[0].runs[0]
            start = min(run.start + first, run.stop)
            world._source_ended(
                world.pulls[0],
                range(start, min(start + comes, run.stop)),
                tail=False,
                more_from=None,
            )
        world.books_agree()
        world.no_page_is_written_that_could_be_given_away()
        world.every_sequence_holds_its_own_history()
        world.what_is_found_by_a_tag_is_what_the_tag_says()
    world.teardown()


TestBatches = BatchMachine.TestCase
TestBatches.settings = examples(150, stateful_step_count=60)
