"""Ranges of pages or tokens, in order and apart from each other."""

from collections.abc import Iterable


def union(spans: Iterable[range], first: int, end: int) -> tuple[range, ...]:
    """What at least one of the spans covers of `[first, end)`: ascending, and no two of them touch."""
    joined: list[range] = []
    for span in sorted(spans, key=lambda one: one.start):
        start, stop = max(span.start, first), min(span.stop, end)
        if start >= stop:
            continue
        if joined and start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, stop))
        else:
            joined.append(range(start, stop))
    return tuple(joined)


def at_least(spans: Iterable[range], first: int) -> tuple[range, ...]:
    """What of the spans is not before `first`."""
    return tuple(range(max(span.start, first), span.stop) for span in spans if span.stop > first)
