"""Mirrors and bursts: two instances that never wait for each other, with messages under way."""

from collections import deque
from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvrs.protocol.instance import MOST_DRAFTS
from kvrs_engine.scheduling.alignment import Bursts, DraftMirror

DEPTH = 4


class Pair:
    """An instance whose stream is given, a helper that guesses, and messages between both."""

    def __init__(self, stream: list[int], prompt_tokens: int, guess: Callable[[int], int]) -> None:
        self.stream, self.end, self.told = stream, prompt_tokens, prompt_tokens
        self.guess = guess
        self.mirror, self.bursts = DraftMirror(stream[:prompt_tokens]), Bursts()
        self.kv: dict[int, int] = {}  # The token whose KV stands at a position.
        self.to_helper: deque[list[int]] = deque()
        self.from_helper: deque[tuple[int, list[int], bool]] = deque()
        self.accepted: list[int] = []

    def verify(self) -> None:
        if self.told < self.end:
            self.to_helper.append(self.stream[self.told : self.end])
            self.told = self.end
        drafts = self.bursts.proposal(self.stream[: self.end], DEPTH)
        assert len(drafts) <= DEPTH
        right = 0
        while right < len(drafts) and drafts[right] == self.stream[self.end + right]:
            right += 1
        if drafts:
            self.accepted.append(right)
        self.end += right + 1

    def draft(self, most: int) -> None:
        mirror = self.mirror
        if len(mirror.drafted) >= DEPTH:
            return
        first, ids = mirror.uncomputed(most)
        assert 0 < len(ids) <= most
        self.kv.update(enumerate(ids, first))
        wants = first + len(ids) == mirror.tokens
        mirror.advanced(first, len(ids), self.guess(mirror.tokens) if wants else None)
        if wants:
            self.from_helper.append(mirror.burst())
        tokens = [*mirror.chosen, *mirror.drafted]
        assert [self.kv[at] for at in range(mirror.computed)] == tokens[: mirror.computed]

    def hear(self) -> None:
        if self.to_helper:
            self.mirror.progress(self.to_helper.popleft())
            assert self.mirror.computed <= self.mirror.tokens
            assert self.mirror.chosen == self.stream[: len(self.mirror.chosen)]

    def come(self) -> None:
        if self.from_helper:
            self.bursts.came(*self.from_helper.popleft())


@given(
    st.lists(st.integers(0, 2), min_size=100, max_size=100),
    st.integers(1, 20),
    st.lists(st.sampled_from(["verify", "draft", "hear", "come"]), max_size=120),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_kv_is_that_of_the_tokens_whatever_the_order(
    stream: list[int], prompt_tokens: int, moves: list[str], most: int, random: Random
) -> None:
    pair = Pair(stream, prompt_tokens, lambda position: random.randrange(3))
    for move in moves:
        if move == "verify" and pair.end > len(stream) - 2 * DEPTH:
            break
        if move == "draft":
            pair.draft(most)
        else:
            getattr(pair, move)()


def test_a_helper_that_is_right_has_all_of_it_accepted() -> None:
    """Even while drafts and tokens cross on their way."""
    stream = [at * at % 97 for at in range(400)]
    pair = Pair(stream, 10, lambda position: stream[position])
    while pair.end < 300:
        pair.draft(64)
        pair.draft(64)
        pair.come()
        pair.come()
        pair.verify()
        pair.hear()
    assert sum(pair.accepted) > 100
    assert pair.bursts.stale == 0


def test_drafts_behind_a_wrong_one_do_not_hide_the_next_ones() -> None:
    """They begin where the wrong ones ended."""
    mirror, bursts = DraftMirror([1, 2]), Bursts()
    for first, count, draft in ((0, 2, 5), (2, 1, 6)):
        mirror.advanced(first, count, draft)
        bursts.came(*mirror.burst())
    assert bursts.proposal([1, 2], 4) == [5, 6]
    mirror.progress([5, 7])
    assert mirror.uncomputed(9) == (3, [7])
    mirror.advanced(3, 1, 8)
    bursts.came(*mirror.burst())
    assert bursts.proposal([1, 2, 5, 7], 4) == [8]


def test_a_burst_that_begins_before_the_end_is_used_from_there() -> None:
    bursts = Bursts()
    bursts.came(3, [7, 8, 9])
    assert bursts.proposal([1, 2], 4) == []
    assert bursts.proposal([1, 2, 3, 7], 4) == [8, 9]
    bursts.came(6, [10])
    assert bursts.proposal([1, 2, 3, 7, 8], 1) == [9]
    assert bursts.proposal([1, 2, 3, 7, 8], 4) == [9, 10]
    assert bursts.proposal([1, 2, 3, 7, 8, 5], 4) == []
    assert bursts.stale == 0, "both were proposed, and refused"


def test_drafts_that_were_proposed_are_not_stale() -> None:
    """Those that are refused are counted by the step; the others are behind a wrong one."""
    bursts = Bursts()
    bursts.came(2, [5, 6, 7, 8, 9])
    assert bursts.proposal([1, 2], 3) == [5, 6, 7]
    assert bursts.proposal([1, 2, 5, 4], 3) == []
    assert bursts.stale == 2, "the last two"

    bursts.came(4, [1, 2, 3])
    assert bursts.proposal([1, 2, 5, 4], 2) == [1, 2]
    bursts.came(4, [0, 0], begins_anew=True)
    assert bursts.stale == 3, "the third"

    assert bursts.proposal([1, 2, 5, 4], 2) == [0, 0]
    bursts.came(4, [9, 9, 9])
    assert bursts.proposal([1, 2, 5, 4, 9, 8], 2) == []
    assert bursts.stale == 5, "the first is right, and came late"


def test_drafts_that_are_overtaken_are_stale() -> None:
    bursts = Bursts()
    bursts.came(1, [5, 6])
    bursts.came(9, [5])
    assert bursts.stale == 2
    assert bursts.proposal([1] * 12, 4) == []


def test_drafts_that_are_kept_are_bounded() -> None:
    """A peer may send burst after burst for a stream that does not go on."""
    bursts = Bursts()
    for burst in range(1000):
        bursts.came(1 + burst * MOST_DRAFTS, [9] * MOST_DRAFTS)
    ahead = [
        len(bursts.proposal([9] * tokens, 10**6))
        for tokens in range(1, 1000 * MOST_DRAFTS, MOST_DRAFTS)
    ]
    assert MOST_DRAFTS <= max(ahead) <= 3 * MOST_DRAFTS
