"""Deadlines of a stream's next token: the service level objective of section `slo`, or of the
client's own headers.
"""

from collections.abc import Iterable, Iterator
from math import inf

from kvrs.config.policy import SloSettings
from kvrs.policy.model.events import Deadlines
from kvrs.policy.model.streams import Stream


def deadlines_of(requested: Deadlines, slo: SloSettings) -> Deadlines:
    """The client's limits, and the operator's where the client named none."""
    return Deadlines(
        ttft_s=slo.ttft_s if requested.ttft_s is None else requested.ttft_s,
        recovery_gap_s=slo.recovery_gap_s
        if requested.recovery_gap_s is None
        else requested.recovery_gap_s,
        end_to_end_s=slo.deadline_s if requested.end_to_end_s is None else requested.end_to_end_s,
    )


def due_s(stream: Stream) -> float:
    """The time by which the next token must have come."""
    return min((at_s for at_s, _ in _deadlines(stream, stream.deadlines)), default=inf)


def by_urgency(streams: Iterable[Stream]) -> list[Stream]:
    """The most urgent first. By the deadlines that are common to all tenants each tenant has its
    places in the order, and its streams take them by the deadlines of their own: a tenant that
    names tight ones overtakes itself only.
    """
    ordered = sorted(streams, key=lambda stream: (due_s(stream), stream.number))
    if all(stream.tenant == ordered[0].tenant for stream in ordered):
        return ordered
    of_tenant: dict[str, list[Stream]] = {}
    for stream in ordered:
        of_tenant.setdefault(stream.tenant, []).append(stream)
    next_of = {tenant: iter(own) for tenant, own in of_tenant.items()}
    return [next(next_of[stream.tenant]) for stream in sorted(ordered, key=_place)]


def _place(stream: Stream) -> tuple[float, int]:
    due = min((at_s for at_s, _ in _deadlines(stream, stream.common_deadlines)), default=inf)
    return due, stream.number


def tightest(stream: Stream) -> str:
    """The deadline that is due first, in words."""
    return min(_deadlines(stream, stream.deadlines), default=(inf, "no limit"))[1]


def _deadlines(stream: Stream, deadlines: Deadlines) -> Iterator[tuple[float, str]]:
    if not stream.first_token_sent:
        if deadlines.ttft_s is not None:
            yield stream.arrived_s + deadlines.ttft_s, f"{deadlines.ttft_s:g} s to its first token"
    elif deadlines.recovery_gap_s is not None and stream.recovery.failed_at_s is not None:
        at_s = stream.recovery.failed_at_s + deadlines.recovery_gap_s
        yield at_s, f"a pause of {deadlines.recovery_gap_s:g} s"
    if deadlines.end_to_end_s is not None:
        yield stream.arrived_s + deadlines.end_to_end_s, f"{deadlines.end_to_end_s:g} s in all"
