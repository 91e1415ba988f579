"""The batch scheduler over random histories, with an engine whose KV can be read.

What a real engine writes for a position depends on all tokens up to it. The engine here writes a hash of just that,
made from the token and from what *the pages* hold for the position before. So if a page is ever handed out too
early, shared wrongly or believed to be computed when it is not, some sequence reads a wrong past, and it shows.
"""

from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrs.ids import StreamId
from kvrs.protocol.tags import Tag, page_tags, root_tag
from kvrs.scheduling.batches import BatchScheduler
from kvrs.scheduling.chunks import Chunk
from kvrs.scheduling.config import BatchSettings
from kvrs.scheduling.line import order
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.sequences import Phase, Pull, Queue, Sequence

P = 4
ROOT = root_tag("model")
EMPTY, GARBAGE = b"empty", b"garbage"
FLOOD = [9] * 13
PROMPTS = {"one": [1] * 40, "like one": [1] * 9 + [2] * 31, "other": [3] * 40}


def kv(past: bytes, token: int) -> bytes:
    return blake2b(past + bytes([token]), digest_size=8).digest()


def kv_of(token_ids: list[int]) -> list[bytes]:
    """What the KV of these tokens must be, position by position."""
    values: list[bytes] = []
    for token in token_ids:
        values.append(kv(values[-1] if values else EMPTY, token))
    return values


def next_token(last_kv: bytes) -> int:
    return 4 + last_kv[0] % 2


def continuation(prompt: list[int], tokens: int) -> list[int]:
    """What an engine that is never disturbed produces."""
    token_ids = list(prompt)
    for _ in range(tokens):
        token_ids.append(next_token(kv_of(token_ids)[-1]))
    return token_ids


class Sent(NamedTuple):
    """Pages that a peer is being sent: they must not change until it has them."""

    pages: list[int]
    content: list[list[bytes]]
    tail_tokens: int  # Of the last of them; P if it is full.


class Engine:
    """Pages one can read, and an executor that writes as late as it may."""

    def __init__(self, pages: int, max_batch_tokens: int, max_running: int) -> None:
        self.pages = PageManager(pages, P)
        batch_settings = BatchSettings(
            page_size_tokens=P, pages=pages, max_batch_tokens=max_batch_tokens, max_running=max_running
        )
        self.settings = batch_settings
        self.scheduler = BatchScheduler(batch_settings, self.pages)
        self.slots = [[GARBAGE] * P for _ in range(pages)]

    def execute(self, chunk: Chunk) -> int:
        """Write the chunk's KV, reading its past from the pages; returns the next token."""
        past = EMPTY
        end = chunk.first_position + len(chunk.token_ids)
        assert len(chunk.pages) == -(-end // P)
        for position in range(end):
            page, slot = chunk.pages[position // P], position % P
            if position >= chunk.first_position:
                self.slots[page][slot] = kv(past, chunk.token_ids[position - chunk.first_position])
            past = self.slots[page][slot]
        return next_token(past)

    def receive(self, pull: Pull, full_pages: int, tail: bool) -> None:
        """Write what the peer sent; what did not arrive whole is rubbish."""
        right = kv_of(pull.sequence.token_ids)
        targets = [*pull.pages] + ([] if pull.tail_page is None else [pull.tail_page])
        for offset, page in enumerate(targets):
            start = (pull.first_page + offset) * P
            arrived = offset < full_pages or (tail and page == pull.tail_page)
            tokens = P if offset < len(pull.pages) else pull.tail_tokens
            self.slots[page][:tokens] = right[start : start + tokens] if arrived else [GARBAGE] * tokens

    def read(self, pages: list[int], tokens: int) -> list[bytes]:
        return [slot for page in pages for slot in self.slots[page]][:tokens]


class BatchMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(4, 16), max_batch_tokens=st.integers(1, 12), max_running=st.integers(1, 5))
    def start(self, pages: int, max_batch_tokens: int, max_running: int) -> None:
        self.engine = Engine(pages, max_batch_tokens, max_running)
        self.open: dict[Sequence, int] = {}  # With the number of tokens that each shall produce.
        self.pulls: list[Pull] = []
        self.batch: list[tuple[Sequence, Chunk]] = []
        self.sent: list[Sent] = []
        self.retained: dict[StreamId, list[int]] = {}
        self.content_by_tag: dict[Tag, list[bytes]] = {}
        self.now_s = 0.0

    @rule(
        prompt=st.sampled_from(sorted(PROMPTS)),
        length=st.integers(1, 40),
        produced_before=st.integers(0, 5),
        new=st.integers(0, 12),
        pull_pages=st.integers(0, 6),
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
        pull_pages: int,
        pull_tail: bool,
        stream: str,
        attempt: int,
    ) -> None:
        history = continuation(PROMPTS[prompt][:length], produced_before)
        if self.engine.scheduler.fits(len(history), new):
            prefill_only = new == 0
            self._add(Sequence(StreamId(stream), (0, attempt), history, length, ROOT, prefill_only, pull_pages, pull_tail), new)

    def _add(self, sequence: Sequence, new: int) -> None:
        self.engine.scheduler.add(sequence)
        # Whatever its queue: not before one of its own queue, and not before one whose history is computed.
        for one in self.open:
            served = one.computed_tokens >= one.history_tokens
            assert order(one) < order(sequence) or not (served or one.queue is sequence.queue)
        self.open[sequence] = new
        self._learn_tags(sequence.token_ids)

    @rule()
    def admit(self) -> None:
        self.pulls += self.engine.scheduler.admit()

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def pull_ends(self, data: st.DataObject) -> None:
        pull = self.pulls.pop(data.draw(st.integers(0, len(self.pulls) - 1)))
        full_pages = data.draw(st.integers(0, len(pull.tags)))
        tail = pull.tail_page is not None and full_pages == len(pull.tags) and data.draw(st.booleans())
        self.engine.receive(pull, full_pages, tail)

        self.engine.scheduler.pulled(pull.sequence, full_pages, tail)

    @precondition(lambda self: not self.batch)
    @rule()
    def next_batch(self) -> None:
        admitted = list(self.engine.scheduler._admitted)
        running = [one for one in admitted if one.phase is Phase.RUNNING]

        self.batch = self.engine.scheduler.next_batch()

        # Only the last in line are preempted, and never the first.
        preempted = [one for one in admitted if one.phase is Phase.WAITING]
        still = [one for one in running if one.phase is Phase.RUNNING]
        assert not preempted or (still and max(map(order, still)) < min(map(order, preempted)))
        assert sum(len(chunk.token_ids) for _, chunk in self.batch) <= self.engine.settings.max_batch_tokens
        kinds = [one.uncomputed_tokens == 1 for one, _ in self.batch]
        assert kinds == sorted(kinds, reverse=True), "decode steps come first"
        assert all(
            order(earlier) < order(later)
            for (earlier, _), (later, _) in pairwise(self.batch)
            if (earlier.uncomputed_tokens == 1) == (later.uncomputed_tokens == 1)
        )
        for one, chunk in self.batch:
            assert list(chunk.token_ids) == one.token_ids[chunk.first_position :][: len(chunk.token_ids)]

    @precondition(lambda self: self.batch)
    @rule(retain=st.booleans())
    def complete(self, retain: bool) -> None:
        # As late as possible: whatever was aborted, admitted or evicted meanwhile, these writes still come.
        sampled = {sequence: self.engine.execute(chunk) for sequence, chunk in self.batch}
        wanted = {one: token for (one, token) in sampled.items() if one in self.open and not one.prefill_only}

        prefilled = self.engine.scheduler.complete(self.batch, wanted)

        done = {one for one, _ in self.batch if one in self.open and not self._remaining(one)}
        assert {one for one in done if one.prefill_only} == set(prefilled)
        self.batch = []
        for sequence in done:
            assert sequence.token_ids == continuation(sequence.token_ids[: sequence.history_tokens], self.open[sequence])
            self._finish(sequence, retain)
        for one in self.open:
            self._learn_tags(one.token_ids)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), retain=st.booleans())
    def abort_or_stop(self, data: st.DataObject, retain: bool) -> None:
        sequence = data.draw(st.sampled_from(list(self.open)))
        if retain:
            self._finish(sequence, retain)
        else:
            self.engine.scheduler.abort(sequence)
            del self.open[sequence]

    @rule(prompt=st.sampled_from(sorted(PROMPTS)), full_pages=st.integers(0, 6), stream=st.sampled_from("abcdef"))
    def send_to_peer(self, prompt: str, full_pages: int, stream: str) -> None:
        pages = self.engine.pages.match(page_tags(ROOT, PROMPTS[prompt], P)[:full_pages])
        tail_tokens = P
        tail = self.engine.pages.retained_page(StreamId(stream), len(pages))
        if tail is not None:
            tail_tokens = min(P, self.engine.pages.retained_tokens(StreamId(stream)) - len(pages) * P)
            self.engine.pages.pin(tail)
            pages.append(tail)
        if pages:
            self.sent.append(Sent(pages, [list(self.engine.slots[page]) for page in pages], tail_tokens))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def sent_to_peer(self, data: st.DataObject) -> None:
        self._sent_whole(self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1))))

    @rule(passes_s=st.integers(0, 6), renew=st.lists(st.sampled_from("abcdef")), release=st.lists(st.sampled_from("abcdef")))
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

    @invariant()
    def nobody_writes_into_a_page_that_could_be_given_away(self) -> None:
        written = [page for pull in self.pulls for page in (*pull.pages, *([] if pull.tail_page is None else [pull.tail_page]))]
        written += [page for _, chunk in self.batch for page in chunk.pages[chunk.first_position // P :]]
        assert len(set(written)) == len(written), "two write into one page"
        assert all(self.engine.pages.references(page) for page in written)

    @invariant()
    def every_sequence_holds_its_own_history(self) -> None:
        for sequence in self.open:
            computed = sequence.computed_tokens
            assert self.engine.read(sequence.pages, computed) == kv_of(sequence.token_ids)[:computed]

    @invariant()
    def what_is_found_by_a_tag_is_what_the_tag_says(self) -> None:
        for tag, page in self.engine.pages._page_by_tag.items():
            assert self.engine.slots[page] == self.content_by_tag[tag]

    @invariant()
    def what_is_retained_is_what_the_stream_computed(self) -> None:
        for stream, token_ids in self.retained.items():
            tokens = self.engine.pages.retained_tokens(stream)
            pages = [self.engine.pages.retained_page(stream, index) for index in range(-(-tokens // P))]
            intact = [page for page in pages if page is not None]
            assert len(intact) == len(pages)
            assert self.engine.read(intact, tokens) == kv_of(token_ids)[:tokens]

    def teardown(self) -> None:
        """Nobody starves: when the outside world lets go, everyone finishes, and every batch brings the first in line on.

        Also when there is always one more recovery that wants to go first.
        """
        if not hasattr(self, "engine"):
            return
        while self.sent:
            self._sent_whole(self.sent.pop())
        if self.batch:
            self.complete(retain=False)
        self._end_pulls()
        waiting_long, rounds = set(self.open), 0
        while self.open:
            if waiting_long & self.open.keys() and self.engine.settings.max_batch_tokens >= 4:
                self._one_more_recovery()
            self.admit()
            self._end_pulls()
            first = min((one for one in self.open if one.phase is Phase.RUNNING), key=order)
            before = first.uncomputed_tokens + self._remaining(first)
            self.next_batch()
            assert first in {one for one, _ in self.batch}, "the first of those that run always proceeds"
            self.complete(retain=True)
            self.books_agree()
            assert first not in self.open or first.uncomputed_tokens + self._remaining(first) < before
            rounds += 1
            assert rounds < 10_000, "somebody starves"
        assert self.engine.pages.free_pages == self.engine.pages.pages, "somebody still holds a page"
        assert self.engine.scheduler.queued_tokens == self.engine.scheduler.waiting == self.engine.scheduler.running == 0

    def _one_more_recovery(self) -> None:
        if not self.engine.scheduler.waiting_by_queue[Queue.RECOMPUTE]:
            self._add(Sequence(StreamId("flood"), (0, 2), FLOOD, len(FLOOD), ROOT, prefill_only=True), 0)

    def _end_pulls(self) -> None:
        while self.pulls:
            pull = self.pulls.pop()
            self.engine.receive(pull, 0, tail=False)
            self.engine.scheduler.pulled(pull.sequence, 0, tail=False)

    def _finish(self, sequence: Sequence, retain: bool) -> None:
        del self.open[sequence]
        if retain and sequence.phase is Phase.RUNNING and sequence.computed_tokens:
            self.retained[sequence.stream] = sequence.token_ids[: sequence.computed_tokens]
        self.engine.scheduler.finish(sequence, self.now_s + 5 if retain else None)

    def _remaining(self, sequence: Sequence) -> int:
        if sequence.prefill_only:
            return sequence.uncomputed_tokens
        return self.open[sequence] - (len(sequence.token_ids) - sequence.history_tokens)

    def _learn_tags(self, token_ids: list[int]) -> None:
        right = kv_of(token_ids)
        for index, tag in enumerate(page_tags(ROOT, token_ids, P)):
            self.content_by_tag[tag] = right[index * P : (index + 1) * P]

    def _sent_whole(self, sent: Sent) -> None:
        before = [slot for page in sent.content for slot in page][: (len(sent.pages) - 1) * P + sent.tail_tokens]
        assert self.engine.read(sent.pages, len(before)) == before
        self.engine.pages.release(sent.pages)


TestBatches = BatchMachine.TestCase
TestBatches.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
