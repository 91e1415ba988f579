"""Batches of a draft model: whose KV stands in which page, and what stands beside wrong drafts."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.engine import EngineSettings
from kvrs.protocol.speculation import Burst, DraftChoice, MirrorUpdate
from kvrs_engine.scheduling.alignment import Bursts
from kvrs_engine.scheduling.draft_batches import DraftBatches

CHOICE = DraftChoice(0.0, 1.0, 0, 0.0, 0)
SIZE = EngineSettings().page_size_tokens
PROMPT = 20
DEPTH = 2
BATCH = 48


class Model:
    """A draft model of which each token has the runner-up `token + 10`; its KV at a position is all
    tokens up to there.
    """

    def __init__(self, batches: DraftBatches, guess: list[int]) -> None:
        self.batches, self.guess = batches, guess
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}

    def step(self) -> list[Burst]:
        batch, choices = self.batches.next(), []
        written: list[int] = []
        assert sum(len(chunk.token_ids) for _, _, chunk in batch) <= BATCH
        for stream, one, chunk in batch:
            pages, first = chunk.pages, chunk.first_position
            end = first + len(chunk.token_ids)
            before = self.kv[pages[(first - 1) // SIZE], (first - 1) % SIZE] if first else ()
            assert len(before) == first
            for at in range(first):
                assert self.kv[pages[at // SIZE], at % SIZE] == before[: at + 1]
            tokens = (*before, *chunk.token_ids)
            right = stream.mirror.between(0, end if one is None else one.position)
            right += [] if one is None else one.token_ids
            assert list(tokens) == right[:end]
            for at in range(first, end):
                self.kv[pages[at // SIZE], at % SIZE] = tokens[: at + 1]
            written += {pages[at // SIZE] for at in range(first, end)}
            if chunk.logits:
                choices.append((self.guess[end], self.guess[end] + 10))
        assert len(written) == len(set(written)), "two write one page"
        bursts = self.batches.advanced(batch, choices)
        for burst in bursts:
            if burst.is_alternative:
                assert burst.token_ids[0] == self.guess[burst.position] + 10
        return bursts

    def rest(self) -> list[Burst]:
        return [burst for _ in range(200) if self.batches.has_work for burst in self.step()]


def model(guess: list[int], pages: int = 64) -> Model:
    settings = EngineSettings(pages=pages, max_batch_tokens=BATCH)
    return Model(DraftBatches(settings, DEPTH, 1000), guess)


def came(bursts: Bursts, found: list[Burst]) -> None:
    for one in found:
        bursts.came(one.position, one.token_ids, one.begins_anew, one.is_alternative)


@given(
    st.lists(st.sampled_from(["step", "verify", "end", "begin"]), max_size=80),
    st.sampled_from([4, 7, 12, 64]),
    st.randoms(use_true_random=False),
)
def test_a_chunk_stands_behind_the_kv_of_its_own_tokens(
    moves: list[str], pages: int, random: Random
) -> None:
    """Whatever is drafted, taken up or dropped; and every page comes back."""
    drafting = model([random.randrange(2) for _ in range(500)], pages)
    streams: dict[int, list[int]] = {}
    for number, move in enumerate(moves):
        if move == "begin":
            streams[number] = [random.randrange(2) for _ in range(random.randrange(1, 40))]
            drafting.batches.update([MirrorUpdate(number, list(streams[number]), CHOICE)])
        elif move == "step":
            drafting.step()
        elif streams:
            chosen = random.choice(list(streams))
            ids = [random.choice([0, 1, 10, 11]) for _ in range(random.randrange(1, DEPTH + 2))]
            if move == "end":
                ids = []
                del streams[chosen]
            drafting.batches.update([MirrorUpdate(chosen, ids)])
    drafting.rest()
    assert not drafting.batches.has_work, "its caller would ask for ever"
    drafting.batches.update([MirrorUpdate(number) for number in streams])
    assert drafting.batches.free_pages == pages


def test_the_step_behind_a_runner_up_has_drafts_wherever_it_stood() -> None:
    """In place of each draft of a step, of the token behind them, and across the end of a page."""
    guess = [at % 7 for at in range(500)]
    for prompt in range(SIZE - 4, SIZE + 2):
        for right in range(DEPTH + 1):
            drafting, bursts = model(guess), Bursts()
            ids = guess[:prompt]
            drafting.batches.update([MirrorUpdate(1, ids[:], CHOICE)])
            came(bursts, drafting.rest())
            assert bursts.proposal(ids, DEPTH) == guess[prompt : prompt + DEPTH]

            chosen = [*guess[prompt : prompt + right], guess[prompt + right] + 10]
            ids += chosen

            end = len(ids)
            assert bursts.proposal(ids, DEPTH) == guess[end : end + DEPTH]
            stale = bursts.stale
            drafting.batches.update([MirrorUpdate(1, chosen)])
            first = drafting.step()
            assert first[0].token_ids[:DEPTH] == guess[end : end + DEPTH], "it goes on from there"
            came(bursts, [*first, *drafting.rest()])
            ids += guess[end : end + DEPTH + 1]
            assert bursts.proposal(ids, DEPTH) == guess[len(ids) : len(ids) + DEPTH]
            assert bursts.stale == stale


def test_a_runner_up_is_taken_up_however_far_it_was_computed() -> None:
    """Where all tokens are alike, too: it is that of its position."""
    for steps in range(1, 9):
        for right in range(DEPTH + 1):
            drafting, chosen = model([1] * 500), [*[1] * right, 11]
            begun = [MirrorUpdate(n, [n] * 28, CHOICE) for n in range(3)]
            drafting.batches.update(begun)
            for _ in range(steps):
                drafting.step()
            drafting.batches.update([MirrorUpdate(n, chosen) for n in range(3)])
            drafting.rest()
            drafting.batches.update([MirrorUpdate(n) for n in range(3)])
            assert drafting.batches.free_pages == 64


def test_alternatives_are_finished_behind_the_last_draft() -> None:
    """Each has all its drafts before there is nothing to do."""
    guess = [at % 7 for at in range(500)]
    drafting, bursts, ids = model(guess), Bursts(), guess[:PROMPT]
    drafting.batches.update([MirrorUpdate(1, ids[:], CHOICE)])
    came(bursts, drafting.rest())
    drafting.batches.update([MirrorUpdate(1, [guess[PROMPT]])])
    came(bursts, drafting.rest())
    ids = [*guess[: PROMPT + DEPTH + 1], guess[PROMPT + DEPTH + 1] + 10]
    assert bursts.proposal(ids, DEPTH) == guess[len(ids) : len(ids) + DEPTH]


def test_alternatives_take_no_page_that_a_stream_needs() -> None:
    """A second stream has its drafts while the first one's alternatives give way."""
    guess = [1] * 500
    drafting = model(guess, pages=4)
    drafting.batches.update([MirrorUpdate(1, guess[:PROMPT], CHOICE)])
    assert any(burst.is_alternative for burst in drafting.rest())
    assert drafting.batches.free_pages < 2

    drafting.batches.update([MirrorUpdate(2, guess[:PROMPT], CHOICE)])

    assert any(burst.number == 2 for burst in drafting.rest())


def test_alternatives_of_a_stream_without_runners_up_are_none() -> None:
    batches = DraftBatches(EngineSettings(pages=8), DEPTH, 1000)
    batches.update([MirrorUpdate(1, [1, 2, 3], CHOICE)])
    drafted = 0
    while batches.has_work:
        batch = batches.next()
        drafted += len(batches.advanced(batch, [(7, None) for _ in batch]))
    assert drafted == 2 * DEPTH + 1
