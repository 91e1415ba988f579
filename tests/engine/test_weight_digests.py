"""The hash of the weights: by units, and remembered for the files as they are."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine.models import digests
from kvrs_engine.engine.models.digests import NOTE_NAME, units_root
from kvrs_engine.engine.worker import Worker

pytestmark = pytest.mark.engine

OPT = {
    "num_hidden_layers": 2,
    "hidden_size": 72,
    "num_attention_heads": 6,
    "ffn_dim": 260,
    "vocab_size": 97,
}
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 131,
    "vocab_size": 97,
    "attention_bias": True,
}


QWEN3_MOE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 97,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [0],
}
FAMILIES = [("llama", LLAMA), ("opt", OPT), ("qwen3_moe", QWEN3_MOE)]


def worker(directory: Path, max_model_len: int = 2048) -> Worker:
    return Worker(directory, EngineSettings(pages=4, max_model_len=max_model_len))


@pytest.mark.parametrize(("family", "fields"), FAMILIES)
def test_a_changed_number_anywhere_changes_the_root(
    family: str, fields: dict[str, object], random_model: Callable[..., Path]
) -> None:
    """One number of each tensor of the checkpoint, one at a time."""
    directory = random_model(family, seed=1, **fields)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    roots = {units_root(worker(directory).model)}

    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(-1)[-1] += 1
        save_file(tensors | {name: changed}, path, metadata={"format": "pt"})
        roots.add(units_root(worker(directory).model))

    assert len(roots) == 1 + len(tensors)


def test_the_root_is_that_of_the_numbers_not_of_the_files(
    random_model: Callable[..., Path],
) -> None:
    """One file or several, and whatever the engine's limits."""
    whole = random_model("opt", seed=1, **OPT)
    parts = random_model("opt", seed=1, max_shard_size="20KB", **OPT)
    assert len(list(parts.glob("*.safetensors"))) > 1

    fingerprints = {worker(whole).fingerprint, worker(parts).fingerprint}

    assert fingerprints == {worker(whole, max_model_len=64).fingerprint}
    assert worker(random_model("opt", seed=2, **OPT)).fingerprint not in fingerprints


def test_the_root_is_computed_once_for_files_as_they_are(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start reads it; a file that was replaced, even by one of the same size and time, is hashed
    again.
    """
    computed: list[bytes] = []

    def count(decoder: object) -> bytes:
        computed.append(units_root(decoder))  # type: ignore[arg-type]
        return computed[-1]

    monkeypatch.setattr(digests, "units_root", count)
    fingerprint = worker(tiny_copy).fingerprint
    assert worker(tiny_copy).fingerprint == fingerprint
    assert len(computed) == 1

    path = tiny_copy / "model.safetensors"
    before, tensors = path.stat(), load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert path.stat().st_size == before.st_size
    assert worker(tiny_copy).fingerprint != fingerprint
    assert len(computed) == 2


@pytest.mark.parametrize(
    "lie",
    [
        *(b"", b"[]", b"{", b'{"grain": 1}', b"\xff\xfe", b"null", b'"root"'),
        pytest.param(b"[" * 100_000, id="nested"),
    ],
)
def test_a_damaged_note_is_not_believed(tiny_copy: Path, lie: bytes) -> None:
    """The root is computed and noted again."""
    fingerprint, note = worker(tiny_copy).fingerprint, (tiny_copy / NOTE_NAME).read_bytes()
    (tiny_copy / NOTE_NAME).write_bytes(lie)

    assert worker(tiny_copy).fingerprint == fingerprint
    assert (tiny_copy / NOTE_NAME).read_bytes() == note


@pytest.mark.parametrize(("field", "value"), [("grain", 0), ("files", []), ("root", "00")])
def test_a_note_of_something_else_is_not_believed(
    tiny_copy: Path, field: str, value: object
) -> None:
    """The note is of another version or of other files, or has no hash."""
    fingerprint = worker(tiny_copy).fingerprint
    note = json.loads((tiny_copy / NOTE_NAME).read_text())
    (tiny_copy / NOTE_NAME).write_text(json.dumps(note | {"root": "11" * 32, field: value}))

    assert worker(tiny_copy).fingerprint == fingerprint


def test_a_directory_that_cannot_be_written_remembers_nothing(
    tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights often lie on read-only volumes; the engine starts all the same."""

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, f"{target} is read-only")

    files = sorted(tiny_copy.iterdir())
    monkeypatch.setattr(Path, "replace", refuse)

    assert worker(tiny_copy).fingerprint
    assert sorted(tiny_copy.iterdir()) == files


@pytest.fixture
def tiny_copy(tmp_path: Path, tiny_model: Path) -> Path:
    """A directory of its own, without a note."""
    for path in tiny_model.iterdir():
        if path.name != NOTE_NAME:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_units_have_hashes_of_their_own() -> None:
    """The same bytes in another shape, or shared out in another way, are another leaf."""
    flat = torch.arange(12.0)

    leaves = {
        digests._leaf(flat),
        digests._leaf(flat.view(3, 4)),
        digests._leaf(flat[:6], flat[6:]),
        digests._leaf(flat, None),
    }

    assert len(leaves) == 4
