"""The hash of a model's weights: the root of a tree over its units, computed once and remembered
beside the weights.

It covers what a model computes with: the same weights in one file or in several, or widened before
they were saved, have the same hash. A unit's hash does not depend on the others, so a process that
gets one unit can check it.
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
_TREE = 3  # Version of what hashes are made of.
# Several times as fast as others: a unit is hashed whenever it is read or copied.
_UNIT, _NODE = "kvrs weights unit", "kvrs weights node"
NOTE_NAME = ".kvrs-weights.json"


def weights_digest(decoder: Decoder, directory: Path, files: Sequence[Path]) -> bytes:
    """The root of a decoder that was loaded from those files of a model's directory.

    It is remembered in that directory, where this can be written, for the files as they are: after
    any change of them it is computed again.
    """
    note = Note(directory, files)
    if (remembered := note.read()) is not None:
        return remembered
    root = units_root(decoder)
    note.write(root)
    return root


def units_root(decoder: Decoder) -> bytes:
    """The root, computed from the weights of a whole model in memory."""
    return root_of(leaves(decoder, None), len(decoder.layers))


def root_of(found: Mapping[str, bytes], layers: int) -> bytes:
    """The root over the hashes of all units and of what is no unit, by `leaves` of one process or
    of several.
    """

    def below(name: str) -> list[bytes]:
        count = sum(each.startswith(f"{name} ") for each in found)
        return [found[f"{name} {place}"] for place in range(count)]

    members = [
        _node([found[f"layer {at}"], *below(f"attention {at}"), *below(f"mlp {at}")])
        for at in range(layers)
    ]
    return _node([found["embedding"], *members, found["end"], _node(below("vocabulary"))])


def leaves(decoder: Decoder, share: Share | None) -> dict[str, bytes]:
    """The hash of each unit that a decoder has, and of what it has beside units, by name. Without a
    share it has all.
    """
    embedding, found = decoder.embedding, {}
    if embedding is not None:
        # In the place of the second tensor there was another one in models that are not served.
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
    """Name of a unit, as in `leaves`."""
    at = "" if unit.kind is UnitKind.VOCABULARY else f"{unit.layer} "
    return f"{unit.kind.name.lower()} {at}{unit.place}"


def unit_leaf(columns: Tensor, bias: Tensor | None, rows: Tensor | None) -> bytes:
    """The hash of one unit, of its matrices as checkpoints have them."""
    if rows is None:
        return _leaf(columns, bias)
    return _node([_leaf(columns, bias), _leaf(rows)])


def _pairs(columns: ColumnUnits, rows: RowUnits) -> list[bytes]:
    """Hash of both matrices of each unit."""
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
        # Shapes stand before the numbers, so that no two lists of tensors are the same bytes.
        total.update(f"{None if tensor is None else list(tensor.shape)};".encode())
        if tensor is not None:
            total.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    return total.digest()


def _node(children: Sequence[bytes]) -> bytes:
    return blake3(b"".join(children), derive_key_context=_NODE).digest()


class Note:
    """The note in a model's directory about its weights, for the files as they are."""

    def __init__(self, directory: Path, files: Sequence[Path]) -> None:
        self._path = directory / NOTE_NAME
        self._files = [directory / "config.json", *files]
        self._state = file_states(self._files)

    def read(self) -> bytes | None:
        """The root; None: none is noted, or of other files or another tree."""
        try:
            remembered = json.loads(self._path.read_bytes())
            if any(remembered[key] != value for key, value in self._facts().items()):
                return None
            root = bytes.fromhex(remembered["root"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return root if len(root) == _DIGEST_BYTES else None

    def write(self, root: bytes) -> None:
        """Whole or not at all; a directory that cannot be written remembers nothing."""
        # A file that changed while it was loaded has another state by now.
        if file_states(self._files) != self._state:
            return
        document = self._facts() | {"root": root.hex()}
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            scratch.write_text(json.dumps(document))
            scratch.replace(self._path)
        except OSError:
            with suppress(OSError):
                scratch.unlink()

    def _facts(self) -> dict[str, object]:
        return {"grain": grain.VERSION, "tree": _TREE, "files": self._state}


def file_states(files: Sequence[Path]) -> list[list[str | int]]:
    """Facts that tell a file from another one or from a changed one, without reading it."""
    found: list[list[str | int]] = []
    for path in sorted(set(files)):
        about = path.stat()
        times = (about.st_mtime_ns, about.st_ctime_ns)
        found.append([path.name, about.st_size, *times, about.st_dev, about.st_ino])
    return found
