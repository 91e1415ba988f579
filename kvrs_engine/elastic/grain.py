"""Units: the pieces of a model that are each computed as a whole, in shapes that the model alone
decides.

A unit of attention is one KV head with its query heads; a unit of the MLP is one tile of its inner
dimension, or of a layer with experts one part of an expert's; a unit of the vocabulary is a tile of
the head's rows. A process may own any set of
units: no number that a unit yields depends on which others are computed beside it. The results of
the units of attention, and those of the MLP, are added up in the order of `trees.py`.

The rules are part of a model's fingerprint by their version: another cut gives other bits.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

VERSION = 1

_MAX_TILES = 64
_WIDTH_MULTIPLE = 16  # Of tiles; the last one has the ragged rest as well.
_NARROWEST_MLP_TILE = 64
# Whole experts would burden ranks unevenly where they are few and wide.
_MAX_EXPERT_PARTS = 8
_NARROWEST_EXPERT_PART = 1024
_NARROWEST_VOCABULARY_TILE = 128


@dataclass(frozen=True, slots=True)
class Grain:
    """The units of one model. Layers have the same, but for dense ones among such with experts."""

    attention: tuple[range, ...]  # Of each unit its query heads.
    # Of each unit its part of the inner dimension; of experts, all parts of one after the other.
    mlp: tuple[range, ...]
    vocabulary: tuple[range, ...]  # Of each unit its token ids.
    # Layers without experts, where the others have some, and their units of the MLP.
    dense_layers: frozenset[int] = frozenset()
    dense_mlp: tuple[range, ...] = ()
    expert_parts: int = 0  # Units of an expert; 0: there are no experts.
    chosen_share: float = 1.0  # Of the experts, those that a row is routed to.

    @classmethod
    def of(cls, *, heads: int, kv_heads: int, intermediate: int, vocab: int) -> "Grain":
        shared = heads // kv_heads
        return cls(
            attention=tuple(range(at * shared, (at + 1) * shared) for at in range(kv_heads)),
            mlp=_tiles(intermediate, _NARROWEST_MLP_TILE),
            vocabulary=_tiles(vocab, _NARROWEST_VOCABULARY_TILE),
        )

    def with_experts(
        self, count: int, width: int, dense_layers: frozenset[int], chosen: int
    ) -> "Grain":
        """The same with `count` experts of an inner dimension `width` in all other layers, of which
        each row goes to `chosen`.
        """
        parts = _tiles(width, _NARROWEST_EXPERT_PART, _MAX_EXPERT_PARTS)
        return replace(
            self,
            mlp=parts * count,
            dense_layers=dense_layers,
            dense_mlp=self.mlp if dense_layers else (),
            expert_parts=len(parts),
            chosen_share=chosen / count,
        )

    def mlp_of(self, layer: int) -> tuple[range, ...]:
        return self.dense_mlp if layer in self.dense_layers else self.mlp


def _tiles(size: int, narrowest: int, most: int = _MAX_TILES) -> tuple[range, ...]:
    """A power of two of tiles, at most so many and none narrower than that unless there is only
    one: then 2, 4 or 8 equal owners have whole subtrees of the sum.
    """
    count = 1 << (max(1, min(most, size // narrowest)).bit_length() - 1)
    whole = size // _WIDTH_MULTIPLE
    bounds = [at * whole // count * _WIDTH_MULTIPLE for at in range(count)] + [size]
    return tuple(range(first, last) for first, last in pairwise(bounds))
