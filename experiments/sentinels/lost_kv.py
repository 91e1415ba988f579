"""The KV cells that a change of ranks moves, where all KV has a backup on the host."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from kvrs_engine.elastic.layouts import SPREAD, Layout
from kvrs_engine.elastic.plans import HOST, Move, MovePlan, even_pieces
from kvrs_engine.elastic.units import Unit, UnitKind


def with_kv(found: MovePlan, kv_bytes: int, dead: Collection[int]) -> MovePlan:
    """Return the plan with the moves of KV of that size per layer and head, as units of layers
    behind the model's.
    """
    living = frozenset(found.before.ranks).difference(dead)
    return replace(
        found, moves=(*found.moves, *_moves(found.before, found.after, kv_bytes, living))
    )


def _moves(before: Layout, after: Layout, kv_bytes: int, living: frozenset[int]) -> Iterator[Move]:
    """Yield the moves of KV cells. Cells of a spread head stay on their rank; those of a rank that
    leaves are divided among the other ranks.
    """
    for layer, owners in enumerate(after.attention):
        old_ranks, ranks = before.stage_at(layer).ranks, after.stage_at(layer).ranks
        for head, owner in enumerate(owners):
            old_owner = before.attention[layer][head]
            for rank, start, stop in _share(old_owner, old_ranks, kv_bytes):
                if owner == old_owner == SPREAD and rank in ranks:
                    continue
                source = rank if rank in living else HOST
                targets = ranks if owner == SPREAD else (owner,)
                pieces = even_pieces(stop - start, len(targets))
                for target, (first, last) in zip(targets, pieces, strict=True):
                    if first < last and source != target:
                        cells = Unit(UnitKind.ATTENTION, len(after.attention) + layer, head)
                        yield Move(cells, start + first, start + last, source, target)


def _share(owner: int, ranks: tuple[int, ...], kv_bytes: int) -> list[tuple[int, int, int]]:
    """Return (rank, start, stop) of the cells of a layer and head; a spread head has even
    shares.
    """
    if owner != SPREAD:
        return [(owner, 0, kv_bytes)]
    pieces = even_pieces(kv_bytes, len(ranks))
    return [(rank, start, stop) for rank, (start, stop) in zip(ranks, pieces, strict=True)]
