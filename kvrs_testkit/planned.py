"""The bytes of a plan, by rank and by kind of unit."""

from collections import defaultdict

from kvrs_engine.elastic.plans import HOST, MovePlan
from kvrs_engine.elastic.units import UnitKind


def host_bytes_by_rank(plan: MovePlan, *kinds: UnitKind) -> dict[int, int]:
    """Return the bytes that each rank of the next layout reads from the host, of the given kinds
    (none: of all kinds).
    """
    read = dict.fromkeys(plan.after.ranks, 0)
    for move in plan.moves:
        if move.source == HOST and (not kinds or move.unit.kind in kinds):
            read[move.target] += move.bytes
    return read


def bytes_by_kind(plan: MovePlan) -> dict[UnitKind, tuple[int, int]]:
    """Return the bytes (from the host, between ranks) by kind."""
    moved: dict[UnitKind, list[int]] = defaultdict(lambda: [0, 0])
    for move in plan.moves:
        moved[move.unit.kind][move.source != HOST] += move.bytes
    return {kind: (host, peer) for kind, (host, peer) in sorted(moved.items())}
