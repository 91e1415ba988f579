"""The cut of a model into units, which depends on the model alone.

A unit of attention is one KV head with its query heads; a unit of the MLP is one tile of its inner
dimension or, in a layer with experts, one part of an expert; a unit of the vocabulary is a tile of
the LM head's rows. A process may own any set of units: the result of a unit does not depend on the
units that are computed with it. The results of the attention units, and those of the MLP units, are
added up in the order of `trees.py`.

`VERSION` is part of a model's fingerprint, because another cut gives other bits.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

VERSION = 1

_MAX_TILES = 64
_WIDTH_MULTIPLE = 16  # The width of a tile is a multiple of this, but for the last tile.
_NARROWEST_MLP_TILE = 64
_MAX_EXPERT_PARTS = 8  # A few wide experts could not be divided evenly as wholes.
_NARROWEST_EXPERT_PART = 1024
_NARROWEST_VOCABULARY_TILE = 128


@dataclass(frozen=True, slots=True)
class Grain:
    """The units of one model. All layers have the same units, except for the dense layers of a
    model with experts.
    """

    attention: tuple[range, ...]  # Query heads of each unit.
    # Range of the inner dimension of each unit; with experts, all units of one expert after the
    # other.
    mlp: tuple[range, ...]
    vocabulary: tuple[range, ...]  # Token ids of each unit.
    # The layers without experts in a model with experts, and their MLP units.
    dense_layers: frozenset[int] = frozenset()
    dense_mlp: tuple[range, ...] = ()
    expert_parts: int = 0  # Units per expert; 0: no experts.
    chosen_share: float = 1.0  # Share of the experts to which a row is routed.

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
        """Return the grain with `count` experts of inner dimension `width` in all layers but
        `dense_layers`; each row goes to `chosen` experts.
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
    """Cut `size` into at most `most` tiles, none below `narrowest` unless there is only one.

    The number of tiles is a power of two, so that 2, 4 or 8 equal owners have whole subtrees of the
    sum.
    """
    count = 1 << (max(1, min(most, size // narrowest)).bit_length() - 1)
    whole = size // _WIDTH_MULTIPLE
    bounds = [at * whole // count * _WIDTH_MULTIPLE for at in range(count)] + [size]
    return tuple(range(first, last) for first, last in pairwise(bounds))
