"""The share of a trace that a prefix cache could have served."""

from kvrs_lab.traces.mooncake import Trace


def prefix_hit_ratio(trace: Trace) -> float:
    """Blocks that an infinite prefix cache would have held already, divided by all blocks."""
    seen: set[int] = set()
    hits = total = 0
    for request in trace.requests:
        new_from = next(
            (i for i, hash_id in enumerate(request.hash_ids) if hash_id not in seen),
            len(request.hash_ids),
        )
        hits += new_from
        total += len(request.hash_ids)
        seen.update(request.hash_ids)
    return hits / total if total else 0.0
