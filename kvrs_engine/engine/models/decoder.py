"""A decoder-only transformer of exact parts, with one forward pass for all model families.

Families differ in their parts (`loading.py`), not in the structure. A decoder may be one rank's
share of a model: some layers, and some units of each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvrs_engine.elastic.units import UnitKind
from kvrs_engine.engine.kv_pool import KvStore
from kvrs_engine.engine.layers.attention import attend
from kvrs_engine.engine.layers.exchange import ALONE, SumExchange
from kvrs_engine.engine.layers.experts import Experts
from kvrs_engine.engine.layers.norm import layer_norm, rms_norm
from kvrs_engine.engine.layers.rotary import RotaryTable, rotate
from kvrs_engine.engine.layers.step import BatchStep
from kvrs_engine.engine.layers.units import CANONICAL, ColumnUnits, Form, Mlp, RowUnits


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return layer_norm(rows, self.weight, self.bias, self.eps)


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class Embedding:
    tokens: Tensor  # [vocab, hidden]
    positions: Tensor | None  # [positions, hidden]; None: positions are not learned.

    def __call__(self, step: BatchStep) -> Tensor:
        rows = self.tokens.index_select(0, step.token_ids)
        return (
            rows
            if self.positions is None
            else rows + self.positions.index_select(0, step.positions)
        )


@dataclass(frozen=True, slots=True)
class Forms:
    """The form in which this machine computes each kind of block."""

    qkv: Form = CANONICAL
    output: Form = CANONICAL
    mlp: Form = CANONICAL
    experts: Form = CANONICAL
    head: Form = CANONICAL


@dataclass(frozen=True, slots=True)
class Pass:
    """The arguments of one forward pass, shared by all layers."""

    step: BatchStep
    tables: tuple[Tensor, Tensor] | None  # Rotary tables.
    pool: KvStore
    forms: Forms
    exchange: SumExchange


@dataclass(frozen=True, slots=True)
class Attention:
    # Columns of each unit: its query heads, then its key, then its value.
    qkv: ColumnUnits
    output: RowUnits
    head_norm: RmsNorm | None  # Over a unit's queries and its key, weights `[heads + 1, head_dim]`.
    head_dim: int

    def sums(self, rows: Tensor, layer: int, batch: Pass) -> list[Tensor]:
        """Write the units' KV into the pool; return the sums of their results, as `RowUnits`
        does.
        """
        if not self.qkv.weights:
            return []
        step, pool = batch.step, batch.pool
        by_unit = self.qkv.side_by_side(rows, batch.forms.qkv)
        heads = by_unit.view(*by_unit.shape[:2], -1, self.head_dim)
        queries, keys, values = self.split(heads, batch.tables)
        pool.write(layer, step.pages, step.slots, keys[: step.real_rows], values[: step.real_rows])
        return self.output.sums(attend(queries, pool, layer, step), batch.forms.output)

    def split(
        self, heads: Tensor, tables: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split `[rows, units, heads per unit, head_dim]` into queries `[rows, units, heads,
        head_dim]`, keys and values `[rows, units, head_dim]`; normalise and rotate the first two.
        """
        queries_and_keys, values = heads[:, :, :-1], heads[:, :, -1]
        if self.head_norm is not None:
            queries_and_keys = self.head_norm(queries_and_keys)
        if tables is not None:
            queries_and_keys = rotate(queries_and_keys, tables)
        return queries_and_keys[:, :, :-1], queries_and_keys[:, :, -1], values


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    experts: Experts | None = None  # None: a dense layer, whose units take all rows.

    def attend(self, rows: Tensor, layer: int, batch: Pass) -> Tensor:
        total = batch.exchange.total(
            self.attention.sums(rows, layer, batch), UnitKind.ATTENTION, layer
        )
        return self.attention.output.biased(total)

    def feed(self, rows: Tensor, layer: int, batch: Pass) -> Tensor:
        forms, exchange = batch.forms, batch.exchange
        if self.experts is not None:
            real_rows = batch.step.real_rows
            return self.experts.total(self.mlp, rows, real_rows, layer, forms.experts, exchange)
        sums = self.mlp.sums(rows, forms.mlp) if self.mlp.down.weights else []
        return self.mlp.down.biased(exchange.total(sums, UnitKind.MLP, layer))


@dataclass(frozen=True, slots=True)
class Decoder:
    """The weights in memory and the forward pass over one batch."""

    embedding: Embedding | None  # None: other ranks have the first layers.
    rotary: RotaryTable | None
    first_layer: int
    layers: Sequence[Layer]
    final_norm: Norm | None  # None: other ranks have the last layers.
    head: ColumnUnits | None  # None: other ranks have the last layers.
    forms: Forms

    def forward(self, step: BatchStep, pool: KvStore) -> Tensor:
        """Write the batch's KV into the pool; return logits `[step.logits, vocab]`."""
        assert self.embedding is not None, "only a whole model computes alone"
        hidden = self.through(self.embedding(step), step, pool, ALONE)
        return self.logits(hidden, step)

    def through(
        self, hidden: Tensor, step: BatchStep, pool: KvStore, exchange: SumExchange
    ) -> Tensor:
        """Pass rows through these layers and write their KV into the pool."""
        pool.begin(step.begun_pages)
        batch = self.passing(step, pool, exchange)
        for index, layer in enumerate(self.layers, self.first_layer):
            hidden = hidden + layer.attend(layer.attention_norm(hidden), index, batch)
            hidden = hidden + layer.feed(layer.mlp_norm(hidden), index, batch)
        return hidden

    def passing(self, step: BatchStep, pool: KvStore, exchange: SumExchange) -> Pass:
        tables = None if self.rotary is None else self.rotary.at(step.positions)
        return Pass(step, tables, pool, self.forms, exchange)

    def logits(self, hidden: Tensor, step: BatchStep) -> Tensor:
        """Return the logits of the LM head's units, `[step.logits, their columns]`."""
        assert self.head is not None, "this rank has units of the head"
        last = self.last(hidden.index_select(0, step.logit_rows))
        return self.head.joined(last, self.forms.head)[: step.logits]

    def last(self, hidden: Tensor) -> Tensor:
        """Return the input of the LM head's units."""
        assert self.final_norm is not None, "this rank has units of the head"
        return self.final_norm(hidden)
