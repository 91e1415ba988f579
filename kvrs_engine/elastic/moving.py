"""The predicted start and end of each move of a plan, and the makespan.

A rank has three channels: reading from the host, sending to a rank and receiving from a rank. Each
channel carries one move at a time, and the three run in parallel. Reads for which other ranks wait
go first.
"""

from collections import defaultdict
from dataclasses import dataclass

from kvrs_engine.elastic.plans import HOST, Move, MovePlan


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Transfer rates from the host into one rank, and between two ranks."""

    host_bytes_per_s: float
    peer_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Timed:
    move: Move
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    timed: tuple[Timed, ...]  # In order of start.
    makespan_s: float


def schedule(plan: MovePlan, rates: LinkRates) -> Schedule:
    """Schedule each rank's reads one after the other, and the copies in the order in which their
    bytes become available, each as soon as both ends are free.
    """
    awaited = {_bytes_at(move, move.source) for move in plan.moves if move.source != HOST}
    reads = [move for move in plan.moves if move.source == HOST]
    reads.sort(key=lambda move: _bytes_at(move, move.target) not in awaited)
    free_s: dict[tuple[str, int], float] = defaultdict(float)
    timed: list[Timed] = []
    there_s: dict[tuple[object, ...], float] = {}

    def carry_out(move: Move, ready_s: float) -> None:
        channels = _channels(move)
        start_s = max(ready_s, *(free_s[channel] for channel in channels))
        end_s = start_s + _seconds(move, rates)
        free_s.update(dict.fromkeys(channels, end_s))
        there_s[_bytes_at(move, move.target)] = end_s
        timed.append(Timed(move, start_s, end_s))

    for move in reads:
        carry_out(move, 0.0)
    copies = [
        (there_s.get(_bytes_at(move, move.source), 0.0), at)
        for at, move in enumerate(plan.moves)
        if move.source != HOST
    ]
    for ready_s, at in sorted(copies):
        carry_out(plan.moves[at], ready_s)
    timed.sort(key=lambda each: each.start_s)
    return Schedule(tuple(timed), max((each.end_s for each in timed), default=0.0))


def _channels(move: Move) -> tuple[tuple[str, int], ...]:
    if move.source == HOST:
        return (("host", move.target),)
    return ("out", move.source), ("in", move.target)


def _seconds(move: Move, rates: LinkRates) -> float:
    rate = rates.host_bytes_per_s if move.source == HOST else rates.peer_bytes_per_s
    return move.bytes / rate


def _bytes_at(move: Move, rank: int) -> tuple[object, ...]:
    return move.unit, move.start, move.stop, rank
