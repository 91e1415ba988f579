"""Digest of a model's weights: rows are shared only between servers with equal digests."""

import hashlib
from pathlib import Path

from huggingface_hub import snapshot_download

from kvrs.engines import files
from kvrs.errors import KvrsError


def weights_of(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """Return the digest of the weights, code and configuration of a model: of its directory, or of
    the snapshot with the model's name in the cache of Hugging Face. Files in the cache are named by
    digests of their contents, so only their names are hashed.

    Raises:
        KvrsError: no files, or files that have changed since this server started.
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


def _weights_in(directory: Path) -> list[Path]:
    found = sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])
    if not found:
        raise KvrsError(
            f"{directory}: no *.safetensors or *.bin; allowed: a directory with weights"
        )
    return found
