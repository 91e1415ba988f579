"""One attempt at a stream, as the scheduler of one engine sees it."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvrs.ids import StreamId
from kvrs.protocol.tags import Tag, next_tag


class Phase(StrEnum):
    WAITING = "waiting"  # Owns no pages.
    PULLING = "pulling"  # Owns pages for its whole history; waits for those into which a peer's are being written.
    SPLIT = "split"  # The same, and computes what lies before them.
    RUNNING = "running"  # Owns pages; computes. Nobody else writes into them.
    FINISHED = "finished"  # Ended or aborted; may own pages until nobody writes into them any more.


class Queue(StrEnum):
    """Which of the three queues a sequence stands in; `line.py` says what that means."""

    REUSE = "reuse"  # A recovery that hopes to fetch KV of its history.
    RECOMPUTE = "recompute"  # A recovery that computes its history.
    NEW = "new"  # A first attempt, whether or not a prefill instance hands its KV over.


@dataclass(slots=True, eq=False)
class Sequence:
    """Equal only to itself: two attempts at one stream may be known to an engine at the same time."""

    stream: StreamId
    attempt: tuple[int, int]  # (owner_epoch, attempt)
    token_ids: list[int]  # The history, then what this attempt produced.
    prompt_tokens: int  # How many of them the client wrote; 0: all, as far as is known.
    root: Tag  # Of the model and the tenant.
    prefill_only: bool  # Compute the whole history, produce nothing.
    pulls: tuple[range, ...] = ()  # Full pages of the history, by index, that peers are believed to hold; they may overlap.
    pull_tail: bool = False  # A peer retains exactly this history, so its partial last page may be pulled behind the others.

    # Kept by the scheduler.
    phase: Phase = field(default=Phase.WAITING, init=False)
    arrival: int = field(default=0, init=False)  # Order of arrival: of two sequences the lower came first.
    place: int = field(default=0, init=False)  # In line: of two sequences the lower goes first. It never changes.
    pages: list[int] = field(default_factory=list, init=False)  # `pages[i]` holds the i-th page of `token_ids`.
    tags: list[Tag] = field(default_factory=list, init=False)  # Of all full pages of `token_ids`, computed or not.
    computed_tokens: int = field(default=0, init=False)  # The KV of that many leading tokens is in `pages`.
    # Positions behind those, which are not to be computed: their KV has come from a peer, or is hoped to. In order, and apart.
    arrived: tuple[range, ...] = field(default=(), init=False)
    awaited: tuple[range, ...] = field(default=(), init=False)
    history_tokens: int = field(init=False)  # Length of `token_ids` on arrival.
    queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        assert self.token_ids, "a sequence has at least one token, else there is nothing to compute"
        self.history_tokens = len(self.token_ids)
        # Preemption ends the hope for a pull; in line a sequence remains what it came as.
        if not self.is_recovery:
            self.queue = Queue.NEW
        else:
            self.queue = Queue.REUSE if self.pulls or self.pull_tail else Queue.RECOMPUTE

    @property
    def is_recovery(self) -> bool:
        """Whether another attempt was made before this one: it has a number above 1, or left tokens behind.

        A proxy that took the stream over from another one counts its own attempts from 1, so the number alone does not tell.
        Where the prompt is a text that nobody has tokenised yet, `prompt_tokens` is 0.
        """
        return self.attempt[1] > 1 or 0 < self.prompt_tokens < self.history_tokens

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def computable_tokens(self) -> int:
        """How many come next that are to be computed."""
        ahead = self.arrived or self.awaited  # What has arrived is before what is awaited: peers are asked in order.
        return (ahead[0].start if ahead else len(self.token_ids)) - self.computed_tokens

    @property
    def work_tokens(self) -> int:
        """How many are left to compute here, if all arrives that is hoped for. At least one while it is not finished."""
        return self.uncomputed_tokens - sum(map(len, self.arrived)) - sum(map(len, self.awaited))

    def extend_tags(self, page_size_tokens: int) -> None:
        """Tag the pages that `token_ids` has filled since the last call."""
        for start in range(len(self.tags) * page_size_tokens, len(self.token_ids) - page_size_tokens + 1, page_size_tokens):
            parent = self.tags[-1] if self.tags else self.root
            self.tags.append(next_tag(parent, self.token_ids[start : start + page_size_tokens]))


@dataclass(frozen=True, slots=True)
class Pull:
    """What an admitted sequence hopes to get from peers; the engine fetches it, in order, and tells `BatchScheduler.pulled`.

    Whoever holds what of it: that is between the engine and its sources.
    """

    sequence: Sequence
    spans: tuple[range, ...]  # Full pages, by index into the sequence's `pages` and `tags`: ascending and apart.
    tail_index: int | None  # Of the partial page, behind all full ones.
    tail_tokens: int  # How many tokens of the partial page are wanted.

    @property
    def first_page(self) -> int:
        """The first page that is wanted; those before it were found here, or are computed."""
        return self.spans[0].start if self.spans else self.end_page

    @property
    def end_page(self) -> int:
        """Behind the last full page that is wanted."""
        if self.spans:
            return self.spans[-1].stop
        assert self.tail_index is not None, "a pull of nothing"
        return self.tail_index
