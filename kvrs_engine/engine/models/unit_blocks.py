"""Units as blocks of memory: the places of a unit's tensors in a block, the reading of a block from
a checkpoint, and the decoder that consists of blocks.

A block has the unit's rows of the first matrices, their biases, and the unit's columns of the
second matrix, in the orientation of checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.units import Unit, UnitKind
from kvrs_engine.engine.layers.units import ColumnUnits, RowUnits
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.decoder import Decoder, Layer
from kvrs_engine.engine.models.digests import unit_leaf
from kvrs_engine.engine.models.forms import TOGETHER_BYTES
from kvrs_engine.engine.models.stored import names_of, stored_of
from kvrs_engine.engine.models.weights import Weights

_FLOAT_BYTES = 4
_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class UnitBlock:
    """The tensors of one unit in contiguous memory."""

    columns: Tensor  # [unit's columns, in]
    bias: Tensor | None  # [unit's columns]
    rows: Tensor | None  # [out, unit's columns of the second matrix]; None: a vocabulary unit.

    @property
    def weight_bytes(self) -> int:
        return self.columns.nbytes + (0 if self.rows is None else self.rows.nbytes)

    def hash(self) -> bytes:
        return unit_leaf(self.columns, self.bias, self.rows)

    def copy_(self, other: "UnitBlock") -> None:
        self.columns.copy_(other.columns)
        if self.bias is not None and other.bias is not None:
            self.bias.copy_(other.bias)
        if self.rows is not None and other.rows is not None:
            self.rows.copy_(other.rows)


class UnitBlocks:
    """The blocks of one model."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._names = names_of(config, weights)

    def places(self, units: Sequence[Unit]) -> tuple[dict[Unit, int], int]:
        """Return the offsets of consecutive units in one memory, and the total size in bytes."""
        found, at = {}, 0
        for unit in units:
            found[unit] = at
            at += -(-self._floats(unit) * _FLOAT_BYTES // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return found, at

    def block(self, unit: Unit, memory: Tensor, offset: int) -> UnitBlock:
        """Return the block of a unit at an offset of a byte tensor."""
        stored = stored_of(self._config, self._names, unit)
        floats = memory[offset : offset + self._floats(unit) * _FLOAT_BYTES].view(torch.float32)
        count = sum(len(own) for _, _, own in stored.first)
        at = count * stored.width
        columns, bias, rows = floats[:at].view(count, stored.width), None, None
        if stored.has_bias:
            bias, at = floats[at : at + count], at + count
        if stored.second is not None:
            rows = floats[at:].view(self._config.hidden, len(stored.second[2]))
        return UnitBlock(columns, bias, rows)

    def read(self, unit: Unit, weights: Weights, into: UnitBlock) -> None:
        """Read a unit from the checkpoint.

        Raises:
            ConfigError: a tensor is missing, has another shape or type, or its file is broken.
        """
        stored, at = stored_of(self._config, self._names, unit), 0
        for name, size, own in stored.first:
            end = at + len(own)
            weights.rows(f"{name}.weight", (size, stored.width), own, into.columns[at:end])
            if into.bias is not None:
                weights.rows(f"{name}.bias", (size,), own, into.bias[at:end])
            at = end
        if stored.second is not None and into.rows is not None:
            name, size, own = stored.second
            weights.columns(f"{name}.weight", (self._config.hidden, size), own, into.rows)

    def _floats(self, unit: Unit) -> int:
        stored = stored_of(self._config, self._names, unit)
        count = sum(len(own) for _, _, own in stored.first)
        total = count * (stored.width + stored.has_bias)
        if stored.second is not None:
            total += self._config.hidden * len(stored.second[2])
        return total


def assemble(
    common: Decoder,
    share: Share,
    config: ModelConfig,
    block_of: Callable[[Unit], UnitBlock],
    apart_bytes: float = TOGETHER_BYTES,
) -> Decoder:
    """Return the decoder of a share. `common` is the decoder of its layers without units, whose
    forms are kept. Units of more bytes together are not copied.
    """
    layers = [
        _layer(layer, at, share, config, block_of, apart_bytes)
        for at, layer in enumerate(common.layers)
    ]
    head = common.head
    if head is not None and share.vocabulary:
        own = [block_of(Unit(UnitKind.VOCABULARY, 0, place)) for place in share.vocabulary]
        head = _columns(own, apart_bytes)
    return replace(common, layers=layers, head=head)


def _layer(
    layer: Layer,
    at: int,
    share: Share,
    config: ModelConfig,
    block_of: Callable[[Unit], UnitBlock],
    apart_bytes: float,
) -> Layer:
    number, attention, mlp = share.layers.start + at, layer.attention, layer.mlp
    if share.heads[at]:
        own = [block_of(Unit(UnitKind.ATTENTION, number, place)) for place in share.heads[at]]
        attention = replace(
            attention,
            qkv=_columns(own, apart_bytes),
            output=_rows(own, attention.output, share.heads[at], config.kv_heads, apart_bytes),
        )
    if share.tiles[at]:
        own = [block_of(Unit(UnitKind.MLP, number, place)) for place in share.tiles[at]]
        mlp = replace(
            mlp,
            up=_columns(own, apart_bytes),
            down=_rows(
                own, mlp.down, share.tiles[at], len(config.grain.mlp_of(number)), apart_bytes
            ),
        )
    return replace(layer, attention=attention, mlp=mlp)


def _columns(own: Sequence[UnitBlock], apart_bytes: float) -> ColumnUnits:
    columns = [block.columns for block in own]
    biases = [block.bias for block in own if block.bias is not None]
    if sum(unit.nbytes for unit in columns) > apart_bytes:
        return ColumnUnits.apart(columns, biases)
    bias = below_each_other(biases) if biases else None
    return ColumnUnits.of(below_each_other(columns), list(map(len, columns)), bias)


def _rows(
    own: Sequence[UnitBlock],
    common: RowUnits,
    places: Sequence[int],
    count: int,
    apart_bytes: float,
) -> RowUnits:
    units = [block.rows for block in own if block.rows is not None]
    apart = sum(unit.nbytes for unit in units) > apart_bytes
    return RowUnits.of(units, common.bias, places=places, count=count, apart=apart)


def below_each_other(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if first.is_meta:  # `torch.cat` would import torch's compiler: 1 s and 100 MB.
        return first.new_empty(sum(map(len, parts)), *first.shape[1:])
    return torch.cat(list(parts))
