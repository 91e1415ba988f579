"""All weights of a model in one contiguous memory, which processes share.

After a header come the tensors in the order of the decoder: per layer and kind, all units one after
the other, in the orientation that products use. The header has the root hash of the weights and a
digest of every tensor.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from kvrs_engine.engine.layers.experts import Experts
from kvrs_engine.engine.layers.units import ColumnUnits, RowUnits
from kvrs_engine.engine.models.decoder import (
    Attention,
    Decoder,
    Embedding,
    Layer,
    LayerNorm,
    Norm,
    RmsNorm,
)

_ALIGN_BYTES = 4096
_MAGIC = b"KVRSWGT1"
_ROOT_BYTES = 32
_LEAF_BYTES = 32
_HEADER = struct.Struct(f"<8sQ{_ROOT_BYTES}s")  # magic, tensors, root
_SEAL = struct.Struct("<Q")

Move = Callable[[Tensor], Tensor]


class Arena:
    """The layout of a model's tensors in an arena."""

    def __init__(self, skeleton: Decoder) -> None:
        """`skeleton` is the decoder with shapes and no weights."""
        self._skeleton = skeleton
        self._shapes: list[tuple[int, ...]] = []

        def note(tensor: Tensor) -> Tensor:
            self._shapes.append(tuple(tensor.shape))
            return tensor

        _moved(skeleton, note)
        head_bytes = _HEADER.size + len(self._shapes) * _LEAF_BYTES + _SEAL.size
        at = _aligned(head_bytes)
        self._starts = []
        for shape in self._shapes:
            self._starts.append(at)
            at += _aligned(torch.Size(shape).numel() * 4)
        self.size_bytes = at

    def write(self, memory: Tensor, decoder: Decoder, root: bytes) -> None:
        """Copy the weights of a decoder with these shapes, and the header, to `memory`."""
        leaves: list[bytes] = []

        def copy(tensor: Tensor) -> Tensor:
            place = self._view(memory, len(leaves))
            assert place.shape == tensor.shape
            place.copy_(tensor)
            leaves.append(_digest(place))
            return place

        _moved(decoder, copy)
        facts = _HEADER.pack(_MAGIC, len(leaves), root) + b"".join(leaves)
        head = facts + _SEAL.pack(xxh3_64_intdigest(facts))
        memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)

    def root(self, memory: Tensor) -> bytes | None:
        """Return the root hash of the weights in an arena; None: the header does not match."""
        facts = self._facts(memory)
        if facts is None:
            return None
        magic, tensors, root = _HEADER.unpack_from(facts)
        known = (magic, tensors) == (_MAGIC, len(self._shapes))
        return bytes(root) if known else None

    def is_whole(self, memory: Tensor) -> bool:
        """Return whether every tensor has its digest in the header; reads all tensors."""
        facts = self._facts(memory)
        leaves = b"".join(_digest(self._view(memory, at)) for at in range(len(self._shapes)))
        return facts is not None and facts[_HEADER.size :] == leaves

    def decoder(self, memory: Tensor) -> Decoder:
        """Return the decoder with the weights in `memory`, in canonical forms and without rotary
        tables.
        """
        tensors = iter(range(len(self._shapes)))
        return _moved(self._skeleton, lambda _: self._view(memory, next(tensors)))

    def _view(self, memory: Tensor, index: int) -> Tensor:
        start, shape = self._starts[index], self._shapes[index]
        size = torch.Size(shape).numel() * 4
        return memory[start : start + size].view(torch.float32).view(shape)

    def _facts(self, memory: Tensor) -> bytes | None:
        size = _HEADER.size + len(self._shapes) * _LEAF_BYTES
        head = memory[: size + _SEAL.size].numpy().tobytes()
        is_whole = head[size:] == _SEAL.pack(xxh3_64_intdigest(head[:size]))
        return head[:size] if is_whole else None


def _moved(decoder: Decoder, move: Move) -> Decoder:
    """Return the whole decoder with every weight tensor replaced, always in the same order."""
    assert decoder.embedding is not None
    assert decoder.head is not None
    tokens = move(decoder.embedding.tokens)
    positions = decoder.embedding.positions
    embedding = Embedding(tokens, None if positions is None else move(positions))
    layers = [_moved_layer(layer, move) for layer in decoder.layers]
    final_norm = None if decoder.final_norm is None else _moved_norm(decoder.final_norm, move)
    head = (
        _columns(decoder.head, tokens, move)
        if _same_memory(decoder.embedding.tokens, decoder.head.matrix)
        else _moved_columns(decoder.head, move)
    )
    return replace(decoder, embedding=embedding, layers=layers, final_norm=final_norm, head=head)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _moved_layer(layer: Layer, move: Move) -> Layer:
    attention = layer.attention
    head_norm = attention.head_norm
    return Layer(
        _moved_norm(layer.attention_norm, move),
        Attention(
            _moved_columns(attention.qkv, move),
            _moved_rows(attention.output, move),
            None if head_norm is None else RmsNorm(move(head_norm.weight), head_norm.eps),
            attention.head_dim,
        ),
        _moved_norm(layer.mlp_norm, move),
        replace(
            layer.mlp,
            up=_moved_columns(layer.mlp.up, move),
            down=_moved_rows(layer.mlp.down, move),
        ),
        None if layer.experts is None else _moved_experts(layer.experts, move),
    )


def _moved_experts(experts: Experts, move: Move) -> Experts:
    weight = move(experts.router.weight.t()).t()
    return replace(experts, router=replace(experts.router, weight=weight))


def _moved_norm(norm: Norm, move: Move) -> Norm:
    if isinstance(norm, RmsNorm):
        return RmsNorm(move(norm.weight), norm.eps)
    return LayerNorm(move(norm.weight), move(norm.bias), norm.eps)


def _moved_columns(units: ColumnUnits, move: Move) -> ColumnUnits:
    return _columns(units, move(units.matrix.t()), move)


def _columns(units: ColumnUnits, matrix: Tensor, move: Move) -> ColumnUnits:
    widths = [weight.shape[1] for weight in units.weights]
    return ColumnUnits.of(matrix, widths, None if units.bias is None else move(units.bias))


def _moved_rows(units: RowUnits, move: Move) -> RowUnits:
    bias = None if units.bias is None else move(units.bias)
    if units.stacked is None:
        weights: Sequence[Tensor] = [move(weight.t()).t() for weight in units.weights]
        return RowUnits(tuple(weights), None, bias, units.order)
    stacked = move(units.stacked.transpose(1, 2)).transpose(1, 2)
    return RowUnits(stacked.unbind(), stacked, bias, units.order)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(
        tensor.contiguous().view(torch.uint8).numpy().data, digest_size=_LEAF_BYTES
    ).digest()
