"""Units as blocks of memory: the places of a unit's tensors in a block, the reading of a block from
a checkpoint, and the decoder that consists of blocks.

A block has the unit's rows of the first matrices, their biases, and the unit's columns of the
second matrix, in the orientation of checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.units import Unit, UnitKind
from kvrs_engine.engine.layers.units import ColumnUnits, RowUnits
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.decoder import Decoder, Layer
from kvrs_engine.engine.models.digests import unit_leaf
from kvrs_engine.engine.models.forms import TOGETHER_BYTES
from kvrs_engine.engine.models.loading import names_of
from kvrs_engine.engine.models.weights import RangeReader, Weights

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


@dataclass(frozen=True, slots=True)
class _Stored:
    """The names of a unit's tensors in checkpoints, and the unit's parts of them."""

    first: list[tuple[str, int, range]]  # First matrices: name, number of rows, own rows.
    width: int  # Width of the first matrices.
    has_bias: bool
    second: tuple[str, int, range] | None  # Name, number of columns, own columns.


class UnitBlocks:
    """The blocks of one model."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config, self._grain = config, config.grain
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
        stored = self._stored(unit)
        floats = memory[offset : offset + self._floats(unit) * _FLOAT_BYTES].view(torch.float32)
        count = sum(len(own) for _, _, own in stored.first)
        at = count * stored.width
        columns, bias, rows = floats[:at].view(count, stored.width), None, None
        if stored.has_bias:
            bias, at = floats[at : at + count], at + count
        if stored.second is not None:
            rows = floats[at:].view(self._config.hidden, len(stored.second[2]))
        return UnitBlock(columns, bias, rows)

    def read(self, unit: Unit, reader: RangeReader, into: UnitBlock) -> None:
        """Read a unit from the checkpoint.

        Raises:
            ConfigError: a tensor is missing, has another shape or type, or its file is broken.
        """
        stored, at = self._stored(unit), 0
        for name, size, own in stored.first:
            end = at + len(own)
            reader.rows(f"{name}.weight", (size, stored.width), own, into.columns[at:end])
            if into.bias is not None:
                reader.rows(f"{name}.bias", (size,), own, into.bias[at:end])
            at = end
        if stored.second is not None and into.rows is not None:
            name, size, own = stored.second
            reader.columns(f"{name}.weight", (self._config.hidden, size), own, into.rows)

    def _floats(self, unit: Unit) -> int:
        stored = self._stored(unit)
        count = sum(len(own) for _, _, own in stored.first)
        total = count * (stored.width + stored.has_bias)
        if stored.second is not None:
            total += self._config.hidden * len(stored.second[2])
        return total

    def _stored(self, unit: Unit) -> _Stored:
        config, names = self._config, self._names
        prefix = f"{names.trunk}.layers.{unit.layer}"
        match unit.kind:
            case UnitKind.ATTENTION:
                width, heads = config.head_dim, self._grain.attention[unit.place]
                queries = range(heads.start * width, heads.stop * width)
                key = range(unit.place * width, (unit.place + 1) * width)
                all_keys, all_queries = config.kv_heads * width, config.heads * width
                attention = f"{prefix}.self_attn"
                first = [(f"{attention}.q_proj", all_queries, queries)]
                first += [(f"{attention}.{one}_proj", all_keys, key) for one in "kv"]
                output = (f"{prefix}.{names.output}", all_queries, queries)
                return _Stored(first, config.hidden, config.qkv_bias, output)
            case UnitKind.MLP:
                tiles, up, down = self._grain.mlp_of(unit.layer), names.up, names.down
                if config.has_experts(unit.layer):
                    prefix = f"{prefix}.{names.experts}.{unit.place // self._grain.expert_parts}"
                    up, down = names.expert_up, names.expert_down
                tile, size = tiles[unit.place], tiles[-1].stop
                first = [(f"{prefix}.{name}", size, tile) for name in up]
                second = (f"{prefix}.{down}", size, tile)
                return _Stored(first, config.hidden, config.mlp_bias, second)
            case UnitKind.VOCABULARY:
                name = f"{names.trunk}.embed_tokens" if config.tied_embeddings else "lm_head"
                tile = self._grain.vocabulary[unit.place]
                return _Stored([(name, config.vocab, tile)], config.hidden, False, None)
            case UnitKind.COMMON | UnitKind.CELLS:
                raise AssertionError(f"{unit} has no block of weights")


def assemble(
    common: Decoder, share: Share, config: ModelConfig, block_of: Callable[[Unit], UnitBlock]
) -> Decoder:
    """Return the decoder of a share. `common` is the decoder of its layers without units, whose
    forms are kept.
    """
    layers = [_layer(layer, at, share, config, block_of) for at, layer in enumerate(common.layers)]
    head = common.head
    if head is not None and share.vocabulary:
        own = [block_of(Unit(UnitKind.VOCABULARY, 0, place)) for place in share.vocabulary]
        head = _columns(own)
    return replace(common, layers=layers, head=head)


def _layer(
    layer: Layer,
    at: int,
    share: Share,
    config: ModelConfig,
    block_of: Callable[[Unit], UnitBlock],
) -> Layer:
    number, attention, mlp = share.layers.start + at, layer.attention, layer.mlp
    if share.heads[at]:
        own = [block_of(Unit(UnitKind.ATTENTION, number, place)) for place in share.heads[at]]
        attention = replace(
            attention,
            qkv=_columns(own),
            output=_rows(own, attention.output, share.heads[at], config.kv_heads),
        )
    if share.tiles[at]:
        own = [block_of(Unit(UnitKind.MLP, number, place)) for place in share.tiles[at]]
        mlp = replace(
            mlp,
            up=_columns(own),
            down=_rows(own, mlp.down, share.tiles[at], len(config.grain.mlp_of(number))),
        )
    return replace(layer, attention=attention, mlp=mlp)


def _columns(own: Sequence[UnitBlock]) -> ColumnUnits:
    columns = [block.columns for block in own]
    biases = [block.bias for block in own if block.bias is not None]
    if sum(unit.nbytes for unit in columns) > TOGETHER_BYTES:
        return ColumnUnits.apart(columns, biases)
    ends = [0, *accumulate(len(unit) for unit in columns)]
    return ColumnUnits.of(
        torch.cat(columns),
        [range(first, last) for first, last in pairwise(ends)],
        torch.cat(biases) if biases else None,
    )


def _rows(
    own: Sequence[UnitBlock], common: RowUnits, places: Sequence[int], count: int
) -> RowUnits:
    units = [block.rows for block in own if block.rows is not None]
    apart = sum(unit.nbytes for unit in units) > TOGETHER_BYTES
    return RowUnits.of(units, common.bias, places=places, count=count, apart=apart)
