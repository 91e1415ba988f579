"""A decoder of the shape of a real model, with random weights, over the pages of a `KvPool`.

It has the products, the attention and the memory traffic of such a model, which is all that is
timed. It is not the engine's model: that one computes exactly, in float32, and is far slower on
purpose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from kvrs.engine.kv_pool import KvPool
from kvrs.protocol.geometry import KvGeometry

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    @property
    def geometry(self) -> KvGeometry:
        """In bfloat16."""
        return KvGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=2,
            page_size_tokens=PAGE_TOKENS,
        )


SHAPES = {
    "8b": Shape(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256
    ),  # Llama 3.1 8B.
    "14b": Shape(
        layers=40, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=17408, vocab=151936
    ),  # Qwen3 14B.
    "toy": Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256),
}


class RandomModel:
    def __init__(self, shape: Shape, pool: KvPool) -> None:
        self.shape = shape
        self.pool = pool
        self.device = pool.tensor.device
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self._embedding = self._random(shape.vocab, shape.hidden)
        self._layers = [
            (
                self._random(shape.hidden, width),
                self._random(shape.heads * shape.head_dim, shape.hidden),
                self._random(shape.hidden, 2 * shape.ffn),
                self._random(shape.ffn, shape.hidden),
            )
            for _ in range(shape.layers)
        ]
        self._head = self._random(shape.hidden, shape.vocab)
        self._frequencies = 1e6 ** -(
            torch.arange(0, shape.head_dim, 2, device=self.device) / shape.head_dim
        )

    def _random(self, rows: int, columns: int) -> Tensor:
        weights = torch.randn(rows, columns, dtype=torch.bfloat16, device=self.device)
        return weights.mul_(rows**-0.5)

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, first: int, pages: Tensor) -> None:
        """KV of positions `[first, first + len(token_ids))` of one sequence. `pages`: all of its
        pages.
        """
        count, end = len(token_ids), first + len(token_ids)
        positions = torch.arange(first, end, device=self.device)
        group = self.shape.heads // self.shape.kv_heads
        rows = self._embedding[token_ids]
        for layer, weights in enumerate(self._layers):
            queries = self._project(
                rows, layer, weights[0], positions, pages[positions // PAGE_TOKENS]
            )
            keys, values = (
                kv.repeat_interleave(group, 1) for kv in self._kv(layer, pages[None], end)
            )
            # The last row sees everything, each row before it one position less.
            mixed = scaled_dot_product_attention(
                queries.transpose(0, 1)[None],
                keys,
                values,
                attn_mask=causal_lower_right(count, end),
            )
            rows = self._rest(rows, mixed[0].transpose(0, 1).reshape(count, -1), weights)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, position: int, pages: Tensor) -> Tensor:
        """The next token of each sequence; all of them are equally long. `pages`: `[sequences,
        pages of each]`.
        """
        count = len(token_ids)
        positions = torch.full((count,), position, device=self.device)
        rows = self._embedding[token_ids]
        for layer, weights in enumerate(self._layers):
            queries = self._project(
                rows, layer, weights[0], positions, pages[:, position // PAGE_TOKENS]
            )
            keys, values = self._kv(layer, pages, position + 1)
            # The heads that share keys stand where other queries would.
            shared = queries.view(count, self.shape.kv_heads, -1, self.shape.head_dim)
            rows = self._rest(
                rows, scaled_dot_product_attention(shared, keys, values).reshape(count, -1), weights
            )
        chosen: Tensor = (rms_norm(rows, rows.shape[-1:]) @ self._head).argmax(-1)
        return chosen

    def _project(
        self, rows: Tensor, layer: int, weight: Tensor, positions: Tensor, pages: Tensor
    ) -> Tensor:
        """Queries `[rows, heads, head_dim]`; keys and values go into the pool."""
        shape = self.shape
        split = (rms_norm(rows, rows.shape[-1:]) @ weight).view(len(rows), -1, shape.head_dim)
        turned = self._rotate(split[:, : shape.heads + shape.kv_heads], positions)
        self.pool.write(
            layer,
            pages,
            positions % PAGE_TOKENS,
            turned[:, shape.heads :],
            split[:, shape.heads + shape.kv_heads :],
        )
        return turned[:, : shape.heads]

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, None] * self._frequencies
        low, high = heads.chunk(2, -1)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)

    def _kv(self, layer: int, pages: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[sequences, kv_heads, end, head_dim]` of the leading pages of
        `[sequences, pages]`.
        """
        shape, used = self.shape, -(-end // PAGE_TOKENS)
        gathered = self.pool.tensor[pages[:, :used].reshape(-1), layer]
        by_head = gathered.view(len(pages), used, 2, shape.kv_heads, PAGE_TOKENS, shape.head_dim)
        keys, values = by_head.permute(2, 0, 3, 1, 4, 5).reshape(
            2, len(pages), shape.kv_heads, -1, shape.head_dim
        )
        return keys[:, :, :end], values[:, :, :end]

    def _rest(
        self, rows: Tensor, mixed: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> Tensor:
        rows = rows + mixed @ weights[1]
        gate, up = (rms_norm(rows, rows.shape[-1:]) @ weights[2]).chunk(2, -1)
        return rows + (silu(gate) * up) @ weights[3]
