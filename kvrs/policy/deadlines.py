"""Until when a stream must flow, or flow again: what its client was promised (section `slo`, or the client's own headers)."""

from collections.abc import Iterator
from math import inf

from kvrs.policy.config import SloSettings
from kvrs.policy.events import Deadlines
from kvrs.policy.streams import Stream


def deadlines_of(asked: Deadlines, slo: SloSettings) -> Deadlines:
    """What the client asked for, and the operator's promise where it asked for nothing."""
    return Deadlines(
        ttft_s=slo.ttft_s if asked.ttft_s is None else asked.ttft_s,
        recovery_gap_s=slo.recovery_gap_s if asked.recovery_gap_s is None else asked.recovery_gap_s,
        end_to_end_s=slo.deadline_s if asked.end_to_end_s is None else asked.end_to_end_s,
    )


def due_s(stream: Stream) -> float:
    """When the next token must have come."""
    return min((at_s for at_s, _ in _promises(stream)), default=inf)


def promise(stream: Stream) -> str:
    """In words, the one that is due first."""
    return min(_promises(stream), default=(inf, "no limit"))[1]


def _promises(stream: Stream) -> Iterator[tuple[float, str]]:
    deadlines = stream.deadlines
    if not stream.flowed:
        if deadlines.ttft_s is not None:
            yield stream.arrived_s + deadlines.ttft_s, f"{deadlines.ttft_s:g} s to its first token"
    elif deadlines.recovery_gap_s is not None and stream.failed_at_s is not None:
        yield stream.failed_at_s + deadlines.recovery_gap_s, f"a pause of {deadlines.recovery_gap_s:g} s"
    if deadlines.end_to_end_s is not None:
        yield stream.arrived_s + deadlines.end_to_end_s, f"{deadlines.end_to_end_s:g} s in all"
