"""The placement of the KV cells of spread heads on ranks, by the base of a page and by layer.

Initially the cells of layer `i` are on rank `(base + i) mod n` (RaidServe's cyclic placement): the
ranks have equal numbers of a page's cells (to within one), and of the bases in each layer. After a
loss only the turns of the lost rank are reassigned: with `mod (n - 1)` nearly all cells would move.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

# The rank with the cells of spread heads, by layer and base.
Turns = tuple[tuple[int, ...], ...]


def cyclic(ranks: Sequence[int], layers: int, bases: int) -> Turns:
    return tuple(
        tuple(ranks[(base + at) % len(ranks)] for base in range(bases)) for at in range(layers)
    )


def mended(turns: Turns, left: Collection[int]) -> Turns:
    """Reassign the turns of lost ranks: each goes to the rank in `left` with the fewest turns of
    the same base, then with the fewest of the same layer.
    """
    counts = [Counter(of_base) for of_base in zip(*turns, strict=True)]
    result = []
    for row in turns:
        of_layer, new = Counter(row), list(row)
        for base, rank in enumerate(row):
            if rank in left:
                continue
            _, _, new[base] = min((counts[base][each], of_layer[each], each) for each in left)
            counts[base][new[base]] += 1
            of_layer[new[base]] += 1
        result.append(tuple(new))
    return tuple(result)


def least_loaded(pending_tokens: Mapping[int, int]) -> int:
    """Return the base for a new sequence: the base with the fewest pending tokens."""
    return min(pending_tokens, key=lambda base: (pending_tokens[base], base))
