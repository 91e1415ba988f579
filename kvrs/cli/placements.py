"""Placements of prompts at instances that had their beginning in the cache, read from an
event log.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from kvrs.core.event_log import LogEntry
from kvrs.core.incidents import Moment
from kvrs.core.model import actions as act


def placements(
    entries: Iterable[LogEntry], instance: str | None = None, from_utc: datetime | None = None
) -> dict[str, Any]:
    """Return the number of prompts that began at an instance with a cached part of them, and those
    that were placed there although another instance had a shorter queue; of the latter only those
    with `instance` as one of the two, and those from `from_utc` on.
    """
    starts = [
        (entry, each, each.plan.prefill or each.plan.decode)
        for entry in entries
        for each in entry.actions
        if isinstance(each, act.Start)
    ]
    return {
        "began_cached": sum(bool(each.cached.get(chosen)) for _, each, chosen in starts),
        "placed_by_prefix": [
            {
                "line": entry.line,
                "stream": each.stream,
                "instance": chosen,
                "cached_tokens": each.cached[chosen],
                "shortest_queue": other,
                "cached_there": tokens,
            }
            for entry, each, chosen in starts
            if chosen in each.cached
            for other, tokens in each.cached.items()
            if other != chosen
            and instance in (None, chosen, other)
            and (from_utc is None or _is_since(from_utc, entry))
        ],
    }


def _is_since(from_utc: datetime, entry: LogEntry) -> bool:
    at = Moment(entry.now_s, entry.wall_s).utc
    return at is not None and at >= from_utc
