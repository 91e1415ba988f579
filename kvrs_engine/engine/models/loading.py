"""The loader turns a checkpoint's tensors into the parts of a decoder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor

from kvrs_engine.elastic.shares import Share
from kvrs_engine.engine.layers.experts import Experts, Router
from kvrs_engine.engine.layers.proofs import Proofs
from kvrs_engine.engine.layers.rotary import RotaryTable, inverse_frequencies
from kvrs_engine.engine.layers.units import ColumnUnits, Mlp, RowUnits, gated_silu
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.decoder import (
    Attention,
    Decoder,
    Embedding,
    Forms,
    Layer,
    LayerNorm,
    Norm,
    RmsNorm,
)
from kvrs_engine.engine.models.forms import choose_forms
from kvrs_engine.engine.models.weights import Weights

# OPT's position table begins with two unused rows.
_OPT_POSITIONS_OFFSET = 2


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a family's tensors. All names but the LM head's begin with `trunk`."""

    trunk: str
    final_norm: str
    attention_norm: str
    output: str
    mlp_norm: str
    up: tuple[str, ...]  # The gate first, if the MLP has one.
    down: str
    # Layers with experts: the router, the prefix of an expert's number, and an expert's matrices.
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"


_LLAMA = Names(
    trunk="model",
    final_norm="norm",
    attention_norm="input_layernorm",
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)
_MIXTRAL = replace(
    _LLAMA,
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_up=("w1", "w3"),
    expert_down="w2",
)
_OPT = Names(
    trunk="model.decoder",
    final_norm="final_layer_norm",
    attention_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
)


class NamedTensors(Protocol):
    """Tensors by name, of the shape that is asked for."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


def names_of(config: ModelConfig, weights: NamedTensors) -> Names:
    names = {"opt": _OPT, "mixtral": _MIXTRAL}.get(config.family, _LLAMA)
    # Some OPT checkpoints were saved without the LM head, and their names lack the first prefix.
    short = replace(names, trunk=names.trunk.removeprefix("model."))
    return short if f"{short.trunk}.embed_tokens.weight" in weights else names


def load_decoder(
    config: ModelConfig,
    weights: Weights,
    positions: int,
    device: torch.device,
    share: Share | None = None,
) -> Decoder:
    """Load the weights of a model, or a rank's share of them, in proven forms. `positions` is the
    limit of a sequence's length.

    Raises:
        ConfigError: a tensor is missing or has another shape than config.json says.
        KvrsError: this machine's matrix library cannot compute exactly.
    """
    return proven(read_decoder(config, weights, positions, device, share))


def read_decoder(
    config: ModelConfig,
    weights: Weights,
    positions: int,
    device: torch.device,
    share: Share | None = None,
) -> Decoder:
    """Load the weights as `load_decoder` does, but without proofs and in canonical forms."""
    share = share or Share.whole(config.grain, config.layers)
    return _DecoderLoader(config, weights, device, share).decoder(positions)


def skeleton(config: ModelConfig) -> Decoder:
    """Return a whole model with shapes and no weights, without a rotary table."""
    return decoder_of(
        config, _Shapes(), torch.device("meta"), Share.whole(config.grain, config.layers)
    )


def decoder_of(
    config: ModelConfig, weights: NamedTensors, device: torch.device, share: Share
) -> Decoder:
    """Return a share of a model with the given tensors, in canonical forms and without a rotary
    table.
    """
    return _DecoderLoader(config, weights, device, share).decoder(0)


def with_rotary(decoder: Decoder, config: ModelConfig, positions: int) -> Decoder:
    """Return the decoder with a rotary table of `positions` rows, on the CPU."""
    whole = Share.whole(config.grain, config.layers)
    loader = _DecoderLoader(config, _Shapes(), torch.device("cpu"), whole)
    return replace(decoder, rotary=loader.rotary(positions))


def proven(decoder: Decoder, proofs: Proofs | None = None) -> Decoder:
    """Return the decoder in the fastest forms that this machine computes exactly. New proofs are
    added to `proofs` (None: those of this process).

    Raises:
        KvrsError: no form is exact.
    """
    return replace(decoder, forms=choose_forms(decoder.layers, decoder.head, proofs))


class _Shapes:
    """Tensors without memory."""

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device="meta")


class _DecoderLoader:
    def __init__(
        self, config: ModelConfig, weights: NamedTensors, device: torch.device, share: Share
    ) -> None:
        self._share = share
        self._config = config
        self._weights = weights
        self._device = device
        self._grain = config.grain
        self._names = names_of(config, weights)

    def decoder(self, positions: int) -> Decoder:
        share, trunk = self._share, self._names.trunk
        embedding = None
        if share.is_first:
            embedding = Embedding(self._tokens(), self._learned_positions())
        return Decoder(
            embedding=embedding,
            rotary=self.rotary(positions) if positions else None,
            first_layer=share.layers.start,
            layers=[self._layer(index) for index in share.layers],
            final_norm=self._norm(f"{trunk}.{self._names.final_norm}") if share.is_last else None,
            head=self._head(embedding) if share.is_last else None,
            forms=Forms(),
        )

    def _tokens(self) -> Tensor:
        config = self._config
        name = f"{self._names.trunk}.embed_tokens.weight"
        return self._tensor(name, config.vocab, config.hidden)

    def _head(self, embedding: Embedding | None) -> ColumnUnits:
        """Load the LM head. A tied head that is complete shares the memory of the embeddings."""
        config, tiles = self._config, self._grain.vocabulary
        if not self._share.vocabulary:
            return ColumnUnits.of(torch.empty(0, config.hidden, device=self._device), [])
        if not config.tied_embeddings:
            rows = self._tensor("lm_head.weight", config.vocab, config.hidden)
        else:
            rows = self._tokens() if embedding is None else embedding.tokens
        own = [tiles[place] for place in self._share.vocabulary]
        if len(own) < len(tiles):
            rows = _by_unit([rows], [own])
        return ColumnUnits.of(rows, _side_by_side([own]))

    def _layer(self, index: int) -> Layer:
        names, prefix = self._names, f"{self._names.trunk}.layers.{index}"
        at, has_experts = index - self._share.layers.start, self._config.has_experts(index)
        own = self._share.tiles[at]
        return Layer(
            attention_norm=self._norm(f"{prefix}.{names.attention_norm}"),
            attention=self._attention(prefix, self._share.heads[at]),
            mlp_norm=self._norm(f"{prefix}.{names.mlp_norm}"),
            mlp=self._expert_units(prefix, own) if has_experts else self._mlp(prefix, own, index),
            experts=self._experts(prefix) if has_experts else None,
        )

    def _attention(self, prefix: str, own: Sequence[int]) -> Attention:
        config, width = self._config, self._config.head_dim
        queries = _scaled(self._grain.attention, width)
        keys = [range(at * width, (at + 1) * width) for at in range(config.kv_heads)]
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        return Attention(
            qkv=self._column_units(names, [queries, keys, keys], own, bias=config.qkv_bias),
            output=self._row_units(
                f"{prefix}.{self._names.output}", queries, own, bias=config.output_bias
            ),
            head_norm=self._head_norm(f"{prefix}.self_attn") if config.head_norm else None,
            head_dim=width,
        )

    def _head_norm(self, prefix: str) -> RmsNorm:
        config = self._config
        heads = len(self._grain.attention[0])
        queries = self._tensor(f"{prefix}.q_norm.weight", config.head_dim).expand(heads, -1)
        keys = self._tensor(f"{prefix}.k_norm.weight", config.head_dim).expand(1, -1)
        return RmsNorm(_below_each_other((queries, keys)), config.norm_eps)

    def _mlp(self, prefix: str, own: Sequence[int], index: int) -> Mlp:
        config, tiles = self._config, self._grain.mlp_of(index)
        names = [f"{prefix}.{name}" for name in self._names.up]
        return Mlp(
            self._column_units(names, [tiles] * len(names), own, bias=config.mlp_bias),
            gated_silu if config.mlp == "gated silu" else torch.relu,
            self._row_units(f"{prefix}.{self._names.down}", tiles, own, bias=config.mlp_bias),
        )

    def _experts(self, prefix: str) -> Experts:
        config = self._config.experts
        assert config is not None, "the layer has experts"
        name = f"{prefix}.{self._names.router}.weight"
        weight = self._tensor(name, config.count, self._config.hidden).t()
        return Experts(Router(weight, config.chosen, config.renormalise), self._grain.expert_parts)

    def _expert_units(self, prefix: str, own: Sequence[int]) -> Mlp:
        """Load the units of experts; each expert has its own tensors."""
        hidden, names, parts = self._config.hidden, self._names, self._grain.expert_parts
        tiles = self._grain.mlp
        columns, rows = [torch.empty(0, hidden, device=self._device)], []
        for expert, places in groupby(own, lambda place: place // parts):
            mine = [tiles[place] for place in places]
            inner, at = tiles[-1].stop, f"{prefix}.{names.experts}.{expert}"
            up = [self._tensor(f"{at}.{name}.weight", inner, hidden) for name in names.expert_up]
            columns.append(_by_unit(up, [mine] * len(up)))
            down = self._tensor(f"{at}.{names.expert_down}.weight", hidden, inner)
            rows += [down[:, tile.start : tile.stop] for tile in mine]
        widths = [[tiles[place] for place in own]] * len(names.expert_up)
        return Mlp(
            ColumnUnits.of(_below_each_other(columns), _side_by_side(widths)),
            gated_silu,
            RowUnits.of(rows, None, places=own, count=len(tiles)),
        )

    def _norm(self, name: str) -> Norm:
        config = self._config
        weight = self._tensor(f"{name}.weight", config.hidden)
        if config.norm == "layer":
            bias = self._tensor(f"{name}.bias", config.hidden)
            return LayerNorm(weight, bias, config.norm_eps)
        return RmsNorm(weight, config.norm_eps)

    def rotary(self, positions: int) -> RotaryTable | None:
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

    def _column_units(
        self,
        names: list[str],
        columns: list[Sequence[range]],
        own: Sequence[int],
        *,
        bias: bool,
    ) -> ColumnUnits:
        """Load the own units; a unit has columns of each matrix, side by side. `columns` has the
        columns of all units, by matrix.
        """
        sizes = [ranges[-1].stop for ranges in columns]
        hidden = self._config.hidden
        if not own:
            return ColumnUnits.of(torch.empty(0, hidden, device=self._device), [])
        matrices = [
            self._tensor(f"{name}.weight", size, hidden)
            for name, size in zip(names, sizes, strict=True)
        ]
        biases = [
            self._tensor(f"{name}.bias", size)
            for name, size in zip(names, sizes, strict=True)
            if bias
        ]
        mine = [[ranges[place] for place in own] for ranges in columns]
        return ColumnUnits.of(
            _by_unit(matrices, mine),
            _side_by_side(mine),
            _by_unit(biases, mine) if bias else None,
        )

    def _row_units(
        self, name: str, columns: Sequence[range], own: Sequence[int], *, bias: bool
    ) -> RowUnits:
        hidden, units = self._config.hidden, []
        if own:
            matrix = self._tensor(f"{name}.weight", hidden, columns[-1].stop)
            units = [matrix[:, columns[place].start : columns[place].stop] for place in own]
        return RowUnits.of(
            units,
            self._tensor(f"{name}.bias", hidden) if bias else None,
            places=own,
            count=len(columns),
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(self._device)


def _scaled(ranges: Sequence[range], factor: int) -> list[range]:
    return [range(each.start * factor, each.stop * factor) for each in ranges]


def _side_by_side(columns: Sequence[Sequence[range]]) -> list[range]:
    """Return the columns of each unit in a matrix that has only these units."""
    widths = [sum(map(len, of)) for of in zip(*columns, strict=True)]
    return [range(first, last) for first, last in pairwise(accumulate(widths, initial=0))]


def _by_unit(tensors: Sequence[Tensor], columns: Sequence[Sequence[range]]) -> Tensor:
    """Concatenate the rows of all tensors, grouped by unit."""
    return _below_each_other(
        [
            tensor[own.start : own.stop]
            for of in zip(*columns, strict=True)
            for tensor, own in zip(tensors, of, strict=True)
        ]
    )


def _below_each_other(parts: Sequence[Tensor]) -> Tensor:
    """Join the parts like `torch.cat`, which would import torch's compiler for tensors without
    memory.
    """
    whole = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    for part, place in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        place.copy_(part)
    return whole
