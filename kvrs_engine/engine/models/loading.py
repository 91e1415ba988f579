"""The loader turns a checkpoint's tensors into the parts of a decoder."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import inf

import torch
from torch import Tensor

from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.units import Unit
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
from kvrs_engine.engine.models.stored import NamedTensors, names_of, stored_of
from kvrs_engine.engine.models.unit_blocks import UnitBlock, assemble, below_each_other

# OPT's position table begins with two unused rows.
_OPT_POSITIONS_OFFSET = 2
# Number of tensors that are kept for the next unit: at least those of one unit.
_KEPT = 8


def load_decoder(
    config: ModelConfig,
    weights: NamedTensors,
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
    weights: NamedTensors,
    positions: int,
    device: torch.device,
    share: Share | None = None,
) -> Decoder:
    """Load the weights as `load_decoder` does, but without proofs and in canonical forms. Without
    `positions` there is no rotary table.
    """
    share = share or Share.whole(config.grain, config.layers)
    return _DecoderLoader(config, weights, device, share).decoder(positions)


def skeleton(config: ModelConfig) -> Decoder:
    """Return a whole model with shapes and no weights, without a rotary table."""
    return read_decoder(config, _Shapes(), 0, torch.device("meta"))


def with_rotary(decoder: Decoder, config: ModelConfig, positions: int) -> Decoder:
    """Return the decoder with a rotary table of `positions` rows, on the CPU."""
    return replace(decoder, rotary=_rotary(config, positions, torch.device("cpu")))


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
        self._names = names_of(config, weights)

    def decoder(self, positions: int) -> Decoder:
        config, share, trunk = self._config, self._share, self._names.trunk
        embedding = None
        if share.is_first:
            tokens = self._tensor(f"{trunk}.embed_tokens.weight", config.vocab, config.hidden)
            embedding = Embedding(tokens, self._learned_positions())
        head = self._no_columns() if share.is_last else None
        tiles = config.grain.vocabulary
        if embedding and config.tied_embeddings and len(share.vocabulary) == len(tiles):
            # A tied head that is complete shares the memory of the embeddings.
            head = ColumnUnits.of(embedding.tokens, list(map(len, tiles)))
            share = replace(share, vocabulary=())
        common = Decoder(
            embedding=embedding,
            rotary=_rotary(config, positions, self._device),
            first_layer=share.layers.start,
            layers=[self._layer(index) for index in share.layers],
            final_norm=self._norm(f"{trunk}.{self._names.final_norm}") if share.is_last else None,
            head=head,
            forms=Forms(),
        )
        # No attribute: a cycle of references would keep the tensors.
        block_of = partial(self._block, lru_cache(_KEPT)(self._tensor))
        return assemble(common, share, config, block_of, apart_bytes=inf)

    def _layer(self, index: int) -> Layer:
        """Load a layer without its units."""
        config, names = self._config, self._names
        prefix = f"{names.trunk}.layers.{index}"
        return Layer(
            attention_norm=self._norm(f"{prefix}.{names.attention_norm}"),
            attention=Attention(
                qkv=self._no_columns(),
                output=self._no_rows(f"{prefix}.{names.output}", bias=config.output_bias),
                head_norm=self._head_norm(f"{prefix}.self_attn") if config.head_norm else None,
                head_dim=config.head_dim,
            ),
            mlp_norm=self._norm(f"{prefix}.{names.mlp_norm}"),
            mlp=Mlp(
                self._no_columns(),
                gated_silu if config.mlp == "gated silu" else torch.relu,
                self._no_rows(f"{prefix}.{names.down}", bias=config.mlp_bias),
            ),
            experts=self._experts(prefix) if config.has_experts(index) else None,
        )

    def _no_columns(self) -> ColumnUnits:
        return ColumnUnits.of(torch.empty(0, self._config.hidden, device=self._device), [])

    def _no_rows(self, name: str, *, bias: bool) -> RowUnits:
        added = self._tensor(f"{name}.bias", self._config.hidden) if bias else None
        return RowUnits.of([], added, places=(), count=1)

    def _block(self, take: Callable[..., Tensor], unit: Unit) -> UnitBlock:
        """Load a unit; most tensors have parts of several units."""
        own, rows = stored_of(self._config, self._names, unit), None
        columns = [
            take(f"{name}.weight", size, own.width)[part.start : part.stop]
            for name, size, part in own.first
        ]
        biases = [
            take(f"{name}.bias", size)[part.start : part.stop]
            for name, size, part in own.first
            if own.has_bias
        ]
        if own.second is not None:
            name, size, part = own.second
            matrix = take(f"{name}.weight", self._config.hidden, size)
            rows = matrix[:, part.start : part.stop]
        return UnitBlock(
            below_each_other(columns), below_each_other(biases) if biases else None, rows
        )

    def _head_norm(self, prefix: str) -> RmsNorm:
        config = self._config
        heads = len(config.grain.attention[0])
        queries = self._tensor(f"{prefix}.q_norm.weight", config.head_dim).expand(heads, -1)
        keys = self._tensor(f"{prefix}.k_norm.weight", config.head_dim).expand(1, -1)
        return RmsNorm(below_each_other((queries, keys)), config.norm_eps)

    def _experts(self, prefix: str) -> Experts:
        config = self._config.experts
        assert config is not None, "the layer has experts"
        name = f"{prefix}.{self._names.router}.weight"
        weight = self._tensor(name, config.count, self._config.hidden).t()
        return Experts(
            Router(weight, config.chosen, config.renormalise), self._config.grain.expert_parts
        )

    def _norm(self, name: str) -> Norm:
        config = self._config
        weight = self._tensor(f"{name}.weight", config.hidden)
        if config.norm == "layer":
            bias = self._tensor(f"{name}.bias", config.hidden)
            return LayerNorm(weight, bias, config.norm_eps)
        return RmsNorm(weight, config.norm_eps)

    def _learned_positions(self) -> Tensor | None:
        config = self._config
        if config.rope is not None:
            return None
        rows = config.max_positions + _OPT_POSITIONS_OFFSET
        table = self._tensor(f"{self._names.trunk}.embed_positions.weight", rows, config.hidden)
        return table[_OPT_POSITIONS_OFFSET:]

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(self._device)


def _rotary(config: ModelConfig, positions: int, device: torch.device) -> RotaryTable | None:
    if config.rope is None or not positions:
        return None
    frequencies = inverse_frequencies(config.head_dim, config.rope.theta, config.rope.scaling)
    return RotaryTable(frequencies, positions, device)
