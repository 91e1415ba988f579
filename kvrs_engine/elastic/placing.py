"""Places of the cells of spread KV heads: of each page by its base, layer by layer.

At first the cells of layer `i` lie on the rank `(base + i) mod n` (RaidServe's cyclic placement):
each page has as many on every rank, to one, and as many bases have their turn at each rank in every
layer. After a loss only the turns of the lost rank are dealt anew: with `mod (n - 1)` nearly all
cells would have to move.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

# The rank with the cells of spread heads, by layer of a stage, then by base.
Turns = tuple[tuple[int, ...], ...]


def cyclic(ranks: Sequence[int], layers: int, bases: int) -> Turns:
    return tuple(
        tuple(ranks[(base + at) % len(ranks)] for base in range(bases)) for at in range(layers)
    )


def mended(turns: Turns, left: Collection[int]) -> Turns:
    """The turns of ranks that are not left are dealt to those that have least of the same base, and
    of these to one that has least of the same layer.
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
    """The base for a new sequence: that with the fewest tokens to compute in its sequences."""
    return min(pending_tokens, key=lambda base: (pending_tokens[base], base))
