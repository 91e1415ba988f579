"""The work of the scheduler of one engine: sequences, pulls of their pages, chunks of a batch.

A sequence is one attempt at a stream, as its engine's scheduler sees it.
"""

import collections.abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvrs.ids import StreamId
from kvrs.protocol.parts import Cell
from kvrs.protocol.tags import Tag, page_tags


class SequencePhase(StrEnum):
    WAITING = "waiting"  # Owns no pages.
    # Owns pages for its whole history; waits for those that a pull is writing.
    PULLING = "pulling"
    SPLIT = "split"  # The same, and computes what lies before them.
    RUNNING = "running"  # Owns pages; computes. No pull writes into them.
    FINISHED = "finished"  # Ended or aborted; owns pages until they are not written any more.


class Queue(StrEnum):
    """The class of a waiting sequence; `fair_queue.py` defines the shares."""

    REUSE = "reuse"  # A recovery that will try to fetch KV of its history.
    RECOMPUTE = "recompute"  # A recovery that computes its history.
    NEW = "new"  # A first attempt, with or without a hand-off from a prefill instance.


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt at one stream. Equal only to itself: an engine may have two attempts at one
    stream at the same time.
    """

    stream: StreamId
    attempt: tuple[int, int]  # (owner_epoch, attempt)
    # The history, then what this attempt produced.
    token_ids: collections.abc.MutableSequence[int]
    prompt_tokens: int  # How many of them the client wrote; 0: unknown, taken for all.
    root: Tag  # Of the model and the tenant.
    prefill_only: bool  # Compute the whole history, produce nothing.
    # Full pages of the history, by index, that peers probably hold; the ranges may overlap.
    pulls: tuple[range, ...] = ()
    # A peer retains exactly this history, so its partial last page may be pulled behind the others.
    pull_tail: bool = False

    # The base of its pages: it decides which ranks have the cells of spread heads. Given before it
    # is added; what the prefix cache has of it decides.
    base: int = field(default=0, init=False)

    # Kept by the scheduler.
    phase: SequencePhase = field(default=SequencePhase.WAITING, init=False)
    arrival: int = field(default=0, init=False)  # Number of the arrival.
    # The sequence with the lower value goes first. Set on arrival, never changed.
    virtual_finish: int = field(default=0, init=False)
    # `pages[i]` holds the i-th page of `token_ids`.
    pages: list[int] = field(default_factory=list, init=False)
    # Cells that pages from before a loss lack, by index, as its pull begins.
    gone: dict[int, frozenset[Cell]] = field(default_factory=dict, init=False)
    # Tags of all full pages of `token_ids`, computed or not.
    tags: list[Tag] = field(default_factory=list, init=False)
    # The KV of that many leading tokens is in `pages`.
    computed_tokens: int = field(default=0, init=False)
    # Positions behind those, which are not to be computed: their KV has come from a peer, or is
    # expected to. Ascending ranges that do not overlap.
    arrived: tuple[range, ...] = field(default=(), init=False)
    awaited: tuple[range, ...] = field(default=(), init=False)
    history_tokens: int = field(init=False)  # Length of `token_ids` on arrival.
    # Found in the prefix cache before it computed anything; None before its first admission.
    cached_tokens: int | None = field(default=None, init=False)
    queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        assert self.token_ids, "a sequence has at least one token, else there is nothing to compute"
        self.history_tokens = len(self.token_ids)
        # Preemption drops the pulls, but the sequence stays in its queue.
        if not self.is_recovery:
            self.queue = Queue.NEW
        else:
            self.queue = Queue.REUSE if self.pulls or self.pull_tail else Queue.RECOMPUTE

    @property
    def is_whole_prefill(self) -> bool:
        """It was to compute the history alone, and has done so."""
        return self.prefill_only and self.computed_tokens >= self.history_tokens

    @property
    def has_only_found(self) -> bool:
        """It has computed nothing, peers bring nothing of it, and pages may still be found."""
        return (
            self.computed_tokens == (self.cached_tokens or 0)
            and not self.pulls
            and not self.pull_tail
            and len(self.token_ids) == self.history_tokens
        )

    @property
    def is_recovery(self) -> bool:
        """Another attempt was made before this one: its number is above 1, or the history has
        output tokens.

        A proxy that took the stream over from another one counts its own attempts from 1, so the
        number alone is not enough. Where the prompt is a text that was not tokenised before,
        `prompt_tokens` is 0.
        """
        return self.attempt[1] > 1 or 0 < self.prompt_tokens < self.history_tokens

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def computable_tokens(self) -> int:
        """How many consecutive tokens are to be computed next."""
        # What has arrived is before what is awaited: peers are asked in order.
        ahead = self.arrived or self.awaited
        return (ahead[0].start if ahead else len(self.token_ids)) - self.computed_tokens

    @property
    def work_tokens(self) -> int:
        """How many tokens are left to compute here, if all pulls succeed. At least one while the
        sequence is not finished.
        """
        left = len(self.token_ids) - self.computed_tokens
        if self.arrived or self.awaited:
            left -= sum(map(len, self.arrived)) + sum(map(len, self.awaited))
        return left

    def again(self, pulls: Iterable[range]) -> "Sequence":
        """The same attempt from its beginning: what was computed of it is gone."""
        new = Sequence(
            stream=self.stream,
            attempt=self.attempt,
            token_ids=self.token_ids,
            prompt_tokens=self.prompt_tokens,
            root=self.root,
            prefill_only=self.prefill_only,
            pulls=tuple(pulls),
        )
        # What was sent does not change by it.
        new.history_tokens, new.base = self.history_tokens, self.base
        return new

    def extend_tags(self, page_size_tokens: int) -> None:
        """Tag the pages that `token_ids` has filled since the last call."""
        tagged = len(self.tags) * page_size_tokens
        if len(self.token_ids) >= tagged + page_size_tokens:
            parent = self.tags[-1] if self.tags else self.root
            self.tags += page_tags(parent, self.token_ids[tagged:], page_size_tokens)


@dataclass(frozen=True, slots=True)
class Pull:
    """Pages of an admitted sequence to be fetched from peers. The engine fetches them, in order,
    from the sources that it knows, and calls `BatchScheduler.pulled`.
    """

    sequence: Sequence
    # Full pages, by index into the sequence's `pages` and `tags`: ascending, not overlapping.
    spans: tuple[range, ...]
    tail_index: int | None  # Of the partial page, behind all full ones.
    tail_tokens: int  # How many tokens of the partial page are wanted.

    @property
    def first_page(self) -> int:
        """The first wanted page; those before it were found here, or are computed."""
        return self.spans[0].start if self.spans else self.end_page

    @property
    def end_page(self) -> int:
        """Behind the last wanted full page."""
        if self.spans:
            return self.spans[-1].stop
        assert self.tail_index is not None, "a pull of nothing"
        return self.tail_index


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive new tokens of one sequence: one token is a decode step, which drafts may follow;
    more are a piece of prefill.

    `pages[i]` is the page that holds positions `[i * page_size, (i + 1) * page_size)` of the
    sequence; it covers every position up to the chunk's last. KV of positions before
    `first_position` is already in them.
    """

    token_ids: collections.abc.Sequence[int]
    first_position: int
    pages: collections.abc.Sequence[int]
    logits: int  # The logits of so many last tokens are wanted.
    base: int = 0  # Of the sequence.
    drafts: int = 0  # So many last tokens are proposals, to be verified by the logits before them.


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold that many tokens."""
    return -(-tokens // page_size)


def coverable_pages(sequence: Sequence, page_size: int) -> int:
    """How many full pages may come from cache or peers: the last position is always computed here,
    for its logits.
    """
    return (len(sequence.token_ids) - 1) // page_size


def expected_ranges(sequence: Sequence, first_page: int, page_size: int) -> tuple[range, ...]:
    """Ranges of positions, from that page on, whose KV peers probably hold."""
    coverable = coverable_pages(sequence, page_size)
    spans = union(sequence.pulls, first_page, coverable)
    expected = [range(span.start * page_size, span.stop * page_size) for span in spans]
    end_page = spans[-1].stop if spans else first_page
    tail_tokens = (len(sequence.token_ids) - 1) % page_size
    if sequence.pull_tail and end_page == coverable and tail_tokens:
        start = expected.pop().start if expected else end_page * page_size
        expected.append(range(start, end_page * page_size + tail_tokens))
    return tuple(expected)


def pull_of(sequence: Sequence, page_size: int) -> Pull:
    """The pull of all that an admitted sequence awaits."""
    tail_index, tail_tokens = divmod(sequence.awaited[-1].stop, page_size)
    spans = tuple(range(one.start // page_size, one.stop // page_size) for one in sequence.awaited)
    return Pull(
        sequence, tuple(filter(None, spans)), tail_index if tail_tokens else None, tail_tokens
    )


def next_chunk(
    sequence: Sequence,
    tokens: int,
    page_size: int,
    drafts: collections.abc.Sequence[int] = (),
) -> Chunk:
    """The next `tokens` tokens of a sequence to compute, with `drafts` behind the last of all."""
    # Copies, because the executor reads them while the scheduler may change the sequence.
    first, proposed = sequence.computed_tokens, len(drafts)
    end = first + tokens
    has_logits = end == len(sequence.token_ids) and not sequence.prefill_only
    assert has_logits or not drafts, "drafts follow the last token"
    token_ids = sequence.token_ids[first:end]
    token_ids.extend(drafts)
    return Chunk(
        token_ids,
        first,
        sequence.pages[: -(-(end + proposed) // page_size)],
        1 + proposed if has_logits else 0,
        sequence.base,
        proposed,
    )


def union(ranges: Iterable[range], first: int, end: int) -> tuple[range, ...]:
    """The parts of `[first, end)` that at least one of the ranges covers."""
    joined: list[range] = []
    for span in sorted(ranges, key=lambda one: one.start):
        start, stop = max(span.start, first), min(span.stop, end)
        if start >= stop:
            continue
        if joined and start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, stop))
        else:
            joined.append(range(start, stop))
    return tuple(joined)


def at_least(ranges: Iterable[range], first: int) -> tuple[range, ...]:
    """The parts of the ranges that do not lie before `first`."""
    return tuple(range(max(one.start, first), one.stop) for one in ranges if one.stop > first)
