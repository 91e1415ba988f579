"""From a checkpoint's tensors to the parts of a decoder."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvrs.engine.layers.rotary import RotaryTable, inverse_frequencies
from kvrs.engine.layers.tiles import check_tile_products
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.models.decoder import (
    Attention,
    Decoder,
    Embedding,
    GatedMlp,
    Layer,
    LayerNorm,
    Norm,
    Projection,
    ReluMlp,
    RmsNorm,
)
from kvrs.engine.models.weights import Weights

# OPT's table of positions begins with two rows that were meant for padding.
_OPT_POSITIONS_OFFSET = 2


@dataclass(frozen=True, slots=True)
class _Names:
    """What a family calls its tensors. All but the head's begin with `trunk`."""

    trunk: str
    final_norm: str
    attention_norm: str
    output: str
    mlp_norm: str
    up: tuple[str, ...]  # The gate first, where there is one.
    down: str


_LLAMA = _Names(
    trunk="model",
    final_norm="norm",
    attention_norm="input_layernorm",
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)
_OPT = _Names(
    trunk="model.decoder",
    final_norm="final_layer_norm",
    attention_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
)


def load_decoder(
    config: ModelConfig, weights: Weights, positions: int, device: torch.device
) -> Decoder:
    """Load the weights of a model that will see at most that many positions.

    Raises:
        ConfigError: a tensor is missing or has another shape than config.json says.
        KvrsError: this machine's matrix library cannot compute exactly.
    """
    decoder = _DecoderLoader(config, weights, device).decoder(positions)
    first = decoder.layers[0]
    up = first.mlp.gate_up if isinstance(first.mlp, GatedMlp) else first.mlp.up
    used = [first.attention.qkv, first.attention.output, up, first.mlp.down, decoder.head]
    used += [
        projection
        for projection in (decoder.embedding.projection, decoder.projection)
        if projection is not None
    ]
    for projection in used:
        check_tile_products(projection.weight)
    return decoder


class _DecoderLoader:
    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        self._config = config
        self._weights = weights
        self._device = device
        self._names = _OPT if config.family == "opt" else _LLAMA
        # Some checkpoints of OPT were saved without their head, whose weights are the embeddings'.
        short = replace(self._names, trunk=self._names.trunk.removeprefix("model."))
        if f"{short.trunk}.embed_tokens.weight" in weights:
            self._names = short

    def decoder(self, positions: int) -> Decoder:
        config, trunk = self._config, self._names.trunk
        tokens = self._tensor(f"{trunk}.embed_tokens.weight", config.vocab, config.embedding)
        narrow = config.embedding != config.hidden
        if config.tied_embeddings:
            head = Projection(tokens.t(), None)
        else:
            head = self._projection(["lm_head"], config.embedding, [config.vocab], bias=False)
        into = (
            self._projection([f"{trunk}.project_in"], config.embedding, [config.hidden], bias=False)
            if narrow
            else None
        )
        back = (
            self._projection(
                [f"{trunk}.project_out"], config.hidden, [config.embedding], bias=False
            )
            if narrow
            else None
        )
        return Decoder(
            embedding=Embedding(tokens, into, self._learned_positions(positions)),
            rotary=self._rotary(positions),
            layers=[self._layer(f"{trunk}.layers.{index}") for index in range(config.layers)],
            norm_first=config.norm_first,
            final_norm=self._norm(f"{trunk}.{self._names.final_norm}")
            if config.final_norm
            else None,
            projection=back,
            head=head,
        )

    def _layer(self, prefix: str) -> Layer:
        names = self._names
        return Layer(
            attention_norm=self._norm(f"{prefix}.{names.attention_norm}"),
            attention=self._attention(prefix),
            mlp_norm=self._norm(f"{prefix}.{names.mlp_norm}"),
            mlp=self._mlp(prefix),
        )

    def _attention(self, prefix: str) -> Attention:
        config = self._config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return Attention(
            qkv=self._projection(
                [f"{prefix}.self_attn.{name}_proj" for name in "qkv"],
                config.hidden,
                [queries, keys, keys],
                bias=config.qkv_bias,
            ),
            output=self._projection(
                [f"{prefix}.{self._names.output}"],
                queries,
                [config.hidden],
                bias=config.output_bias,
            ),
            head_norm=self._head_norm(f"{prefix}.self_attn") if config.head_norm else None,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )

    def _head_norm(self, prefix: str) -> RmsNorm:
        config = self._config
        queries = self._tensor(f"{prefix}.q_norm.weight", config.head_dim).expand(config.heads, -1)
        keys = self._tensor(f"{prefix}.k_norm.weight", config.head_dim).expand(config.kv_heads, -1)
        return RmsNorm(torch.cat((queries, keys)), config.norm_eps)

    def _mlp(self, prefix: str) -> GatedMlp | ReluMlp:
        config = self._config
        names = [f"{prefix}.{name}" for name in self._names.up]
        up = self._projection(
            names, config.hidden, [config.intermediate] * len(names), bias=config.mlp_bias
        )
        down = self._projection(
            [f"{prefix}.{self._names.down}"],
            config.intermediate,
            [config.hidden],
            bias=config.mlp_bias,
        )
        return GatedMlp(up, down) if config.mlp == "gated silu" else ReluMlp(up, down)

    def _norm(self, name: str) -> Norm:
        config = self._config
        weight = self._tensor(f"{name}.weight", config.hidden) if config.norm_affine else None
        if config.norm == "layer":
            return LayerNorm(
                weight,
                self._tensor(f"{name}.bias", config.hidden) if config.norm_affine else None,
                config.norm_eps,
            )
        assert weight is not None, "a root mean square norm has weights"
        return RmsNorm(weight, config.norm_eps)

    def _rotary(self, positions: int) -> RotaryTable | None:
        rope = self._config.rope
        if rope is None:
            return None
        return RotaryTable(
            inverse_frequencies(self._config.head_dim, rope.theta, rope.scaling),
            positions,
            self._device,
        )

    def _learned_positions(self, positions: int) -> Tensor | None:
        config = self._config
        if config.rope is not None:
            return None
        rows = config.max_positions + _OPT_POSITIONS_OFFSET
        table = self._tensor(f"{self._names.trunk}.embed_positions.weight", rows, config.hidden)
        return table[_OPT_POSITIONS_OFFSET : _OPT_POSITIONS_OFFSET + positions]

    def _projection(
        self, names: list[str], inner: int, outer: list[int], *, bias: bool
    ) -> Projection:
        """The matrices `names` beside each other: one product instead of several, of the same fixed
        shape every time.
        """
        matrices = [
            self._tensor(f"{name}.weight", size, inner)
            for name, size in zip(names, outer, strict=True)
        ]
        biases = (
            [self._tensor(f"{name}.bias", size) for name, size in zip(names, outer, strict=True)]
            if bias
            else []
        )
        return Projection(torch.cat(matrices).t(), torch.cat(biases) if bias else None)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(self._device)
