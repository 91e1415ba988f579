"""The bits of a model do not depend on which rank computes which of its units."""

import random
from pathlib import Path

import pytest
import torch

from tests.engine.exact_models import MODELS, first_or_nightly, write_model
from tests.engine.ownership import LENGTH, SEQUENCES, Bench, Count

pytestmark = pytest.mark.engine

FIRST = first_or_nightly(
    "llama, odd sizes, biases, 2 ragged tiles", "mixtral, 5 experts of 2 parts"
)


@pytest.mark.parametrize("name", FIRST)
def test_owners_drawn_at_random_have_the_bytes_of_one_process(name: str, tmp_path: Path) -> None:
    """Logits of all rows and all KV cells, over 1 to 6 ranks in 1 to 4 stages, random batches, and
    owners that change on the way.
    """
    bench, count = Bench(tmp_path, write_model(name, tmp_path, seed=5), seed=5), Count()

    with torch.inference_mode():
        bench.trial(random.Random(1), count)

    assert count.rows == SEQUENCES * LENGTH
    assert count.rows_different == count.cells_different == 0


def test_sums_in_the_order_of_ranks_are_seen_to_differ(tmp_path: Path) -> None:
    """The comparison is one: another association changes bytes."""
    name = next(iter(MODELS))
    bench, count = Bench(tmp_path, write_model(name, tmp_path, seed=5), seed=5), Count()

    with torch.inference_mode():
        for seed in range(3):
            bench.trial(random.Random(seed), count, in_order=True)

    assert count.rows_different > 0
