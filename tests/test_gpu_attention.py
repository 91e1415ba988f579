"""The program that times attention of ranks on a GPU, as far as a CPU can check it."""

import sys

import pytest
import torch

from experiments.gpu import attention

pytestmark = pytest.mark.engine


def test_ranks_together_compute_all_heads_of_all_sequences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the times would be of less work than a model has."""
    monkeypatch.setattr(sys, "argv", ["attention", "--check"])

    assert attention.main() == 0

    assert "passed" in capsys.readouterr().out


def test_hybrid_attention_has_less_for_the_fullest_rank() -> None:
    """A spread head is computed for the sequences of its base alone."""
    for ranks, heads in ((7, 1 + 8 / 56), (6, 1 + 2 * 10 / 56), (5, 1 + 3 * 12 / 56)):
        parts = attention.shares(ranks, 56, 1, 16_384)

        assert sum(part.heads for part in parts["as they come"]) == 2
        assert sum(part.heads * part.sequences / 56 for part in parts["hybrid"]) == heads


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["attention"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert attention.main() == 0

    assert "no GPU" in capsys.readouterr().out
