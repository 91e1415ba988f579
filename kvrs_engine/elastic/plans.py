"""Plans of the copies that change one layout into the next.

A rank keeps the units that it has, copies units that another living rank has, and reads the rest
from the host. Each byte is read once: if several ranks want a unit that no rank has, each reads a
piece and the pieces are exchanged (RaidServe 3.2), or one rank reads the unit and the others copy
it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import Unit, Units

HOST: Final = -1  # The host as the source of a move.
_ALIGNED_BYTES = 64  # Pieces of a unit begin at multiples of this size.


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of bytes `[start, stop)` of a unit into the memory of a rank."""

    unit: Unit
    start: int
    stop: int
    source: int  # A rank or HOST.
    target: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MovePlan:
    before: Layout
    after: Layout
    moves: tuple[Move, ...]

    @property
    def host_bytes(self) -> int:
        return sum(move.bytes for move in self.moves if move.source == HOST)

    @property
    def peer_bytes(self) -> int:
        return sum(move.bytes for move in self.moves if move.source != HOST)

    @property
    def moved_bytes(self) -> int:
        return self.host_bytes + self.peer_bytes


def plan(
    before: Layout,
    after: Layout,
    units: Units,
    dead: Collection[int] = (),
    arrived: Mapping[int, Collection[Unit]] = MappingProxyType({}),
    *,
    in_pieces: bool = True,
) -> MovePlan:
    """Plan the moves between two layouts of the same model and stages.

    `dead` are ranks whose memory is gone; other ranks outside `after` leave on purpose and can
    still be read. `arrived` are additional units of ranks, from an earlier plan that was
    interrupted. Without `in_pieces` all moves are of whole units, and a unit that no rank has is
    read by the rank with the fewest bytes read so far.
    """
    living = [rank for rank in before.ranks if rank not in dead]
    held = {rank: set(before.held(rank)) for rank in living}
    for rank, more in arrived.items():
        held.setdefault(rank, set()).update(more)
    sent: Counter[int] = Counter()
    read: Counter[int] = Counter()
    moves: list[Move] = []
    for unit, wanting in _wanted(after, held).items():
        if not (size := units.bytes_of(unit)):
            continue
        if holders := [rank for rank, own in held.items() if unit in own]:
            for target in wanting:
                source = min(holders, key=lambda rank: (sent[rank], rank))
                sent[source] += size
                moves.append(Move(unit, 0, size, source, target))
        elif in_pieces:
            moves += _read_once(unit, size, wanting, read)
        else:
            reader = min(wanting, key=lambda rank: (read[rank], rank))
            read[reader] += size
            moves.append(Move(unit, 0, size, HOST, reader))
            moves += [Move(unit, 0, size, reader, other) for other in wanting if other != reader]
    return MovePlan(before, after, tuple(moves))


def _wanted(after: Layout, held: Mapping[int, Collection[Unit]]) -> dict[Unit, list[int]]:
    """Return the ranks that lack each unit, in order of layers."""
    wanted: dict[Unit, list[int]] = {}
    for rank in after.ranks:
        for unit in sorted(after.held(rank) - frozenset(held.get(rank, ()))):
            wanted.setdefault(unit, []).append(rank)
    return dict(sorted(wanted.items(), key=lambda item: (item[0].layer, item[0])))


def _read_once(unit: Unit, size: int, wanting: list[int], read: Counter[int]) -> Iterator[Move]:
    """Have each rank read one piece and copy the others' pieces; the rank with the fewest bytes
    read so far reads the largest piece.
    """
    pieces = sorted(even_pieces(size, len(wanting)), key=lambda piece: piece[1] - piece[0])
    readers = sorted(wanting, key=lambda rank: (-read[rank], rank))
    for (start, stop), reader in zip(pieces, readers, strict=True):
        if start == stop:
            continue
        read[reader] += stop - start
        yield Move(unit, start, stop, HOST, reader)
        yield from (Move(unit, start, stop, reader, other) for other in wanting if other != reader)


def even_pieces(size: int, count: int) -> list[tuple[int, int]]:
    """Divide `[0, size)` into `count` consecutive ranges of about the same size."""
    bounds = [at * size // count // _ALIGNED_BYTES * _ALIGNED_BYTES for at in range(count)] + [size]
    return list(pairwise(bounds))
