"""The bytes of an instance do not depend on how it is divided among ranks."""

import random
from pathlib import Path

import pytest
import torch

from kvrs.config.cluster import EngineSettings
from kvrs_engine.elastic.layouts import validate
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks import exchange
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.ranks_in_threads import ThreadRanks, random_layout
from tests.engine.exact_models import LAYERS, first_or_nightly, write_model

pytestmark = pytest.mark.engine

LENGTH, SEQUENCES = 70, 3
FIRST = first_or_nightly(
    "llama, odd sizes, biases, 2 ragged tiles",
    "opt, 5 KV heads, 4 tiles",
    "qwen3_moe, 12 experts, a dense layer of 4 tiles",
)
CHUNKS = (1, 1, 2, 5, 16, 17, 33)


@pytest.mark.parametrize("name", FIRST)
async def test_ranks_drawn_at_random_have_the_bytes_of_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of random batches and, at the end, all KV cells, over ranks and stages drawn at
    random, each of which loads its own units only; with heads that are spread by sequences, with
    and without sums by slices of rows, and with memory that each rank alone has.
    """
    size = write_model(name, tmp_path, seed=5)
    choose, each = random.Random(name), -(-LENGTH // size)
    settings = EngineSettings(page_size_tokens=size, pages=2 * SEQUENCES * each)
    worker, config = Worker(tmp_path, settings), ModelConfig.from_directory(tmp_path)
    token_ids = [choose.choices(range(config.vocab), k=LENGTH) for _ in range(SEQUENCES)]
    usual = exchange.SLICED_ADDITIONS
    for turn in range(4):
        monkeypatch.setattr(exchange, "SLICED_ADDITIONS", turn % 2 * usual)
        layout = random_layout(config.grain, LAYERS, choose)
        validate(layout, config.units)
        ranks = ThreadRanks(tmp_path, settings, layout, apart=turn > 1)
        bases = choose.choices(range(6), k=SEQUENCES)
        pages = choose.sample(range(settings.pages), k=SEQUENCES * each)
        held = [pages[at * each : (at + 1) * each] for at in range(SEQUENCES)]
        done = [0] * SEQUENCES
        while open_ones := [at for at in range(SEQUENCES) if done[at] < LENGTH]:
            chunks = []
            for at in choose.sample(open_ones, choose.randint(1, len(open_ones))):
                first, done[at] = done[at], min(LENGTH, done[at] + choose.choice(CHUNKS))
                ids = token_ids[at][first : done[at]]
                # Of no token, of the last one, or of some.
                rows = min(len(ids), choose.choice((0, 1, 1, 1, 3, len(ids))))
                chunks.append(Chunk(ids, first, held[at], rows, bases[at]))
            logits = ranks.execute(chunks)
            # One at a time, and the rows of each alone.
            expected = [worker.execute([chunk]) for chunk in chunks]
            assert same_bytes(logits, torch.cat(expected)), layout

        if turn > 1:
            owned = zip(held, bases, strict=True)
            ranks.gather({page: base for own, base in owned for page in own})
        ours, theirs = ranks.pages.stage(pages), worker.pool.stage(pages)
        await ours.save()
        assert list(map(bytes, ours.views)) == list(map(bytes, theirs.views)), layout
        # Each tile of rows of an expert by one rank, whatever has copies.
        needed = ranks.memory.tiles.sum() * config.grain.expert_parts
        assert ranks.memory.computed.sum() == needed
        ranks.close()
