"""The fingerprint of a model in vLLM: pages move only between equal ones."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from kvrs.errors import KvrsError
from kvrs.protocol.geometry import KvGeometry

LAYOUT = 1  # Of vLLM's blocks in our pages; rises where it changes.
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def weights_of(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """Digest of the weights, code and configuration in a model's directory, or in the snapshot of
    a model's name that is in the cache of Hugging Face. Of files in a cache their names there,
    which are digests of all they have; of others the samples that `fingerprint_of` takes.

    Raises:
        KvrsError: there are none.
    """
    directory = Path(model)
    if not directory.is_dir():
        try:
            directory = Path(
                snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
            )
        except (OSError, ValueError) as error:
            raise KvrsError(f"{model}: neither a directory nor in the cache: {error}") from None
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*directory.glob("*.json"), *directory.glob("*.py")]):
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        if path.is_symlink():
            digest.update(path.resolve().name.encode())
    _add_weights(digest, directory)
    return digest.hexdigest()


def fingerprint_of(model: str, arithmetic: Sequence[str], geometry: KvGeometry) -> str:
    """Fingerprint of a model's directory: of its files of weights the sizes, the heads, and samples
    at equal distances, since to read all would take minutes. `arithmetic`: settings by which equal
    weights give other KV.

    Raises:
        KvrsError: the directory has no weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([LAYOUT, [*arithmetic], [*map(repr, [geometry])]]).encode())
    _add_weights(digest, Path(model))
    return f"vLLM blocks {LAYOUT}, {digest.hexdigest()}"


def _add_weights(digest: hashlib.blake2b, directory: Path) -> None:
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])
    if not files:
        raise KvrsError(
            f"{directory}: no *.safetensors or *.bin; allowed: a directory with weights"
        )
    digest.update(json.dumps([file.name for file in files]).encode())
    config = directory / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
