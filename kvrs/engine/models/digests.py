"""The hash of a model's weights: the root of a tree over its units, computed once and remembered
beside the weights.

It covers what a model computes with: the same weights in one file or in several, or widened before
they were saved, have the same hash. A unit's hash does not depend on the others, so a process that
gets one unit can check it.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from kvrs.elastic import grain
from kvrs.engine.layers.units import ColumnUnits, RowUnits
from kvrs.engine.models.decoder import Decoder, Layer, Norm, Projection, RmsNorm

_DIGEST_BYTES = 32
NOTE_NAME = ".kvrs-weights.json"


def weights_digest(decoder: Decoder, directory: Path, files: Sequence[Path]) -> bytes:
    """The root of a decoder that was loaded from those files of a model's directory.

    It is remembered in that directory, where this can be written, for the files as they are: after
    any change of them it is computed again.
    """
    state = _state([directory / "config.json", *files])
    remembered = _read(directory / NOTE_NAME, state)
    if remembered is not None:
        return remembered
    root = units_root(decoder)
    # A file that changed while it was loaded has another state by now.
    if _state([directory / "config.json", *files]) == state:
        _write(directory / NOTE_NAME, state, root)
    return root


def units_root(decoder: Decoder) -> bytes:
    """The root, computed from the weights in memory."""
    embedding = decoder.embedding
    outside = _leaf(
        embedding.tokens,
        _matrix(embedding.projection),
        embedding.positions,
        *_of_norm(decoder.final_norm),
        _matrix(decoder.projection),
    )
    layers = [_layer(layer) for layer in decoder.layers]
    return _node([outside, *layers, _node(_of_columns(decoder.head))])


def _layer(layer: Layer) -> bytes:
    attention, mlp = layer.attention, layer.mlp
    outside = _leaf(
        *_of_norm(layer.attention_norm),
        *_of_norm(attention.head_norm),
        attention.output.bias,
        *_of_norm(layer.mlp_norm),
        mlp.down.bias,
    )
    pairs = [
        *zip(_of_columns(attention.qkv), _of_rows(attention.output), strict=True),
        *zip(_of_columns(mlp.up), _of_rows(mlp.down), strict=True),
    ]
    return _node([outside, *(_node(pair) for pair in pairs)])


def _of_columns(units: ColumnUnits) -> list[bytes]:
    biases = units.biases or (None,) * len(units.weights)
    return [_leaf(weight.t(), bias) for weight, bias in zip(units.weights, biases, strict=True)]


def _of_rows(units: RowUnits) -> list[bytes]:
    return [_leaf(weight.t()) for weight in units.weights]


def _of_norm(norm: Norm | None) -> tuple[Tensor | None, ...]:
    if norm is None:
        return (None,)
    return (norm.weight,) if isinstance(norm, RmsNorm) else (norm.weight, norm.bias)


def _matrix(projection: Projection | None) -> Tensor | None:
    return None if projection is None else projection.weight.t()


def _leaf(*tensors: Tensor | None) -> bytes:
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"kvrs-unit")
    for tensor in tensors:
        # Shapes stand before the numbers, so that no two lists of tensors are the same bytes.
        total.update(f"{None if tensor is None else list(tensor.shape)};".encode())
        if tensor is not None:
            total.update(tensor.contiguous().cpu().numpy().data)
    return total.digest()


def _node(children: Sequence[bytes]) -> bytes:
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"kvrs-units")
    total.update(b"".join(children))
    return total.digest()


def _state(files: Sequence[Path]) -> list[list[str | int]]:
    """What tells a file from another one or from a changed one, without reading it."""
    found: list[list[str | int]] = []
    for path in sorted(set(files)):
        about = path.stat()
        times = (about.st_mtime_ns, about.st_ctime_ns)
        found.append([path.name, about.st_size, *times, about.st_dev, about.st_ino])
    return found


def _read(path: Path, state: list[list[str | int]]) -> bytes | None:
    try:
        remembered = json.loads(path.read_bytes())
        if remembered["grain"] != grain.VERSION or remembered["files"] != state:
            return None
        root = bytes.fromhex(remembered["root"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return root if len(root) == _DIGEST_BYTES else None


def _write(path: Path, state: list[list[str | int]], root: bytes) -> None:
    """Whole or not at all; a directory that cannot be written remembers nothing."""
    document = {"grain": grain.VERSION, "files": state, "root": root.hex()}
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(document))
        scratch.replace(path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
