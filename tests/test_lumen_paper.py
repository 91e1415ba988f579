"""LUMEN's experiments at the paper's operating point: what the fitted factor does, and which
requests are in the window.
"""

from pathlib import Path

import pytest

from experiments.lumen.paper import slowed
from experiments.lumen.run import LLAMA, TARGET, Run, figures
from kvrs.scheduling.assisted import DraftCounts
from kvrs.scheduling.pace import Pace
from kvrs.scheduling.sequences import Chunk
from kvrs.traces.records import StreamRecord


@pytest.mark.parametrize("tokens", [1, 700])
def test_batches_of_a_slowed_profile_take_the_factor_longer(tmp_path: Path, tokens: int) -> None:
    slow = Pace(slowed(TARGET, 2.5, tmp_path))
    batch = [Chunk(range(tokens), 1200, [0], logits=1)]

    assert slow.batch_s(batch) == pytest.approx(2.5 * Pace(TARGET).batch_s(batch))


def test_the_window_has_the_interrupted_with_their_replay() -> None:
    """A request is interrupted at 3 s, and those that come from then on until 9 s wait."""
    clean = [record(number, ttft_s=0.1) for number in range(160)]
    faulted = [record(number, ttft_s=1.0 if 30 <= number < 90 else 0.1) for number in range(160)]
    hit = faulted[25]
    hit.token_times_s[-1] = hit.ended_s = 5.0

    row = figures(
        Run(faulted, {25}, 3.0, DraftCounts()), Run(clean, set(), 3.0, DraftCounts()), LLAMA
    )

    assert row["in_window"] == 80  # Five buckets of 16.
    assert row["window_clean_ttft_s"] == pytest.approx(0.1)
    assert row["window_ttft_s"] == pytest.approx((19 * 0.1 + 60 * 1.0 + 2.5) / 80)
    assert row["hit_tpot_s"] == pytest.approx(2.4)


def record(number: int, ttft_s: float) -> StreamRecord:
    at_s = number / 10
    times_s = [at_s + ttft_s, at_s + ttft_s + 0.2]
    return StreamRecord(
        number, at_s, 10, 2, sent_s=at_s, ended_s=times_s[-1], token_times_s=times_s
    )
