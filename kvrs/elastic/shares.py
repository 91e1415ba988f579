"""What one rank of a layout computes."""

from dataclasses import dataclass

from kvrs.elastic.grain import Grain
from kvrs.elastic.layouts import Layout


@dataclass(frozen=True, slots=True)
class Share:
    """Layers of a model, and of each the units whose weights a rank has, in ascending order."""

    layers: range
    heads: tuple[tuple[int, ...], ...]  # Of each of these layers, KV heads.
    tiles: tuple[tuple[int, ...], ...]  # Of each of these layers, of the MLP.
    vocabulary: tuple[int, ...]  # Tiles of the head.
    is_first: bool  # Whether it begins with the embeddings.
    is_last: bool  # Whether it ends with the head.

    @classmethod
    def of(cls, layout: Layout, rank: int) -> "Share":
        stage = layout.stage_of(rank)
        return cls(
            layers=stage.layers,
            heads=tuple(
                tuple(sorted((*layout.heads(rank, layer), *layout.spread(layer))))
                for layer in stage.layers
            ),
            tiles=tuple(layout.tiles(rank, layer) for layer in stage.layers),
            vocabulary=layout.vocabulary_tiles(rank),
            is_first=stage == layout.stages[0],
            is_last=stage == layout.stages[-1],
        )

    @classmethod
    def whole(cls, grain: Grain, layers: int) -> "Share":
        """All of a model, for a process that computes alone."""
        return cls(
            layers=range(layers),
            heads=(tuple(range(len(grain.attention))),) * layers,
            tiles=(tuple(range(len(grain.mlp))),) * layers,
            vocabulary=tuple(range(len(grain.vocabulary))),
            is_first=True,
            is_last=True,
        )

    @property
    def units(self) -> int:
        return sum(map(len, self.heads)) + sum(map(len, self.tiles)) + len(self.vocabulary)
