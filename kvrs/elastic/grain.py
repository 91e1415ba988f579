"""Units: the pieces of a model that are each computed as a whole, in shapes that the model alone
decides.

A unit of attention is one KV head with its query heads; a unit of the MLP is one tile of its inner
dimension; a unit of the vocabulary is a tile of the head's rows. A process may own any set of
units: no number that a unit yields depends on which others are computed beside it. The results of
the units of attention, and those of the MLP, are added up in the order of `trees.py`.

The rules are part of a model's fingerprint by their version: another cut gives other bits.
"""

from dataclasses import dataclass
from itertools import pairwise

VERSION = 1

_MOST_TILES = 64
_WIDTH_MULTIPLE = 16  # Of tiles; the last one has the ragged rest as well.
_NARROWEST_MLP_TILE = 64
_NARROWEST_VOCABULARY_TILE = 128


@dataclass(frozen=True, slots=True)
class Grain:
    """The units of one model. Every layer has the same."""

    attention: tuple[range, ...]  # Of each unit its query heads.
    mlp: tuple[range, ...]  # Of each unit its part of the inner dimension.
    vocabulary: tuple[range, ...]  # Of each unit its token ids.

    @classmethod
    def of(cls, *, heads: int, kv_heads: int, intermediate: int, vocab: int) -> "Grain":
        shared = heads // kv_heads
        return cls(
            attention=tuple(range(at * shared, (at + 1) * shared) for at in range(kv_heads)),
            mlp=_tiles(intermediate, _NARROWEST_MLP_TILE),
            vocabulary=_tiles(vocab, _NARROWEST_VOCABULARY_TILE),
        )


def _tiles(size: int, narrowest: int) -> tuple[range, ...]:
    """A power of two of tiles, at most 64 and none narrower than `narrowest` unless there is one
    only: then 2, 4 or 8 equal owners have whole subtrees of the sum.
    """
    count = 1 << (max(1, min(_MOST_TILES, size // narrowest)).bit_length() - 1)
    whole = size // _WIDTH_MULTIPLE
    bounds = [at * whole // count * _WIDTH_MULTIPLE for at in range(count)] + [size]
    return tuple(range(first, last) for first, last in pairwise(bounds))
