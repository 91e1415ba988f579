"""The generated model is reproducible and worth decoding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrs.config.cluster import EngineSettings
from kvrs.text.output import load_tokenizer
from kvrs_engine.engine import warm_up
from kvrs_engine.engine.models import digests
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk

pytestmark = pytest.mark.engine


def contents(directory: Path) -> dict[str, bytes]:
    # Beside them, engines of other tests note the hash of the weights and their tables.
    noted = (digests.NOTE_NAME, warm_up.NOTE_NAME)
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name not in noted}


def greedy(worker: Worker, prompt: list[int], tokens: int) -> list[int]:
    pages = range(worker.pool.pages)
    token_ids = list(prompt)
    computed = 0
    for _ in range(tokens):
        logits = worker.execute([Chunk(token_ids[computed:], computed, pages, logits=1)])
        computed = len(token_ids)
        token_ids.append(int(logits[0].argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.nightly
@pytest.mark.process
def test_a_seed_gives_the_same_bytes_in_every_process(tiny_model: Path, tmp_path: Path) -> None:
    """Four engine processes generate the same model on their own, and page tags depend on its
    bytes.
    """
    script = (
        "import sys, pathlib; from kvrs_engine.engine.random_model import write_tiny_model; "
        "write_tiny_model(pathlib.Path(sys.argv[1]), 0)"
    )

    for hash_seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / hash_seed)],
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )

    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tiny_model)


def test_another_seed_gives_another_model(tiny_model: Path, tmp_path: Path) -> None:
    """Weights and text both come from the seed."""
    write_tiny_model(tmp_path / "other", seed=1)

    ours, other = contents(tiny_model), contents(tmp_path / "other")

    assert ours["model.safetensors"] != other["model.safetensors"]
    assert ours["tokenizer.json"] != other["tokenizer.json"]
    assert ours["config.json"] == other["config.json"]


def test_a_complete_directory_is_left_alone(tmp_path: Path) -> None:
    """It is the cache of the next start; and nothing half-made stays beside it."""
    write_tiny_model(tmp_path / "model", seed=0)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "model").iterdir()}

    write_tiny_model(tmp_path / "model", seed=0)

    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
def test_greedy_output_varies_and_seldom_ends(seed: int, tmp_path: Path) -> None:
    """A stream that repeats one token or ends at once would not show a lost, repeated or wrong
    one.
    """
    write_tiny_model(tmp_path / "model", seed)
    worker = Worker(tmp_path / "model", EngineSettings(pages=64))
    tokenizer = load_tokenizer(tmp_path / "model")

    outputs = [
        greedy(worker, tokenizer.encode(text).ids, 200)
        for text in ("hello", "kalo miren. stavor", "日本 x 123", "a b c d")
    ]

    assert all(len(set(token_ids)) >= 20 for token_ids in outputs)
    assert sum(bool(worker.eos_token_ids & set(token_ids)) for token_ids in outputs) <= 1


def test_worker_describes_the_model(tiny_model: Path) -> None:
    """Peers compare fingerprints before they exchange pages: equal in every engine of a model,
    different for any other.
    """
    settings = EngineSettings(pages=4)
    worker, same = Worker(tiny_model, settings), Worker(tiny_model, settings)
    other_pages = Worker(tiny_model, EngineSettings(pages=4, page_size_tokens=32))

    assert worker.fingerprint == same.fingerprint != other_pages.fingerprint
    assert (worker.vocab_size, worker.eos_token_ids, worker.max_positions) == (
        512,
        frozenset({1}),
        2048,
    )
    assert worker.geometry.page_bytes == 2 * 4 * 2 * 16 * 32 * 4


def test_a_page_is_one_run_of_writable_bytes(tiny_model: Path) -> None:
    """Pages are sent from and received into the pool without a copy."""
    worker = Worker(tiny_model, EngineSettings(pages=4))
    worker.execute([Chunk([5, 6, 7], 0, [2], logits=0)])

    view = worker.pool.view(2)
    worker.pool.view(1)[:] = view

    assert view.nbytes == worker.geometry.page_bytes
    assert (view.format, view.ndim, view.c_contiguous, view.readonly) == ("B", 1, True, False)
    assert worker.pool.tensor[1].any()
    assert worker.pool.tensor[1].equal(worker.pool.tensor[2])
    assert not worker.pool.tensor[0].any()
