"""The data of an engine's scheduler: sequences, pulls of their pages, and chunks of a batch.

A sequence is one attempt at a stream.
"""

import collections.abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvrs.ids import StreamId
from kvrs.protocol.pages import Cell, Tag, page_tags


class SequencePhase(StrEnum):
    WAITING = "waiting"  # The sequence owns no pages.
    # The sequence owns pages for its whole history, and waits for a pull into them.
    PULLING = "pulling"
    SPLIT = "split"  # The sequence is PULLING, and computes the tokens before the pulled pages.
    RUNNING = "running"  # The sequence owns pages and computes; no pull runs.
    FINISHED = "finished"  # Ended or aborted; pages are released when they are no longer written.


class Queue(StrEnum):
    """The class of a waiting sequence; `fair_queue.py` defines the shares."""

    REUSE = "reuse"  # A recovery that will try to fetch KV of its history.
    RECOMPUTE = "recompute"  # A recovery that computes its history.
    NEW = "new"  # A first attempt, with or without a hand-off from a prefill instance.


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt at one stream. Sequences are compared by identity: an engine may run two attempts
    at one stream at the same time.
    """

    stream: StreamId
    attempt: tuple[int, int]  # (owner_epoch, attempt)
    token_ids: collections.abc.MutableSequence[int]  # The history and the produced tokens.
    prompt_tokens: int  # Number of tokens from the client; 0: unknown.
    root: Tag  # Root tag of the model and the tenant.
    prefill_only: bool  # Compute the whole history and produce no token.
    # Indexes of full pages of the history that peers probably have; the ranges may overlap.
    pulls: tuple[range, ...] = ()
    # A peer retains exactly this history, so that its partial last page may be pulled too.
    pull_tail: bool = False

    # Base of the pages, which decides the ranks of the cells of spread heads. Set before `add`; the
    # base of cached pages replaces it.
    base: int = field(default=0, init=False)

    # Kept by the scheduler.
    phase: SequencePhase = field(default=SequencePhase.WAITING, init=False)
    arrival: int = field(default=0, init=False)  # Number of the arrival.
    # Order of the queue, lowest first; set on arrival and never changed.
    virtual_finish: int = field(default=0, init=False)
    # `pages[i]` is the i-th page of `token_ids`.
    pages: list[int] = field(default_factory=list, init=False)
    # Missing cells of damaged pages, by page index, when the pull begins.
    gone: dict[int, frozenset[Cell]] = field(default_factory=dict, init=False)
    # Tags of all full pages of `token_ids`, computed or not.
    tags: list[Tag] = field(default_factory=list, init=False)
    # Number of leading tokens whose KV is in `pages`.
    computed_tokens: int = field(default=0, init=False)
    # Later positions whose KV has arrived from a peer, and those whose KV is expected. Ascending
    # ranges that do not overlap.
    arrived: tuple[range, ...] = field(default=(), init=False)
    awaited: tuple[range, ...] = field(default=(), init=False)
    history_tokens: int = field(init=False)  # Length of `token_ids` on arrival.
    # Tokens found in the prefix cache; None before the first admission.
    cached_tokens: int | None = field(default=None, init=False)
    queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        assert self.token_ids, "a sequence has at least one token, else there is nothing to compute"
        self.history_tokens = len(self.token_ids)
        # A preemption drops the pulls and keeps the queue.
        if not self.is_recovery:
            self.queue = Queue.NEW
        else:
            self.queue = Queue.REUSE if self.pulls or self.pull_tail else Queue.RECOMPUTE

    @property
    def is_whole_prefill(self) -> bool:
        """True if the sequence is prefill-only and has computed its history."""
        return self.prefill_only and self.computed_tokens >= self.history_tokens

    @property
    def has_only_found(self) -> bool:
        """True if the sequence has computed and pulled nothing, so that pages may still be found in
        the cache.
        """
        return (
            self.computed_tokens == (self.cached_tokens or 0)
            and not self.pulls
            and not self.pull_tail
            and len(self.token_ids) == self.history_tokens
        )

    @property
    def is_recovery(self) -> bool:
        """True if an earlier attempt was made: the attempt's number is above 1, or the history has
        output tokens.

        The number alone is not enough: a proxy that took over the stream counts from 1.
        `prompt_tokens` is 0 for a text prompt that was not tokenised before.
        """
        return self.attempt[1] > 1 or 0 < self.prompt_tokens < self.history_tokens

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def computable_tokens(self) -> int:
        """Number of consecutive tokens to compute next."""
        # Arrived ranges are before awaited ones, because peers are asked in order.
        ahead = self.arrived or self.awaited
        return (ahead[0].start if ahead else len(self.token_ids)) - self.computed_tokens

    @property
    def work_tokens(self) -> int:
        """Number of tokens left to compute if all pulls succeed; at least 1 for an unfinished
        sequence.
        """
        left = len(self.token_ids) - self.computed_tokens
        if self.arrived or self.awaited:
            left -= sum(map(len, self.arrived)) + sum(map(len, self.awaited))
        return left

    def again(self, pulls: Iterable[range]) -> "Sequence":
        """Return a new sequence of the same attempt, after its computed KV was lost."""
        new = Sequence(
            stream=self.stream,
            attempt=self.attempt,
            token_ids=self.token_ids,
            prompt_tokens=self.prompt_tokens,
            root=self.root,
            prefill_only=self.prefill_only,
            pulls=tuple(pulls),
        )
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
    """Pages of an admitted sequence to fetch from peers. The engine fetches them in order and calls
    `BatchScheduler.pulled`.
    """

    sequence: Sequence
    # Indexes of full pages in the sequence's `pages` and `tags`; ascending, not overlapping.
    spans: tuple[range, ...]
    tail_index: int | None  # Index of the partial last page, if wanted.
    tail_tokens: int  # Number of wanted tokens of the partial page.

    @property
    def first_page(self) -> int:
        """Index of the first wanted page."""
        return self.spans[0].start if self.spans else self.end_page

    @property
    def end_page(self) -> int:
        """End of the wanted full pages."""
        if self.spans:
            return self.spans[-1].stop
        assert self.tail_index is not None, "a pull of nothing"
        return self.tail_index


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive new tokens of one sequence: a decode step of one token, perhaps with drafts after
    it, or a piece of prefill.

    `pages[i]` has positions `[i * page_size, (i + 1) * page_size)` of the sequence; `pages` covers
    every position up to the chunk's last. KV of positions before `first_position` is already there.
    """

    token_ids: collections.abc.Sequence[int]
    first_position: int
    pages: collections.abc.Sequence[int]
    logits: int  # Number of last tokens whose logits are wanted.
    base: int = 0  # Base of the sequence.
    drafts: int = 0  # Number of last tokens that are drafts, verified by the logits before them.


def pages_for(tokens: int, page_size: int) -> int:
    """Return the number of pages that hold `tokens`."""
    return -(-tokens // page_size)


def coverable_pages(sequence: Sequence, page_size: int) -> int:
    """Return the number of full pages that may come from the cache or from peers: the last position
    is always computed, for its logits.
    """
    return (len(sequence.token_ids) - 1) // page_size


def expected_ranges(sequence: Sequence, first_page: int, page_size: int) -> tuple[range, ...]:
    """Return the ranges of positions, from `first_page` on, whose KV peers probably have."""
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
    """Return the pull of all positions that an admitted sequence awaits."""
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
    """Return the chunk of the sequence's next `tokens` tokens, followed by `drafts`."""
    # Copies: the executor reads the chunk while the scheduler may change the sequence.
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
    """Return the union of the ranges, limited to `[first, end)`."""
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
    """Return the parts of the ranges from `first` on."""
    return tuple(range(max(one.start, first), one.stop) for one in ranges if one.stop > first)
