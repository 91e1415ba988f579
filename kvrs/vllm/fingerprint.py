"""The fingerprint of a model in vLLM: pages move only between equal ones."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kvrs.errors import KvrsError
from kvrs.protocol.geometry import KvGeometry

LAYOUT = 1  # Of vLLM's blocks in our pages; rises where it changes.
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint_of(model: str, arithmetic: Sequence[str], geometry: KvGeometry) -> str:
    """Fingerprint of a model's directory: of its files of weights the sizes, the heads, and samples
    at equal distances, since to read all would take minutes. `arithmetic`: settings by which equal
    weights give other KV.

    Raises:
        KvrsError: the directory has no weights.
    """
    directory = Path(model)
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])
    if not files:
        raise KvrsError(f"{model}: no *.safetensors or *.bin; allowed: a directory with weights")
    digest = hashlib.blake2b(digest_size=16)
    facts = [LAYOUT, [*arithmetic], [*map(repr, [geometry])], [f.name for f in files]]
    digest.update(json.dumps(facts).encode())
    config = directory / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return f"vLLM blocks {LAYOUT}, {digest.hexdigest()}"
