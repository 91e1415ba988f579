"""Batches of a draft model: whose KV stands in which page."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.cluster import EngineSettings
from kvrs.protocol.instance import Burst, DraftChoice, MirrorUpdate
from kvrs_engine.scheduling.draft_batches import DraftBatches

CHOICE = DraftChoice(0.0, 1.0, 0, 0.0, 0)
SIZE = EngineSettings().page_size_tokens
DEPTH = 2
BATCH = 48


class Model:
    """A draft model whose KV at a position is all tokens up to there."""

    def __init__(self, batches: DraftBatches, guess: list[int]) -> None:
        self.batches, self.guess = batches, guess
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}

    def step(self) -> list[Burst]:
        batch, choices = self.batches.next(), []
        written: list[int] = []
        assert sum(len(chunk.token_ids) for _, chunk in batch) <= BATCH
        for stream, chunk in batch:
            pages, first = chunk.pages, chunk.first_position
            end = first + len(chunk.token_ids)
            before = self.kv[pages[(first - 1) // SIZE], (first - 1) % SIZE] if first else ()
            assert len(before) == first
            for at in range(first):
                assert self.kv[pages[at // SIZE], at % SIZE] == before[: at + 1]
            tokens = (*before, *chunk.token_ids)
            assert [*tokens] == [*stream.mirror.chosen, *stream.mirror.drafted][:end]
            for at in range(first, end):
                self.kv[pages[at // SIZE], at % SIZE] = tokens[: at + 1]
            written += {pages[at // SIZE] for at in range(first, end)}
            if chunk.logits:
                choices.append(self.guess[end])
        assert len(written) == len(set(written)), "two write one page"
        return self.batches.advanced(batch, choices)

    def rest(self) -> list[Burst]:
        return [burst for _ in range(200) if self.batches.has_work for burst in self.step()]


def model(guess: list[int], pages: int = 64) -> Model:
    settings = EngineSettings(pages=pages, max_batch_tokens=BATCH)
    return Model(DraftBatches(settings, DEPTH, 1000), guess)


@given(
    st.lists(st.sampled_from(["step", "verify", "end", "begin"]), max_size=80),
    st.sampled_from([4, 7, 12, 64]),
    st.randoms(use_true_random=False),
)
def test_a_chunk_stands_behind_the_kv_of_its_own_tokens(
    moves: list[str], pages: int, random: Random
) -> None:
    """Whatever is drafted, dropped; and every page comes back."""
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
            ids = [random.choice([0, 1]) for _ in range(random.randrange(1, DEPTH + 2))]
            if move == "end":
                ids = []
                del streams[chosen]
            drafting.batches.update([MirrorUpdate(chosen, ids)])
    drafting.rest()
    assert not drafting.batches.has_work, "its caller would ask for ever"
    drafting.batches.update([MirrorUpdate(number) for number in streams])
    assert drafting.batches.free_pages == pages
