"""The logits of a token are the same bits whatever happened around it."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.examples import examples

pytestmark = pytest.mark.engine

SEQUENCES = 5
LENGTH = 230
PAGES = 1024
ODD_LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 20,
    "intermediate_size": 101,
    "attention_bias": True,
    "initializer_range": 0.2,
}
# Of every family, the tokens per page and a configuration in which all its parts are at work.
MODELS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "llama, odd sizes, pages of 4": (4, "llama", ODD_LLAMA),
    "llama, odd sizes, pages of 128": (128, "llama", ODD_LLAMA),
    "mixtral": (
        16,
        "mixtral",
        {
            "num_hidden_layers": 2,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 101,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "initializer_range": 0.2,
        },
    ),
    "qwen3_moe, a dense layer among the others": (
        8,
        "qwen3_moe",
        {
            "num_hidden_layers": 3,
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 14,
            "intermediate_size": 99,
            "moe_intermediate_size": 34,
            "num_experts": 12,
            "num_experts_per_tok": 5,
            "mlp_only_layers": [1],
            "initializer_range": 0.2,
        },
    ),
    "opt": (
        16,
        "opt",
        {
            "num_hidden_layers": 2,
            "hidden_size": 65,
            "num_attention_heads": 5,
            "ffn_dim": 131,
            "init_std": 0.2,
        },
    ),
}


@dataclass
class Bench:
    """Two engines of one model, and what a plain run, token by token, gave at every position: of
    the first sequence alone, and of the others beside each other.
    """

    workers: list[Worker]
    token_ids: list[list[int]]
    expected: list[Tensor]  # [length, vocab] for each sequence


def bench_of(directory: Path, page_size_tokens: int) -> Bench:
    engine = EngineSettings(page_size_tokens=page_size_tokens, pages=PAGES)
    workers = [Worker(directory, engine) for _ in range(2)]
    choose = random.Random(1)
    token_ids = [choose.choices(range(workers[0].vocab_size), k=LENGTH) for _ in range(SEQUENCES)]
    alone, *others = token_ids
    expected = [*steps_of(workers[0], [alone]), *steps_of(workers[0], others)]
    return Bench(workers, token_ids, expected)


def steps_of(worker: Worker, sequences: list[list[int]]) -> Iterator[Tensor]:
    """The logits of each sequence, of which every batch has the next token."""
    per_sequence = -(-LENGTH // worker.geometry.page_size_tokens)
    pages = [
        range(index * per_sequence, (index + 1) * per_sequence) for index in range(len(sequences))
    ]
    rows = [
        worker.execute(
            [
                Chunk(ids[at : at + 1], at, held, logits=1)
                for ids, held in zip(sequences, pages, strict=True)
            ]
        )
        for at in range(LENGTH)
    ]
    yield from torch.stack(rows, 1)


# In `make test`: every batch crosses pages of 4, and a mixture has all that the others have.
FIRST = {"llama, odd sizes, pages of 4", "qwen3_moe, a dense layer among the others"}


@pytest.fixture(
    scope="session",
    params=[
        "tiny model",
        *(
            pytest.param(name, marks=[] if name in FIRST else pytest.mark.nightly)
            for name in MODELS
        ),
    ],
)
def bench(
    request: pytest.FixtureRequest, tiny_model: Path, random_model: Callable[..., Path]
) -> Bench:
    if request.param == "tiny model":
        return bench_of(tiny_model, 16)
    page_size_tokens, family, fields = MODELS[request.param]
    return bench_of(random_model(family, seed=3, vocab_size=97, **fields), page_size_tokens)


@dataclass
class Place:
    """The engine and the pages of a sequence."""

    worker: int
    pages: list[int]
    computed: int = 0


@dataclass
class Run:
    """Carries out a schedule and compares every logit on the way."""

    bench: Bench
    places: list[Place]
    free: list[Iterator[int]] = field(default_factory=list)

    @classmethod
    def on(cls, bench: Bench, seed: int) -> "Run":
        choose = random.Random(seed)
        free = [iter(choose.sample(range(PAGES), k=PAGES)) for _ in bench.workers]
        for worker in bench.workers:
            # The worst that an earlier owner can leave behind.
            worker.pool.tensor[:PAGES] = torch.nan
        return cls(bench, [Place(choose.randrange(2), []) for _ in range(SEQUENCES)], free)

    def recover(self, sequence: int) -> None:
        """Copy the pages, byte by byte, to other numbers in the other engine, and continue
        there.
        """
        old = self.places[sequence]
        new = Place(
            1 - old.worker, [next(self.free[1 - old.worker]) for _ in old.pages], old.computed
        )
        for source, target in zip(old.pages, new.pages, strict=True):
            self.bench.workers[new.worker].pool.view(target)[:] = self.bench.workers[
                old.worker
            ].pool.view(source)
            self.bench.workers[old.worker].pool.tensor[source] = torch.nan
        self.places[sequence] = new

    def execute(self, sizes: list[tuple[int, int, int]]) -> None:
        """One batch on each engine: that many next tokens of those sequences, with the logits of so
        many last ones.
        """
        for index, worker in enumerate(self.bench.workers):
            members = [member for member in sizes if self.places[member[0]].worker == index]
            chunks = [chunk for member in members for chunk in self._chunk(*member)]
            if not chunks:
                continue
            logits, row = worker.execute(chunks), 0
            done = [sequence for sequence, *_ in members if self.places[sequence].computed < LENGTH]
            for sequence, chunk in zip(done, chunks, strict=True):
                computed = self.places[sequence].computed + len(chunk.token_ids)
                self.places[sequence].computed = computed
                expected = self.bench.expected[sequence][computed - chunk.logits : computed]
                assert torch.equal(logits[row : row + chunk.logits], expected)
                row += chunk.logits
            assert row == len(logits)

    def _chunk(self, sequence: int, size: int, logits: int) -> Iterator[Chunk]:
        place = self.places[sequence]
        token_ids = self.bench.token_ids[sequence][place.computed : place.computed + size]
        if not token_ids:
            return
        page_size = self.bench.workers[0].geometry.page_size_tokens
        while len(place.pages) * page_size < place.computed + len(token_ids):
            place.pages.append(next(self.free[place.worker]))
        yield Chunk(token_ids, place.computed, place.pages, logits=min(logits, len(token_ids)))


moves = st.tuples(
    st.integers(0, SEQUENCES - 1),
    st.sampled_from([1, 1, 1, 2, 5, 15, 16, 17, 33, 64, 100, 230]),
    st.sampled_from([0, 1, 1, 2, 5, 16, 17, 230]),  # Last tokens whose logits are wanted.
    st.booleans(),
)
schedules = st.lists(
    st.lists(moves, min_size=1, max_size=SEQUENCES, unique_by=lambda move: move[0]),
    min_size=1,
    max_size=12,
)


@examples(40)
@given(schedule=schedules, seed=st.integers(0, 1000))
def test_logits_do_not_depend_on_batch_chunking_or_where_pages_came_from(
    bench: Bench, schedule: list[list[tuple[int, int, int, bool]]], seed: int
) -> None:
    """A resumed stream equals the uninterrupted one only if arithmetic sees the sequence and
    nothing else.
    """
    run = Run.on(bench, seed)

    for batch in schedule:
        for sequence, *_, recovered in batch:
            if recovered:
                run.recover(sequence)

        run.execute([(sequence, size, logits) for sequence, size, logits, _ in batch])


def test_each_row_of_a_chunk_has_the_logits_of_a_step_alone(bench: Bench) -> None:
    """Speculation compares several guessed tokens at once with what each step would have given."""
    worker, ids, expected = bench.workers[0], bench.token_ids[0], bench.expected[0]
    pages = range(PAGES)
    worker.execute([Chunk(ids[:100], 0, pages, logits=0)])

    for rows in (1, 2, 3, 8, 15, 16, 17, 40):
        found = worker.execute([Chunk(ids[100:140], 100, pages, logits=rows)])
        assert torch.equal(found, expected[140 - rows : 140])


def test_a_full_batch_of_decode_steps_equals_single_steps(bench: Bench) -> None:
    """Nor does a row's place in its tile matter: each sequence takes every place of a batch larger
    than one tile.
    """
    worker = bench.workers[0]
    page_size = worker.geometry.page_size_tokens
    per_sequence = -(-LENGTH // page_size)
    pages = [
        list(range(index * per_sequence, (index + 1) * per_sequence)) for index in range(SEQUENCES)
    ]
    for ids, held in zip(bench.token_ids, pages, strict=True):
        worker.execute([Chunk(ids[:200], 0, held, logits=0)])

    for shift in range(17):
        members = [(shift + index) % SEQUENCES for index in range(SEQUENCES)]
        filler = [Chunk([0], 0, [PAGES - 1 - index], logits=1) for index in range(shift)]
        steps = [
            Chunk(bench.token_ids[index][200:201], 200, pages[index], logits=1) for index in members
        ]
        logits = worker.execute(filler + steps)[shift:]

        assert all(
            torch.equal(row, bench.expected[index][200])
            for index, row in zip(members, logits, strict=True)
        )


def test_logits_come_for_the_chunks_that_ask_in_their_order(tiny_model: Path) -> None:
    """Most chunks of a long prompt want none."""
    worker = Worker(tiny_model, EngineSettings(pages=64))
    chunks = [
        Chunk([5, 6, 7], 0, [0], logits=1),
        Chunk([8, 9], 0, [1], logits=0),
        Chunk([9, 8], 0, [2], logits=2),
    ]

    logits = worker.execute(chunks)
    first, last = (worker.execute([chunks[index]]) for index in (0, 2))
    none = worker.execute([chunks[1]])

    assert (len(first), len(last)) == (1, 2)
    assert torch.equal(logits, torch.cat((first, last)))
    assert none.shape == (0, worker.vocab_size)
