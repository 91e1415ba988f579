"""Limits of a batch for the ranks of a stage, which check nothing themselves."""

import pytest

from kvrs_engine.engine.ranks.sessions import BatchLimits, StageRefusedError
from kvrs_engine.scheduling.sequences import Chunk

LIMITS = BatchLimits(512, positions=1024, pages=64, page_size_tokens=16, batch_tokens=256)


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([], "0 tokens; allowed: 1 to 256"),
        ([Chunk([1] * 257, 0, range(17), logits=1)], "257 tokens; allowed: 1 to 256"),
        ([Chunk([1, 512], 0, [5], logits=1)], r"chunk 0: token ids \[1, 512\]; allowed: 0 to 511"),
        ([Chunk([1], 0, [64], logits=1)], r"chunk 0: pages \[64\]; allowed: 0 to 63"),
        ([Chunk([1], 0, [-1], logits=1)], r"chunk 0: pages \[-1\]; allowed: 0 to 63"),
        ([Chunk([1] * 17, 0, [5], logits=1)], r"chunk 0: number of pages \[1\]; allowed: 2 to 64"),
        ([Chunk([1], -1, [5], logits=1)], r"chunk 0: positions \[-1, -1\]; allowed: 0 to 1023"),
        ([Chunk([1], 1 << 40, [5], logits=1)], "chunk 0: positions"),
        ([Chunk([1], 0, [5], logits=2)], r"chunk 0: logits \[2\]; allowed: 0 to 1"),
        ([Chunk([1], 0, [5], logits=1, base=64)], r"chunk 0: base \[64\]; allowed: 0 to 63"),
        ([Chunk([1], 0, [5], logits=1), Chunk([1], 0, [64], logits=1)], "chunk 1: pages"),
    ],
)
def test_a_batch_beyond_a_limit_is_refused_by_name(chunks: list[Chunk], reason: str) -> None:
    with pytest.raises(StageRefusedError, match=reason):
        LIMITS.check(chunks)


def test_a_batch_may_fill_every_limit() -> None:
    LIMITS.check([Chunk([511] * 256, 1024 - 256, range(64), logits=256, base=63)])
