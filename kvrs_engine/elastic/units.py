"""Names and sizes of a model's units, for layouts and plans."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from kvrs_engine.elastic.grain import Grain


class UnitKind(IntEnum):
    COMMON = 0  # Norms and embeddings, on every rank of a stage.
    ATTENTION = 1  # One KV head of a layer, with its query heads.
    MLP = 2  # One tile of a layer's inner dimension, or one part of an expert.
    VOCABULARY = 3  # One tile of the LM head's rows.


class Unit(NamedTuple):
    kind: UnitKind
    layer: int  # 0 if the unit belongs to no layer.
    place: int


COMMON = Unit(UnitKind.COMMON, 0, 0)


@dataclass(frozen=True)
class Units:
    """The sizes of one model's units. All layers are equal, except for the dense layers of a model
    with experts.
    """

    layers: int
    attention_bytes: tuple[int, ...]  # Weights of each KV head.
    mlp_bytes: tuple[int, ...]  # Weights of each tile, or of each part of each expert.
    vocabulary_bytes: tuple[int, ...]  # Weights of each tile.
    common_bytes: int
    # The layers without experts in a model with experts, and the tiles of their MLP.
    dense_layers: frozenset[int] = frozenset()
    dense_bytes: tuple[int, ...] = ()
    expert_parts: int = 0  # Units per expert; 0: no experts.
    chosen_share: float = 1.0  # Share of the experts to which a row is routed.

    @classmethod
    def of(
        cls,
        grain: Grain,
        *,
        layers: int,
        hidden: int,
        head_dim: int,
        gated: bool,
        weight_bytes: int,
        common_bytes: int,
    ) -> "Units":
        """Return the units of a model with `weight_bytes` per weight; biases are not counted."""
        row, matrices = hidden * weight_bytes, 3 if gated else 2
        return cls(
            layers=layers,
            # Rows of the queries, the key and the value; output columns of the queries.
            attention_bytes=tuple((2 * len(own) + 2) * head_dim * row for own in grain.attention),
            mlp_bytes=tuple(matrices * len(tile) * row for tile in grain.mlp),
            vocabulary_bytes=tuple(len(tile) * row for tile in grain.vocabulary),
            common_bytes=common_bytes,
            dense_layers=grain.dense_layers,
            dense_bytes=tuple(matrices * len(tile) * row for tile in grain.dense_mlp),
            expert_parts=grain.expert_parts,
            chosen_share=grain.chosen_share,
        )

    def row_share(self, layer: int) -> float:
        """Return the share of a layer's MLP that each row uses."""
        return 1.0 if layer in self.dense_layers else self.chosen_share

    def bytes_of(self, unit: Unit) -> int:
        if unit.kind == UnitKind.COMMON:
            return self.common_bytes
        return self._sizes(unit.kind, unit.layer)[unit.place]

    def mlp_of(self, layer: int) -> tuple[int, ...]:
        """Return the sizes of the units of a layer's MLP."""
        return self.dense_bytes if layer in self.dense_layers else self.mlp_bytes

    def all(self) -> Iterator[Unit]:
        """Yield every unit once, in the order of layers."""
        yield COMMON
        for layer in range(self.layers):
            for kind in (UnitKind.ATTENTION, UnitKind.MLP):
                yield from (Unit(kind, layer, at) for at in range(len(self._sizes(kind, layer))))
        yield from (Unit(UnitKind.VOCABULARY, 0, at) for at in range(len(self.vocabulary_bytes)))

    @cached_property
    def total_bytes(self) -> int:
        layers = self.layers * sum(self.attention_bytes) + self.all_mlp_bytes
        return layers + sum(self.vocabulary_bytes) + self.common_bytes

    @cached_property
    def all_mlp_bytes(self) -> int:
        """Bytes of the MLPs of all layers together."""
        dense = len(self.dense_layers)
        return (self.layers - dense) * sum(self.mlp_bytes) + dense * sum(self.dense_bytes)

    def _sizes(self, kind: UnitKind, layer: int) -> tuple[int, ...]:
        if kind is UnitKind.MLP:
            return self.mlp_of(layer)
        return self.attention_bytes if kind is UnitKind.ATTENTION else self.vocabulary_bytes
