"""A token whose numbers overflow spoils the rows behind it, on all ranks alike, and no others."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.text.output import TextDelta
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.requests import StepOutput
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.ranks_in_threads import ThreadRanks, random_layout
from kvrs_testkit.turning_experts import BAD_ID, FIRST_IDS, write_turning_model
from tests.engine.test_runs import S, run_of

pytestmark = pytest.mark.engine

SETTINGS = EngineSettings(pages=32)
LENGTH, BAD_AT = 60, 33
# Rows of a chunk weigh what comes behind them by zero, and zero times what is no number is none.
CUTS = [0, 20, BAD_AT, 40, 41, 42, LENGTH]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "overflowing"
    write_turning_model(directory)
    return directory


def computed(worker: Worker | ThreadRanks, sequences: dict[int, list[int]]) -> dict[int, Tensor]:
    """Logits of all rows of sequences that are computed together. They lie where others lay."""
    rows: dict[int, list[Tensor]] = {at: [] for at in sequences}
    for first, last in pairwise(CUTS):
        size = last - first
        logits = worker.execute(
            [
                Chunk(ids[first:last], first, range(8 * at, 8 * at + 8), size)
                for at, ids in sequences.items()
            ]
        )
        for at, own in zip(sequences, torch.split(logits, size), strict=True):
            rows[at].append(own)
    return {at: torch.cat(own) for at, own in rows.items()}


def test_only_rows_behind_the_token_are_spoilt_on_any_ranks(model: Path) -> None:
    """Whatever rank has an expert or a copy of it, and also in pages that such rows lay in. The
    other sequences have the bytes that they have alone.
    """
    choose, config = random.Random(3), ModelConfig.from_directory(model)
    sequences = {at: choose.choices(FIRST_IDS, k=LENGTH) for at in range(4)}
    sequences[1][BAD_AT] = BAD_ID
    worker = Worker(model, SETTINGS)
    alone = {at: computed(worker, {at: ids})[at] for at, ids in sequences.items()}
    assert alone[1][:BAD_AT].isfinite().all()
    assert alone[1][BAD_AT:].isnan().all()

    for _ in range(6):
        layout = random_layout(config.grain, config.layers, choose)
        ranks = ThreadRanks(model, SETTINGS, layout)
        found = computed(ranks, sequences)
        again = computed(ranks, {1: sequences[0], 3: sequences[2]})
        ranks.close()

        for at in (0, 2, 3):
            assert same_bytes(found[at], alone[at])
        assert same_bytes(found[1][:BAD_AT], alone[1][:BAD_AT])
        assert found[1][BAD_AT:].isnan().all()
        assert same_bytes(again[1], alone[0])
        assert same_bytes(again[3], alone[2])


def test_drafts_behind_an_unknown_token_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although they are what their rows choose."""
    run = run_of(S, 1)
    monkeypatch.setattr(type(run), "take", lambda *_: StepOutput([0], TextDelta("")))
    logits = torch.zeros(3, 100)
    logits[1] = torch.nan

    assert len(run.step(logits, [0, 0])) == 2
    assert run.failure is not None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("spoilt", [slice(None), slice(70, 71)])
def test_a_stream_fails_whose_next_token_is_unknown(
    monkeypatch: pytest.MonkeyPatch, temperature: float, top_k: int, spoilt: slice
) -> None:
    """It is named, as is the position; logits that are numbers, or infinite, do not fail."""
    run = run_of(S, 1)
    run.logprobs = 3
    run.params = replace(run.params, temperature=temperature, top_k=top_k)
    monkeypatch.setattr(type(run), "take", lambda *_: StepOutput([0], TextDelta("")))
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    logits[0, 7] = -torch.inf
    logits[1, spoilt] = torch.nan

    run.step(logits[:1])
    assert run.failure is None
    run.step(logits[1:])

    assert run.failure == "logits at position 3: got nan; allowed: numbers"
    assert run.failure_code == "not_a_number"
