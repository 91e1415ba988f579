"""A decoder-only transformer out of exact parts: one forward pass for all families.

Families differ in which parts they are made of (`loading.py`), not in how these are put together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvrs.engine.kv_pool import KvStore
from kvrs.engine.layers.attention import attend
from kvrs.engine.layers.norm import layer_norm, rms_norm
from kvrs.engine.layers.rotary import RotaryTable, rotate
from kvrs.engine.layers.step import BatchStep
from kvrs.engine.layers.tiles import linear


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix `[in, out]`, possibly several of a checkpoint side by side, with their biases."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return layer_norm(rows, self.weight, self.bias, self.eps)


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class Embedding:
    tokens: Tensor  # [vocab, embedding]
    projection: Projection | None  # To the hidden size, where embeddings are narrower.
    positions: Tensor | None  # [positions, hidden], where positions are learned.

    def __call__(self, step: BatchStep) -> Tensor:
        rows = self.tokens.index_select(0, step.token_ids)
        if self.projection is not None:
            rows = self.projection(rows)
        return (
            rows
            if self.positions is None
            else rows + self.positions.index_select(0, step.positions)
        )


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: Projection
    output: Projection
    head_norm: RmsNorm | None  # Of queries and keys, weights `[heads + kv_heads, head_dim]`.
    heads: int
    kv_heads: int
    head_dim: int

    def __call__(
        self,
        rows: Tensor,
        layer: int,
        tables: tuple[Tensor, Tensor] | None,
        step: BatchStep,
        pool: KvStore,
    ) -> Tensor:
        turned = self.heads + self.kv_heads
        by_head = self.qkv(rows).view(rows.shape[0], turned + self.kv_heads, self.head_dim)
        queries_and_keys, values = by_head[:, :turned], by_head[:, turned:]
        if self.head_norm is not None:
            queries_and_keys = self.head_norm(queries_and_keys)
        if tables is not None:
            queries_and_keys = rotate(queries_and_keys, tables)
        queries, keys = queries_and_keys[:, : self.heads], queries_and_keys[:, self.heads :]
        pool.write(layer, step.pages, step.slots, keys[: step.real_rows], values[: step.real_rows])
        return self.output(attend(queries, pool, layer, step))


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: Projection
    down: Projection

    def __call__(self, rows: Tensor) -> Tensor:
        # The gate is a slice of every row, so silu runs row by row: where its SIMD vectors end
        # depends on the column alone.
        gate, up = self.gate_up(rows).chunk(2, 1)
        return self.down(silu(gate) * up)


@dataclass(frozen=True, slots=True)
class ReluMlp:
    up: Projection
    down: Projection

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(rows)))


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMlp | ReluMlp


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights in memory and the forward pass over one batch."""

    embedding: Embedding
    rotary: RotaryTable | None
    layers: Sequence[Layer]
    norm_first: bool
    final_norm: Norm | None
    projection: Projection | None  # Back to the width of the embeddings, where they are narrower.
    head: Projection

    def forward(self, step: BatchStep, pool: KvStore) -> Tensor:
        """Write the batch's KV into the pool; return logits `[step.logits, vocab]`."""
        pool.begin(step.begun_pages)
        hidden = self.embedding(step)
        tables = None if self.rotary is None else self.rotary.at(step.positions)
        for index, layer in enumerate(self.layers):
            attention = partial(layer.attention, layer=index, tables=tables, step=step, pool=pool)
            hidden = self._add(hidden, layer.attention_norm, attention)
            hidden = self._add(hidden, layer.mlp_norm, layer.mlp)
        last = hidden.index_select(0, step.logit_rows)
        if self.final_norm is not None:
            last = self.final_norm(last)
        if self.projection is not None:
            last = self.projection(last)
        return self.head(last)[: step.logits]

    def _add(self, hidden: Tensor, norm: Norm, block: Callable[[Tensor], Tensor]) -> Tensor:
        return hidden + block(norm(hidden)) if self.norm_first else norm(hidden + block(hidden))
