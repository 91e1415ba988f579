"""Where the cells of spread KV heads lie: of each page by its base, layer by layer.

At first the cells of layer `i` lie on the rank `(base + i) mod n` (RaidServe's cyclic placement):
each page has as many on every rank, to one. After a loss only the turns of the lost rank are dealt
anew: with `mod (n - 1)` nearly all cells would have to move.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrs.elastic.layouts import Stage


@dataclass(frozen=True, slots=True)
class SpreadTurns:
    """`turns[base][i]`: the rank of a stage's layer `i`, for pages of that base."""

    turns: tuple[tuple[int, ...], ...]

    @classmethod
    def cyclic(cls, stage: Stage) -> "SpreadTurns":
        ranks, layers = stage.ranks, len(stage.layers)
        return cls(
            tuple(
                tuple(ranks[(base + at) % len(ranks)] for at in range(layers))
                for base in range(len(ranks))
            )
        )

    def without(self, lost: int, survivors: Sequence[int]) -> "SpreadTurns":
        """The turns of a lost rank are dealt to those that have least of the same base."""
        everywhere = Counter(rank for own in self.turns for rank in own)
        mended = []
        for own in self.turns:
            counts = Counter(own)
            row = list(own)
            for at, rank in enumerate(own):
                if rank == lost:
                    row[at] = min(
                        survivors, key=lambda rank: (counts[rank], everywhere[rank], rank)
                    )
                    counts[row[at]] += 1
                    everywhere[row[at]] += 1
            mended.append(tuple(row))
        return SpreadTurns(tuple(mended))

    def cells(self, base: int, spread: Sequence[int]) -> Counter[int]:
        """Cells of one page on each rank; `spread`: how many heads each layer of the stage
        spreads.
        """
        cells: Counter[int] = Counter()
        for rank, heads in zip(self.turns[base], spread, strict=True):
            cells[rank] += heads
        return cells


def least_loaded(pending_tokens: Mapping[int, int]) -> int:
    """The base for a new sequence: the one whose sequences have fewest tokens to compute."""
    return min(pending_tokens, key=lambda base: (pending_tokens[base], base))
