"""The hash of a model's weights: the root of a tree over its units, computed once and saved in a
file beside the weights.

The hash covers the values that the model computes with: it does not depend on the number of files,
nor on the type in which the weights were saved. A unit has its own hash, so that a process which
receives a unit can check it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from kvrs_engine.elastic import grain
from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.units import Unit, UnitKind
from kvrs_engine.engine.layers.units import ColumnUnits, RowUnits
from kvrs_engine.engine.models.decoder import Decoder, Norm, RmsNorm

_DIGEST_BYTES = 32
_TREE = 3  # Version of the tree.
# Contexts of BLAKE3, chosen for speed: a unit is hashed whenever it is read or copied.
_UNIT, _NODE = "kvrs weights unit", "kvrs weights node"
NOTE_NAME = ".kvrs-weights.json"


def weights_digest(decoder: Decoder, directory: Path, files: Sequence[Path]) -> bytes:
    """Return the root of a decoder that was loaded from `files` of a model's directory.

    The root is saved in the directory, if writable, and computed again after any change of the
    files.
    """
    note = Note(directory, files)
    if (remembered := note.read()) is not None:
        return remembered
    root = units_root(decoder)
    note.write(root)
    return root


def units_root(decoder: Decoder) -> bytes:
    """Compute the root from the weights of a whole model in memory."""
    return root_of(leaves(decoder, None), len(decoder.layers))


def root_of(found: Mapping[str, bytes], layers: int) -> bytes:
    """Compute the root from the leaves of one process or of several."""

    def below(name: str) -> list[bytes]:
        count = sum(each.startswith(f"{name} ") for each in found)
        return [found[f"{name} {place}"] for place in range(count)]

    members = [
        _node([found[f"layer {at}"], *below(f"attention {at}"), *below(f"mlp {at}")])
        for at in range(layers)
    ]
    return _node([found["embedding"], *members, found["end"], _node(below("vocabulary"))])


def leaves(decoder: Decoder, share: Share | None) -> dict[str, bytes]:
    """Return the hashes of a decoder's units and of its other weights, by name. `share` is the
    decoder's share; None: the whole model.
    """
    embedding, found = decoder.embedding, {}
    if embedding is not None:
        # The second place was used by models that are no longer served.
        found["embedding"] = _leaf(embedding.tokens, None, embedding.positions)
    if decoder.head is not None:
        found["end"] = _leaf(*_of_norm(decoder.final_norm), None)
        rows = _of_columns(decoder.head)
        places = range(len(rows)) if share is None else share.vocabulary
        found |= {f"vocabulary {at}": leaf for at, leaf in zip(places, rows, strict=True)}
    for number, layer in enumerate(decoder.layers):
        at, attention, mlp = decoder.first_layer + number, layer.attention, layer.mlp
        found[f"layer {at}"] = _leaf(
            *_of_norm(layer.attention_norm),
            *_of_norm(attention.head_norm),
            attention.output.bias,
            *_of_norm(layer.mlp_norm),
            mlp.down.bias,
            *(() if layer.experts is None else (layer.experts.router.weight.t(),)),
        )
        heads = _pairs(attention.qkv, attention.output)
        own: Sequence[int] = range(len(heads)) if share is None else share.heads[number]
        found |= {f"attention {at} {of}": node for of, node in zip(own, heads, strict=True)}
        tiles = _pairs(mlp.up, mlp.down)
        own = range(len(tiles)) if share is None else share.tiles[number]
        found |= {f"mlp {at} {of}": node for of, node in zip(own, tiles, strict=True)}
    return found


def unit_name(unit: Unit) -> str:
    """Return the name of a unit, as in `leaves`."""
    at = "" if unit.kind is UnitKind.VOCABULARY else f"{unit.layer} "
    return f"{unit.kind.name.lower()} {at}{unit.place}"


def unit_leaf(columns: Tensor, bias: Tensor | None, rows: Tensor | None) -> bytes:
    """Return the hash of one unit; matrices are in the orientation of checkpoints."""
    if rows is None:
        return _leaf(columns, bias)
    return _node([_leaf(columns, bias), _leaf(rows)])


def _pairs(columns: ColumnUnits, rows: RowUnits) -> list[bytes]:
    """Return the hash of each unit's two matrices."""
    return [_node(pair) for pair in zip(_of_columns(columns), _of_rows(rows), strict=True)]


def _of_columns(units: ColumnUnits) -> list[bytes]:
    biases = units.biases or (None,) * len(units.weights)
    return [_leaf(weight.t(), bias) for weight, bias in zip(units.weights, biases, strict=True)]


def _of_rows(units: RowUnits) -> list[bytes]:
    return [_leaf(weight.t()) for weight in units.weights]


def _of_norm(norm: Norm | None) -> tuple[Tensor | None, ...]:
    if norm is None:
        return (None,)
    return (norm.weight,) if isinstance(norm, RmsNorm) else (norm.weight, norm.bias)


def _leaf(*tensors: Tensor | None) -> bytes:
    total = blake3(derive_key_context=_UNIT)
    for tensor in tensors:
        # The shapes make the bytes of different lists of tensors different.
        total.update(f"{None if tensor is None else list(tensor.shape)};".encode())
        if tensor is not None:
            total.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    return total.digest()


def _node(children: Sequence[bytes]) -> bytes:
    return blake3(b"".join(children), derive_key_context=_NODE).digest()


class Note:
    """The file in a model's directory that saves the root, valid for one state of the weight
    files.
    """

    def __init__(self, directory: Path, files: Sequence[Path]) -> None:
        self._path = directory / NOTE_NAME
        self._files = [directory / "config.json", *files]
        self._state = file_states(self._files)

    def read(self) -> bytes | None:
        """Return the saved root; None: no root is saved for these files and this tree."""
        try:
            remembered = json.loads(self._path.read_bytes())
            if any(remembered[key] != value for key, value in self._facts().items()):
                return None
            root = bytes.fromhex(remembered["root"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return root if len(root) == _DIGEST_BYTES else None

    def write(self, root: bytes) -> None:
        """Save the root atomically, unless a file has changed meanwhile or the directory is not
        writable.
        """
        if file_states(self._files) != self._state:
            return
        write_whole(self._path, json.dumps(self._facts() | {"root": root.hex()}).encode())

    def _facts(self) -> dict[str, object]:
        return {"grain": grain.VERSION, "tree": _TREE, "files": self._state}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, if its directory is writable."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()


def file_states(files: Sequence[Path]) -> list[list[str | int]]:
    """Return the name, size, times, device and inode of each file, to detect changes without
    reading.
    """
    found: list[list[str | int]] = []
    for path in sorted(set(files)):
        about = path.stat()
        times = (about.st_mtime_ns, about.st_ctime_ns)
        found.append([path.name, about.st_size, *times, about.st_dev, about.st_ino])
    return found
