"""Copies of experts: the division of an expert's rows among its copies, and the choice of copies.

A piece is the smallest part that is copied: an expert if all its units are on the same ranks, else
one unit. The rows of a piece are divided into tiles; each tile is computed by one of the ranks that
have the piece. Load is counted in tiles (AnchorTP 4.3 balances experts by them).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from kvrs.sums import sum_in_order
from kvrs_engine.elastic.layouts import Copies, Layout
from kvrs_engine.elastic.units import Units

# Least relative reduction of the largest loads that is worth a re-balance.
_LEAST_GAIN = 0.03
# Least relative reduction of a layer's load norm that is worth a copy. A norm of this order is
# close to the largest load, and also falls if only one of several equally loaded ranks gets less.
_LEAST_STEP, _NORM = 0.005, 16
_TELLING = 8  # Mean tiles per expert from which a layer's counts are significant.
_TRIED = 3  # Number of pieces, and of ranks for each piece, that a search step tries.
_SWEEPS, _STILL = 30, 1e-4

Tiles = Sequence[Sequence[float]]  # Number of tiles by layer and expert; dense layers are empty.


class Pieces(NamedTuple):
    """The pieces of a layer's experts."""

    units: int  # Units per piece.
    holders: tuple[tuple[int, ...], ...]  # Ranks that have each piece, the owner first.


def pieces_of(layout: Layout, layer: int, parts: int) -> Pieces:
    """Return the pieces of a layer whose experts have `parts` units each."""
    return _pieces(layout.mlp[layer], layout.copies_of(layer), parts)


@cache
def _pieces(owners: tuple[int, ...], copies: tuple[tuple[int, int], ...], parts: int) -> Pieces:
    held: list[tuple[int, ...]] = [(owner,) for owner in owners]
    for place, rank in copies:
        held[place] = (*held[place], rank)
    experts = [held[first : first + parts] for first in range(0, len(held), parts)]
    if all(len(set(own)) == 1 for own in experts):
        return Pieces(parts, tuple(own[0] for own in experts))
    return Pieces(1, tuple(held))


def assign(runs: Sequence[int], holders: Sequence[tuple[int, ...]]) -> dict[int, list[int]]:
    """Assign each tile of the pieces with copies to the holder with the least load, the first one
    on a tie: ranks by piece.

    `runs` is the number of tiles of each piece in this batch. All ranks compute the same result.
    """
    loads: dict[int, int] = {}
    shared = []
    for piece, (count, ranks) in enumerate(zip(runs, holders, strict=True)):
        if len(ranks) > 1 and count:
            shared.append(piece)
        loads[ranks[0]] = loads.get(ranks[0], 0) + (count if len(ranks) == 1 else 0)
    found: dict[int, list[int]] = {}
    # Pieces with fewer holders first: the others have more choice.
    for piece in sorted(shared, key=lambda piece: len(holders[piece])):
        given = found[piece] = []
        for _ in range(runs[piece]):
            least = min(holders[piece], key=lambda rank: loads.get(rank, 0))
            loads[least] = loads.get(least, 0) + 1
            given.append(least)
    return found


def divided(
    loads: Sequence[float], holders: Sequence[tuple[int, ...]], ranks: Sequence[int]
) -> dict[int, float]:
    """Return the load of each rank after dividing each piece's load among its holders such that
    the largest load of a rank is least.
    """
    return _division(loads, holders, ranks).loads


class _Division(NamedTuple):
    loads: dict[int, float]  # By rank.
    shares: dict[int, dict[int, float]]  # By piece with copies and by holder.


def _division(
    loads: Sequence[float], holders: Sequence[tuple[int, ...]], ranks: Sequence[int]
) -> _Division:
    total = dict.fromkeys(ranks, 0.0)
    shares: dict[int, dict[int, float]] = {}
    for piece, (load, own) in enumerate(zip(loads, holders, strict=True)):
        if len(own) == 1:
            total[own[0]] += load
        elif load:
            shares[piece] = {rank: load / len(own) for rank in own}
            for rank, part in shares[piece].items():
                total[rank] += part
    # Level one piece after the other: the sum of squares converges to its minimum, where the
    # largest load is least too.
    still = _STILL * sum_in_order(loads)
    for _ in range(_SWEEPS):
        moved = 0.0
        for piece, own_shares in shares.items():
            others = {rank: total[rank] - part for rank, part in own_shares.items()}
            level = _level(sorted(others.values()), loads[piece])
            for rank, other in others.items():
                part = max(0.0, level - other)
                moved = max(moved, abs(part - own_shares[rank]))
                own_shares[rank], total[rank] = part, other + part
        if moved <= still:
            break
    return _Division(total, shares)


def _level(heights: Sequence[float], amount: float) -> float:
    """Return the common level (water-filling) after pouring `amount` over floors at these heights,
    which are in ascending order.
    """
    below = 0.0
    for count, height in enumerate(heights, 1):
        below += height
        level = (amount + below) / count
        if count == len(heights) or level <= heights[count]:
            return level
    raise AssertionError("there is a vessel")


def fullest(layout: Layout, units: Units, tiles: Tiles) -> tuple[float, float]:
    """Return the largest and the mean load of a rank, each summed over the layers with experts,
    because ranks wait for each other in every layer.
    """
    most = mean = 0.0
    for layer, own in enumerate(tiles):
        if own:
            ranks = layout.stage_at(layer).ranks
            pieces = pieces_of(layout, layer, units.expert_parts)
            loads = divided(_piece_loads(pieces, own, units), pieces.holders, ranks).values()
            most, mean = most + max(loads), mean + sum_in_order(loads) / len(ranks)
    return most, mean


def skew(layout: Layout, units: Units, tiles: Tiles) -> float:
    """Return the ratio of the largest to the mean load; 1.0 if no tile was counted."""
    most, mean = fullest(layout, units, tiles)
    return most / mean if mean else 1.0


def _piece_loads(pieces: Pieces, tiles: Sequence[float], units: Units) -> list[float]:
    """Return the load of each piece, in tiles times units."""
    each = units.expert_parts // pieces.units
    return [pieces.units * load for load in tiles for _ in range(each)]


class Rebalanced(NamedTuple):
    layout: Layout  # The given object, if no change is worth its bytes.
    lacks_room: bool  # More copies would be worth their bytes, and no rank has room for them.


class TileHistory:
    """Counts the tiles of each expert with exponential decay."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._noted_s = 0.0
        self.tiles: list[list[float]] = []

    def note(self, more: Tiles, now_s: float) -> None:
        """Add the tiles since the last call; the numbers of layers and experts are fixed."""
        kept = 0.5 ** ((now_s - self._noted_s) / self._half_life_s) if self.tiles else 0.0
        before = self.tiles or [[0.0] * len(own) for own in more]
        self.tiles = [
            [kept * count + new for count, new in zip(counts, own, strict=True)]
            for counts, own in zip(before, more, strict=True)
        ]
        self._noted_s = now_s

    @property
    def telling(self) -> Tiles:
        """The tiles of the layers with enough tiles to compare experts; other layers are empty."""
        return [own if sum_in_order(own) >= _TELLING * len(own) else () for own in self.tiles]


def rebalance(layout: Layout, units: Units, tiles: Tiles, room: Mapping[int, int]) -> Rebalanced:
    """Return the layout with the copies of experts that are worth their bytes.

    `room` is the limit of a rank's copies in bytes. Copies that do not reduce the largest loads are
    dropped; then the most useful copies are added one by one, and kept if the largest loads fall by
    `_LEAST_GAIN` over all layers. The largest load never rises if the present copies have room. The
    result is stable: a second call with the same counts changes nothing.
    """
    found = layout
    while (later := _better(found, units, tiles, room)).layout is not found:
        found = later.layout
    if found is not layout:
        found = replace(found, number=layout.number + 1)
    return Rebalanced(found, later.lacks_room)


def _better(layout: Layout, units: Units, tiles: Tiles, room: Mapping[int, int]) -> Rebalanced:
    """Run one round of `rebalance`; the next round may find better copies."""
    now = _Search(layout, units, tiles, room)
    now.fit()
    now.drop_useless()
    dropped, least = now.copies, now.fullest
    lacks_room = now.improve()
    uncounted = [() if sum(own) else layout.copies_of(at) for at, own in enumerate(tiles)]
    copies = tuple(uncounted) if any(uncounted) else ()
    anew = _Search(replace(layout, copies=copies), units, tiles, room)
    lacks_room_anew = anew.improve()
    if anew.fullest < (1 - _LEAST_GAIN) * now.fullest:
        now, lacks_room = anew, lacks_room_anew
    copies = now.copies if now.fullest <= (1 - _LEAST_GAIN) * least else dropped
    if copies == layout.copies:
        return Rebalanced(layout, lacks_room)
    return Rebalanced(replace(layout, copies=copies), lacks_room)


class _Search:
    """A greedy search for copies, over all layers."""

    def __init__(self, layout: Layout, units: Units, tiles: Tiles, room: Mapping[int, int]) -> None:
        self._left = {rank: room.get(rank, 0) for rank in layout.ranks}
        self._layers: dict[int, _LayerSearch] = {}
        for layer, own in enumerate(tiles):
            if own and sum(own):
                pieces = pieces_of(layout, layer, units.expert_parts)
                ranks = layout.stage_at(layer).ranks
                sizes = units.mlp_of(layer)
                bytes_of = [
                    sum(sizes[first : first + pieces.units])
                    for first in range(0, len(sizes), pieces.units)
                ]
                self._layers[layer] = _LayerSearch(
                    pieces.units,
                    list(pieces.holders),
                    ranks,
                    bytes_of,
                    _piece_loads(pieces, own, units),
                )
        # Layers without counts keep their copies.
        self._others = [
            () if layer in self._layers else layout.copies_of(layer)
            for layer in range(len(layout.mlp))
        ]
        for layer, copies in enumerate(layout.copies):
            for place, rank in copies:
                self._left[rank] -= units.mlp_of(layer)[place]

    @property
    def copies(self) -> Copies:
        found = [*self._others]
        for layer, own in self._layers.items():
            found[layer] = tuple(
                sorted(
                    (place, rank)
                    for piece, rank in own.copies()
                    for place in range(piece * own.units, (piece + 1) * own.units)
                )
            )
        return tuple(found) if any(found) else ()

    @property
    def fullest(self) -> float:
        return sum_in_order(max(own.loads.values()) for own in self._layers.values())

    def fit(self) -> None:
        """Drop the least useful copies on ranks whose copies exceed their room."""
        for rank in [rank for rank, left in self._left.items() if left < 0]:
            while self._left[rank] < 0:
                own_copies = [
                    (own.loss(piece, rank), layer, piece)
                    for layer, own in self._layers.items()
                    for piece, other in own.copies()
                    if other == rank
                ]
                if not own_copies:
                    break
                _, layer, piece = min(own_copies)
                self._drop(layer, piece, rank)

    def improve(self) -> bool:
        """Add useful copies, then drop copies that later ones have made useless; return whether
        more room would allow further useful copies.
        """
        lacks_room = self.add()
        self.drop_useless()
        return lacks_room

    def drop_useless(self) -> None:
        for layer, own in self._layers.items():
            most = max(own.loads.values())
            for piece, rank in sorted(own.copies(), key=lambda copy: own.loads[copy[1]]):
                if max(own.without(piece, rank).loads.values()) <= most * (1 + 10 * _STILL):
                    self._drop(layer, piece, rank)

    def add(self) -> bool:
        """Add copies while one is useful; return whether more room would allow further ones."""
        open_layers = set(self._layers)
        best: dict[int, _Step] = {}
        lacks_room = False
        while True:
            for layer in open_layers:
                step, lacks = self._layers[layer].best_copy(self._left)
                lacks_room |= lacks
                best.pop(layer, None)
                if step is not None:
                    best[layer] = step
            if not best:
                return lacks_room
            layer = max(best, key=lambda layer: (best[layer].gain, -layer))
            step = best.pop(layer)
            size = self._layers[layer].bytes_of[step.piece]
            self._left[step.rank] -= size
            self._layers[layer].take(step)
            # Search again where the best copy no longer fits on this rank.
            open_layers = {layer} | {
                other
                for other, own in best.items()
                if own.rank == step.rank
                and self._layers[other].bytes_of[own.piece] > self._left[step.rank]
            }

    def _drop(self, layer: int, piece: int, rank: int) -> None:
        own = self._layers[layer]
        own.drop(piece, rank)
        self._left[rank] += own.bytes_of[piece]


class _Step(NamedTuple):
    gain: float
    piece: int
    rank: int


@dataclass(slots=True)
class _LayerSearch:
    units: int  # Units per piece.
    holders: list[tuple[int, ...]]
    ranks: tuple[int, ...]
    bytes_of: list[int]
    tiles: list[float]  # Load of each piece.
    division: _Division = field(init=False)

    def __post_init__(self) -> None:
        self.division = _division(self.tiles, self.holders, self.ranks)

    @property
    def loads(self) -> dict[int, float]:
        return self.division.loads

    def copies(self) -> list[tuple[int, int]]:
        """Return the piece and the rank of each copy."""
        return [(at, rank) for at, own in enumerate(self.holders) for rank in own[1:]]

    def without(self, piece: int, rank: int) -> _Division:
        return self._divided(piece, tuple(own for own in self.holders[piece] if own != rank))

    def loss(self, piece: int, rank: int) -> float:
        return max(self.without(piece, rank).loads.values()) - max(self.loads.values())

    def drop(self, piece: int, rank: int) -> None:
        self.division = self.without(piece, rank)
        self.holders[piece] = tuple(own for own in self.holders[piece] if own != rank)

    def take(self, step: _Step) -> None:
        own = self.holders[step.piece]
        self.division = self._divided(step.piece, (*own, step.rank))
        self.holders[step.piece] = (own[0], *sorted((*own[1:], step.rank)))

    def best_copy(self, left: Mapping[int, int]) -> tuple[_Step | None, bool]:
        """Return the copy that makes the loads most even, or None if no copy is worth it; and
        whether a copy on a rank without room would be worth it.
        """
        before, most = _norm(self.loads), max(self.loads.values())
        if most <= (1 + _LEAST_GAIN) * sum_in_order(self.loads.values()) / len(self.loads):
            return None, False
        full = {rank for rank, load in self.loads.items() if load >= most * (1 - _LEAST_GAIN)}
        pieces = [at for at, own in enumerate(self.holders) if full.intersection(own)]
        pieces.sort(key=lambda at: (-self._on(full, at), at))
        found: list[_Step] = []
        lacks_room = False
        by_load = sorted(self.ranks, key=lambda rank: (self.loads[rank], rank))
        for piece in pieces[:_TRIED]:
            targets = [rank for rank in by_load if rank not in self.holders[piece]]
            free = [rank for rank in targets if left[rank] >= self.bytes_of[piece]]
            lacks_room |= free[:1] != targets[:1] and not full.intersection(targets[:1])
            for rank in free[:_TRIED]:
                after = _norm(self._divided(piece, (*self.holders[piece], rank)).loads)
                if after <= before * (1 - _LEAST_STEP):
                    found.append(_Step(before - after, piece, rank))
        best = max(found, key=lambda step: (step.gain, -step.piece, -step.rank), default=None)
        return best, best is None and lacks_room

    def _on(self, ranks: Collection[int], piece: int) -> float:
        """Return the part of a piece's load on these ranks."""
        shares = self.division.shares.get(piece, {self.holders[piece][0]: self.tiles[piece]})
        return sum_in_order(load for rank, load in shares.items() if rank in ranks)

    def _divided(self, piece: int, holders: tuple[int, ...]) -> _Division:
        changed = [*self.holders]
        changed[piece] = holders
        return _division(self.tiles, changed, self.ranks)


def _norm(loads: Mapping[int, float]) -> float:
    most = max(loads.values())
    total = sum_in_order((load / most) ** _NORM for load in loads.values())
    return most * math.pow(total, 1 / _NORM)
