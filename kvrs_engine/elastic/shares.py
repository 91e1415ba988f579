"""The share of a layout that one rank computes."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from kvrs_engine.elastic.grain import Grain
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import UnitKind, Units


@dataclass(frozen=True, slots=True)
class Share:
    """The layers of a rank, and the units of each layer whose weights the rank has, in ascending
    order.
    """

    layers: range
    heads: tuple[tuple[int, ...], ...]  # Own KV heads by layer: the rank has all their cells.
    spread: tuple[tuple[int, ...], ...]  # Spread KV heads by layer: the rank has some cells.
    tiles: tuple[tuple[int, ...], ...]  # MLP tiles by layer.
    vocabulary: tuple[int, ...]  # Tiles of the LM head.
    is_first: bool  # The share begins with the embeddings.
    is_last: bool  # The share ends with the LM head.

    @classmethod
    def of(cls, layout: Layout, rank: int) -> "Share":
        stage = layout.stage_of(rank)
        return cls(
            layers=stage.layers,
            heads=tuple(layout.heads(rank, layer) for layer in stage.layers),
            spread=tuple(layout.spread(layer) for layer in stage.layers),
            tiles=tuple(layout.tiles(rank, layer) for layer in stage.layers),
            vocabulary=layout.vocabulary_tiles(rank),
            is_first=stage == layout.stages[0],
            is_last=stage == layout.stages[-1],
        )

    @classmethod
    def whole(cls, grain: Grain, layers: int) -> "Share":
        """Return the whole model, for a process without other ranks."""
        return cls(
            layers=range(layers),
            heads=(tuple(range(len(grain.attention))),) * layers,
            spread=((),) * layers,
            tiles=tuple(tuple(range(len(grain.mlp_of(layer)))) for layer in range(layers)),
            vocabulary=tuple(range(len(grain.vocabulary))),
            is_first=True,
            is_last=True,
        )

    @classmethod
    def nothing(cls, layers: range, *, is_first: bool, is_last: bool) -> "Share":
        """Return a share of these layers without any head or tile."""
        none = ((),) * len(layers)
        return cls(layers, none, none, none, (), is_first, is_last)

    @property
    def spread_heads(self) -> "Share":
        """A share that has only the spread heads, as its own heads."""
        none = ((),) * len(self.layers)
        return replace(self, heads=self.spread, spread=none, tiles=none, vocabulary=())

    def kinds(self, units: Units) -> set[Hashable]:
        """Return the sizes of heads, of tiles and of the vocabulary that are computed together.

        Shares with equal kinds compute products of the same shapes. Experts are computed one by
        one, so that only the set of their sizes counts.
        """

        def of(sizes: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
            return tuple(sizes[place] for place in own)

        tiles = set()
        for layer, own in zip(self.layers, self.tiles, strict=True):
            beside = of(units.mlp_of(layer), own)
            has_experts = units.expert_parts and layer not in units.dense_layers
            tiles.add(("experts", *sorted(set(beside))) if has_experts else beside)
        return {
            (UnitKind.ATTENTION, frozenset(of(units.attention_bytes, own) for own in self.heads)),
            (UnitKind.MLP, frozenset(tiles)),
            (UnitKind.VOCABULARY, of(units.vocabulary_bytes, self.vocabulary)),
        }

    @property
    def units(self) -> int:
        heads = (*self.heads, *self.spread)
        return sum(map(len, heads)) + sum(map(len, self.tiles)) + len(self.vocabulary)
