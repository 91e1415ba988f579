"""Deadlines of a stream's next token: the service level objective of section `slo`, or of the
client's own headers.

The end-to-end deadline is that of the last token, so the next one is due as much earlier as the
rest of the output takes: the tokens that the request still allows, at the stream's own pace. Where
these would have been late without the failure, too, the limit of the request says nothing about the
end of its output, and only the next token is held against the deadline.
"""

from collections.abc import Iterable
from math import inf

from kvrs.config.policy import SloSettings
from kvrs.core.model import events as ev
from kvrs.core.model.streams import Stream


def deadlines_of(requested: ev.Deadlines, slo: SloSettings) -> ev.Deadlines:
    """The client's limits, and the operator's where the client named none."""
    return ev.Deadlines(
        ttft_s=slo.ttft_s if requested.ttft_s is None else requested.ttft_s,
        recovery_gap_s=slo.recovery_gap_s
        if requested.recovery_gap_s is None
        else requested.recovery_gap_s,
        end_to_end_s=slo.deadline_s if requested.end_to_end_s is None else requested.end_to_end_s,
    )


def due_s(stream: Stream) -> float:
    """The time by which the next token must have come."""
    return _due_s(stream, stream.deadlines)


def _due_s(stream: Stream, deadlines: ev.Deadlines) -> float:
    due = inf
    if not stream.first_token_sent:
        if deadlines.ttft_s is not None:
            due = stream.arrived_s + deadlines.ttft_s
    elif deadlines.recovery_gap_s is not None and stream.recovery.failed_at_s is not None:
        due = stream.recovery.failed_at_s + deadlines.recovery_gap_s
    if deadlines.end_to_end_s is not None:
        due = min(due, stream.arrived_s + deadlines.end_to_end_s - _reserved_s(stream, deadlines))
    return due


def _reserved_s(stream: Stream, deadlines: ev.Deadlines) -> float:
    """The part of the end-to-end deadline that the output behind the next token needs."""
    failed_at_s, rest_s = stream.recovery.failed_at_s, stream.rest_s
    assert deadlines.end_to_end_s is not None
    ends_s = stream.arrived_s + deadlines.end_to_end_s
    return rest_s if failed_at_s is not None and failed_at_s + rest_s <= ends_s else 0.0


def by_urgency(streams: Iterable[Stream]) -> list[Stream]:
    """The most urgent first. By the deadlines that are common to all tenants each tenant has its
    places in the order, and its streams take them by the deadlines of their own: a tenant that
    names tight ones overtakes itself only.
    """
    ordered = list(streams)
    if len(ordered) < 2:
        return ordered
    ordered.sort(key=lambda stream: (due_s(stream), stream.number))
    if all(stream.tenant == ordered[0].tenant for stream in ordered):
        return ordered
    of_tenant: dict[str, list[Stream]] = {}
    for stream in ordered:
        of_tenant.setdefault(stream.tenant, []).append(stream)
    next_of = {tenant: iter(own) for tenant, own in of_tenant.items()}
    return [next(next_of[stream.tenant]) for stream in sorted(ordered, key=_place)]


def _place(stream: Stream) -> tuple[float, int]:
    return _due_s(stream, stream.common_deadlines), stream.number


def tightest(stream: Stream) -> str:
    """The deadline that is due first, in words."""
    deadlines, due = stream.deadlines, due_s(stream)
    if due == inf:
        return "no limit"
    if deadlines.end_to_end_s is not None:
        reserved_s = _reserved_s(stream, deadlines)
        if due == stream.arrived_s + deadlines.end_to_end_s - reserved_s:
            rest = f", {reserved_s:.1f} s of them for the rest of its output" if reserved_s else ""
            return f"{deadlines.end_to_end_s:g} s in all{rest}"
    if not stream.first_token_sent:
        return f"{deadlines.ttft_s:g} s to its first token"
    return f"a pause of {deadlines.recovery_gap_s:g} s"
