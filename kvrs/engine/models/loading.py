"""From a checkpoint's tensors to the parts of a decoder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvrs.engine.layers.rotary import RotaryTable, inverse_frequencies
from kvrs.engine.layers.tiles import check_tile_products
from kvrs.engine.layers.units import ColumnUnits, Mlp, RowUnits, gated_silu
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.models.decoder import (
    Attention,
    Decoder,
    Embedding,
    Forms,
    Layer,
    LayerNorm,
    Norm,
    Projection,
    RmsNorm,
)
from kvrs.engine.models.forms import choose_forms
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
    for projection in (decoder.embedding.projection, decoder.projection):
        if projection is not None:
            check_tile_products(projection.weight)
    return replace(decoder, forms=choose_forms(decoder.layers[0], decoder.head))


class _DecoderLoader:
    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        self._config = config
        self._weights = weights
        self._device = device
        self._grain = config.grain
        self._names = _OPT if config.family == "opt" else _LLAMA
        # Some checkpoints of OPT were saved without their head, whose weights are the embeddings'.
        short = replace(self._names, trunk=self._names.trunk.removeprefix("model."))
        if f"{short.trunk}.embed_tokens.weight" in weights:
            self._names = short

    def decoder(self, positions: int) -> Decoder:
        config, trunk = self._config, self._names.trunk
        tokens = self._tensor(f"{trunk}.embed_tokens.weight", config.vocab, config.embedding)
        narrow = config.embedding != config.hidden
        rows = (
            tokens
            if config.tied_embeddings
            else self._tensor("lm_head.weight", config.vocab, config.embedding)
        )
        into = (
            self._projection(f"{trunk}.project_in", config.embedding, config.hidden)
            if narrow
            else None
        )
        back = (
            self._projection(f"{trunk}.project_out", config.hidden, config.embedding)
            if narrow
            else None
        )
        return Decoder(
            embedding=Embedding(tokens, into, self._learned_positions()),
            rotary=self._rotary(positions),
            layers=[self._layer(f"{trunk}.layers.{index}") for index in range(config.layers)],
            norm_first=config.norm_first,
            final_norm=self._norm(f"{trunk}.{self._names.final_norm}")
            if config.final_norm
            else None,
            projection=back,
            head=ColumnUnits.of(rows, self._grain.vocabulary),
            forms=Forms(),
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
        config, width = self._config, self._config.head_dim
        queries = _scaled(self._grain.attention, width)
        keys = [range(at * width, (at + 1) * width) for at in range(config.kv_heads)]
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        return Attention(
            qkv=self._column_units(names, [queries, keys, keys], bias=config.qkv_bias),
            output=self._row_units(
                f"{prefix}.{self._names.output}", queries, bias=config.output_bias
            ),
            head_norm=self._head_norm(f"{prefix}.self_attn") if config.head_norm else None,
            head_dim=width,
        )

    def _head_norm(self, prefix: str) -> RmsNorm:
        config = self._config
        heads = len(self._grain.attention[0])
        queries = self._tensor(f"{prefix}.q_norm.weight", config.head_dim).expand(heads, -1)
        keys = self._tensor(f"{prefix}.k_norm.weight", config.head_dim).expand(1, -1)
        return RmsNorm(torch.cat((queries, keys)), config.norm_eps)

    def _mlp(self, prefix: str) -> Mlp:
        config, tiles = self._config, self._grain.mlp
        names = [f"{prefix}.{name}" for name in self._names.up]
        return Mlp(
            self._column_units(names, [tiles] * len(names), bias=config.mlp_bias),
            gated_silu if config.mlp == "gated silu" else torch.relu,
            self._row_units(f"{prefix}.{self._names.down}", tiles, bias=config.mlp_bias),
        )

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

    def _learned_positions(self) -> Tensor | None:
        config = self._config
        if config.rope is not None:
            return None
        rows = config.max_positions + _OPT_POSITIONS_OFFSET
        table = self._tensor(f"{self._names.trunk}.embed_positions.weight", rows, config.hidden)
        return table[_OPT_POSITIONS_OFFSET:]

    def _projection(self, name: str, inner: int, outer: int) -> Projection:
        return Projection(self._tensor(f"{name}.weight", outer, inner).t())

    def _column_units(
        self, names: list[str], columns: list[Sequence[range]], *, bias: bool
    ) -> ColumnUnits:
        """Of each unit its columns of all these matrices beside each other."""
        sizes = [ranges[-1].stop for ranges in columns]
        hidden = self._config.hidden
        matrices = [
            self._tensor(f"{name}.weight", size, hidden)
            for name, size in zip(names, sizes, strict=True)
        ]
        biases = [
            self._tensor(f"{name}.bias", size)
            for name, size in zip(names, sizes, strict=True)
            if bias
        ]
        widths = [sum(map(len, of)) for of in zip(*columns, strict=True)]
        bounds = pairwise(accumulate(widths, initial=0))
        return ColumnUnits.of(
            _by_unit(matrices, columns),
            [range(first, last) for first, last in bounds],
            _by_unit(biases, columns) if bias else None,
        )

    def _row_units(self, name: str, columns: Sequence[range], *, bias: bool) -> RowUnits:
        matrix = self._tensor(f"{name}.weight", self._config.hidden, columns[-1].stop)
        return RowUnits.of(
            [matrix[:, own.start : own.stop] for own in columns],
            self._tensor(f"{name}.bias", self._config.hidden) if bias else None,
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(self._device)


def _scaled(ranges: Sequence[range], factor: int) -> list[range]:
    return [range(each.start * factor, each.stop * factor) for each in ranges]


def _by_unit(tensors: Sequence[Tensor], columns: Sequence[Sequence[range]]) -> Tensor:
    """Unit after unit, its rows of all tensors, one below the other."""
    return torch.cat(
        [
            tensor[own.start : own.stop]
            for of in zip(*columns, strict=True)
            for tensor, own in zip(tensors, of, strict=True)
        ]
    )
