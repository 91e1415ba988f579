"""The Llama family."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvrs.engine.kv_pool import KvPool
from kvrs.engine.layers.attention import attend
from kvrs.engine.layers.norm import rms_norm
from kvrs.engine.layers.rotary import RotaryTable, inverse_frequencies, rotate
from kvrs.engine.layers.step import Step
from kvrs.engine.layers.tiles import check_tile_products, linear
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.models.weights import Weights


@dataclass(frozen=True, slots=True)
class _Projection:
    """One matrix `[in, out]`, possibly several of a checkpoint side by side, with their biases."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: _Projection
    output: _Projection
    mlp_norm: Tensor
    gate_up: _Projection
    down: _Projection


class LlamaModel:
    """Weights in memory and the forward pass over one batch."""

    def __init__(self, config: ModelConfig, weights: Weights, positions: int, device: torch.device) -> None:
        """Load the weights.

        Raises:
            ConfigError: a tensor is missing or has another shape than config.json says.
            KvrsError: this machine's matrix library cannot compute exactly.
        """
        self._config = config
        loader = _Loader(config, weights, device)
        self._embeddings = loader.tensor("model.embed_tokens.weight", config.vocab, config.hidden)
        self._layers = [loader.layer(index) for index in range(config.layers)]
        self._norm = loader.tensor("model.norm.weight", config.hidden)
        if config.tied_embeddings:
            self._head = _Projection(self._embeddings.t(), None)
        else:
            self._head = loader.projection(["lm_head"], config.hidden, [config.vocab], bias=False)
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._rotary = RotaryTable(frequencies, positions, device)
        first = self._layers[0]
        for projection in (first.qkv, first.output, first.gate_up, first.down, self._head):
            check_tile_products(projection.weight)

    def forward(self, step: Step, pool: KvPool) -> Tensor:
        """Write the batch's KV into the pool; return logits `[step.logits, vocab]`."""
        pool.begin(step.begun_pages)
        hidden = self._embeddings.index_select(0, step.token_ids)
        tables = self._rotary.at(step.positions)
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(index, layer, hidden, tables, step, pool)
            hidden = hidden + self._mlp(layer, hidden)
        last = rms_norm(hidden.index_select(0, step.logit_rows), self._norm, self._config.rms_norm_eps)
        return self._head(last)[: step.logits]

    def _attention(
        self, index: int, layer: _Layer, hidden: Tensor, tables: tuple[Tensor, Tensor], step: Step, pool: KvPool
    ) -> Tensor:
        config = self._config
        rotated = config.heads + config.kv_heads
        qkv = layer.qkv(rms_norm(hidden, layer.input_norm, config.rms_norm_eps))
        heads = qkv.view(qkv.shape[0], rotated + config.kv_heads, config.head_dim)
        turned = rotate(heads[:, :rotated], tables)
        real = step.real_rows
        pool.write(index, step.pages, step.slots, turned[:real, config.heads :], heads[:real, rotated:])
        return layer.output(attend(turned[:, : config.heads], pool, index, step))

    def _mlp(self, layer: _Layer, hidden: Tensor) -> Tensor:
        both = layer.gate_up(rms_norm(hidden, layer.mlp_norm, self._config.rms_norm_eps))
        # The gate is a slice of every row, so silu runs row by row: where its SIMD vectors end depends on the column alone.
        gate, up = both[:, : self._config.intermediate], both[:, self._config.intermediate :]
        return layer.down(silu(gate) * up)


class _Loader:
    """Turns a checkpoint's names into this module's shapes."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        self._config = config
        self._weights = weights
        self._device = device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(self._device)

    def projection(self, names: list[str], inner: int, outer: list[int], *, bias: bool) -> _Projection:
        """The matrices `names` beside each other: one product instead of several, of the same fixed shape every time."""
        matrices = [self.tensor(f"{name}.weight", size, inner) for name, size in zip(names, outer, strict=True)]
        biases = [self.tensor(f"{name}.bias", size) for name, size in zip(names, outer, strict=True)] if bias else []
        return _Projection(torch.cat(matrices).t(), torch.cat(biases) if bias else None)

    def layer(self, index: int) -> _Layer:
        config = self._config
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return _Layer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", config.hidden),
            qkv=self.projection(
                [f"{attention}.{name}_proj" for name in "qkv"],
                config.hidden,
                [queries, keys, keys],
                bias=config.attention_bias,
            ),
            output=self.projection([f"{attention}.o_proj"], queries, [config.hidden], bias=config.attention_bias),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden),
            gate_up=self.projection(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                config.hidden,
                [config.intermediate, config.intermediate],
                bias=config.mlp_bias,
            ),
            down=self.projection([f"{mlp}.down_proj"], config.intermediate, [config.hidden], bias=config.mlp_bias),
        )
