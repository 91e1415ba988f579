"""The fingerprint of a model in vLLM: pages move only between equal ones."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from kvrs.errors import KvrsError
from kvrs.protocol.geometry import KvGeometry
from kvrs.vllm import files

LAYOUT = 1  # Of vLLM's blocks in our pages; rises where it changes.
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def weights_of(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """Digest of the weights, code and configuration in a model's directory, or in the snapshot of
    a model's name that is in the cache of Hugging Face. Of files in a cache their names there,
    which are digests of all they have; of others all bytes.

    Raises:
        KvrsError: there are none, or they have changed since this server started.
    """
    directory = Path(model)
    if not directory.is_dir():
        try:
            directory = Path(
                snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
            )
        except (OSError, ValueError) as error:
            raise KvrsError(f"{model}: neither a directory nor in the cache: {error}") from None
    weights = _weights_in(directory)
    small = sorted([*directory.glob("*.json"), *directory.glob("*.py")])
    digest = hashlib.blake2b(digest_size=16)
    plain = []
    for path in [*small, *weights]:
        if path.is_symlink() and path.resolve().parent.name == "blobs":
            digest.update(f"{path.name} {path.resolve().name}".encode())
        else:
            plain.append(path)
    if plain:
        read = [*files.on_the_way(directory), *plain]
        signature = files.signature_of(read)
        digest.update(files.digest_of(plain))
        if files.signature_of(read) != signature:
            raise KvrsError(f"{directory} changes")
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


def _weights_in(directory: Path) -> list[Path]:
    found = sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])
    if not found:
        raise KvrsError(
            f"{directory}: no *.safetensors or *.bin; allowed: a directory with weights"
        )
    return found


def _add_weights(digest: hashlib.blake2b, directory: Path) -> None:
    weights = _weights_in(directory)
    digest.update(json.dumps([each.name for each in weights]).encode())
    config = directory / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in weights:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
