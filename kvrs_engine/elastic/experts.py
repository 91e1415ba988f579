"""Copies of experts: who computes which rows of them, and on which ranks they pay.

A piece is what is owned and copied as one: an expert where all its units are on the same ranks,
else each of its units. The rows of a piece come in runs of one tile; each run is computed by one of
the ranks that have the piece. Load is counted in such tiles (AnchorTP 4.3 balances experts so).

Pure: the counts of tiles are given.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from kvrs.sums import sum_in_order
from kvrs_engine.elastic.layouts import Copies, Layout
from kvrs_engine.elastic.units import Units

# A re-balance is worth its bytes where the fullest ranks have so much less to do.
_LEAST_GAIN = 0.03
# One copy counts where it lowers the norm of its layer's loads by so much; a norm of this order is
# close to the largest load, and also falls where one of several fullest ranks gets less.
_LEAST_STEP, _NORM = 0.005, 16
_TELLING = 8  # Tiles of each expert of a layer, in the mean.
_TRIED = 3  # Pieces of the fullest ranks, and ranks for each, of which a copy is considered.
_SWEEPS, _STILL = 30, 1e-4

Tiles = Sequence[Sequence[float]]  # By layer, then by expert; of a dense layer none.


class Pieces(NamedTuple):
    """The parts of a layer's experts that are each computed as one."""

    units: int  # Of each piece.
    holders: tuple[tuple[int, ...], ...]  # Of each piece, its owner first.


def pieces_of(layout: Layout, layer: int, parts: int) -> Pieces:
    """`parts`: units of an expert."""
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
    """Which rank computes each run of the pieces with copies: the one with least to do, and of
    equal ones the first holder. `runs`: how many each piece has in this batch. Every rank finds the
    same.
    """
    loads: dict[int, int] = {}
    shared = []
    for piece, (count, ranks) in enumerate(zip(runs, holders, strict=True)):
        if len(ranks) > 1 and count:
            shared.append(piece)
        loads[ranks[0]] = loads.get(ranks[0], 0) + (count if len(ranks) == 1 else 0)
    found: dict[int, list[int]] = {}
    # Pieces with fewer holders first: the others can go round them.
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
    """The load of each rank where that of each piece is divided among its holders as evenly as they
    allow: no other division has a smaller largest load.
    """
    return _division(loads, holders, ranks).loads


class _Division(NamedTuple):
    loads: dict[int, float]  # Of each rank.
    shares: dict[int, dict[int, float]]  # Of each piece with copies, the load on each holder.


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
    # Each piece in turn as the others are: this ends where the sum of squares is least, and with it
    # the largest load.
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
    """The level to which an amount fills vessels with floors at these heights, in ascending
    order.
    """
    below = 0.0
    for count, height in enumerate(heights, 1):
        below += height
        level = (amount + below) / count
        if count == len(heights) or level <= heights[count]:
            return level
    raise AssertionError("there is a vessel")


def fullest(layout: Layout, units: Units, tiles: Tiles) -> tuple[float, float]:
    """Load of the fullest rank and of the mean one, each added up over the layers with experts:
    ranks wait for each other in every layer.
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
    """How many times as much as the mean rank the fullest has to do; 1.0: nothing is counted."""
    most, mean = fullest(layout, units, tiles)
    return most / mean if mean else 1.0


def _piece_loads(pieces: Pieces, tiles: Sequence[float], units: Units) -> list[float]:
    """Tiles of units, by piece."""
    each = units.expert_parts // pieces.units
    return [pieces.units * load for load in tiles for _ in range(each)]


class Rebalanced(NamedTuple):
    layout: Layout  # The same object where nothing is worth a change.
    lacks_room: bool  # More copies would pay, and no rank has room for them.


class TileHistory:
    """How many tiles each expert has had, of which older ones count less."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._noted_s = 0.0
        self.tiles: list[list[float]] = []  # As `Tiles`.

    def note(self, more: Tiles, now_s: float) -> None:
        """`more`: since the last time, of as many layers and experts as ever."""
        kept = 0.5 ** ((now_s - self._noted_s) / self._half_life_s) if self.tiles else 0.0
        before = self.tiles or [[0.0] * len(own) for own in more]
        self.tiles = [
            [kept * count + new for count, new in zip(counts, own, strict=True)]
            for counts, own in zip(before, more, strict=True)
        ]
        self._noted_s = now_s

    @property
    def telling(self) -> Tiles:
        """Those of layers in which enough were counted to tell experts apart."""
        return [own if sum_in_order(own) >= _TELLING * len(own) else () for own in self.tiles]


def rebalance(layout: Layout, units: Units, tiles: Tiles, room: Mapping[int, int]) -> Rebalanced:
    """The layout with those copies of experts that pay. `room`: bytes of copies that each rank may
    have. Copies that do not help are given up, then the most helpful ones are made, one after the
    other, and kept if the fullest ranks have less to do by a few percent, over all layers. It never
    has more to do than before where the present copies have room; again at the same counts, it
    changes nothing.
    """
    found = layout
    while (later := _better(found, units, tiles, room)).layout is not found:
        found = later.layout
    if found is not layout:
        found = replace(found, number=layout.number + 1)
    return Rebalanced(found, later.lacks_room)


def _better(layout: Layout, units: Units, tiles: Tiles, room: Mapping[int, int]) -> Rebalanced:
    """One round of `rebalance`; a further one may find copies that are better by a few percent."""
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
    """Copies as they are tried."""

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
        # Of layers of which nothing is counted they stay as they are.
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
        """Give up copies on ranks with more than they have room for, those that matter least."""
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
        """Make copies that help, and give up those that do not beside later ones. Returns whether
        more would help, with more room.
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
        """Make copies as long as any helps. Returns whether more would, with more room."""
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
            # The rank has less room now, also for copies of other layers.
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
    units: int  # Of a piece.
    holders: list[tuple[int, ...]]
    ranks: tuple[int, ...]
    bytes_of: list[int]
    tiles: list[float]  # Of each piece.
    division: _Division = field(init=False)

    def __post_init__(self) -> None:
        self.division = _division(self.tiles, self.holders, self.ranks)

    @property
    def loads(self) -> dict[int, float]:
        return self.division.loads

    def copies(self) -> list[tuple[int, int]]:
        """Piece and rank of each."""
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
        """The copy after which the loads are most even, if that is worth it; and whether one on a
        rank without room would have been worth it.
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
        """The part of a piece's load that these ranks have."""
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
