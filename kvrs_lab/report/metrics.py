"""Latencies at the client, in the field's terms, from the client's times in `StreamRecord`s.

TTFT: first token minus send; from arrival, first token minus due time, which counts a late client,
too. TPOT: mean time per token after the first. TBT: time between two consecutive receipts of
tokens; the longest of a stream is its maximum TBT. Percentiles interpolate linearly between closest
ranks (numpy's default): the q-th of n sorted values lies at rank q/100 * (n - 1).
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvrs.sums import sum_in_order
from kvrs_lab.traces.records import StreamRecord

# A request that is sent later than this after its due time shows a slow client.
LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits on a complete request that count for goodput."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Pause:
    """A client's wait between two tokens of its stream, between which the stream is recovered."""

    from_s: float
    to_s: float

    @property
    def length_s(self) -> float:
        return self.to_s - self.from_s


def percentile(values: Iterable[float], q: float) -> float | None:
    """The q-th percentile; None for no values, since 0 would look like a good result."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = q / 100 * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


def spread(values: Iterable[float | None]) -> dict[str, float | None]:
    """Mean, p50, p90, p99 and maximum of the values that exist."""
    known = [value for value in values if value is not None]
    mean = sum_in_order(known) / len(known) if known else None
    known.sort()
    return {
        "mean": mean,
        "p50": percentile(known, 50),
        "p90": percentile(known, 90),
        "p99": percentile(known, 99),
        "max": known[-1] if known else None,
    }


def ttft_s(record: StreamRecord) -> float | None:
    return record.token_times_s[0] - record.sent_s if record.token_times_s else None


def arrival_ttft_s(record: StreamRecord) -> float | None:
    """Seconds from the due time of the request to its first token."""
    return record.token_times_s[0] - record.due_s if record.token_times_s else None


def replay_ttft_s(record: StreamRecord, decided_s: float) -> float | None:
    """Seconds from arrival to the first token of the attempt that was decided at `decided_s` (LUMEN
    section 3: "replay TTFT").
    """
    first = next((at_s for at_s in record.token_times_s if at_s > decided_s), None)
    return None if first is None else first - record.due_s


def tpot_s(record: StreamRecord) -> float | None:
    times_s = record.token_times_s
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None


def latency_s(record: StreamRecord) -> float | None:
    """Seconds from the due time of the request to its end."""
    return record.ended_s - record.due_s if record.completed else None


def max_gap_s(record: StreamRecord) -> float | None:
    return max(gaps_s(record), default=None)


def gaps_s(record: StreamRecord) -> list[float]:
    """All times between tokens."""
    return [later - earlier for earlier, later in pairwise(record.token_times_s)]


def pause_of(record: StreamRecord, decided_s: float, produced_tokens: int) -> Pause | None:
    """The wait between the last token before a recovery and the first token after it; None: no
    earlier token, so that the wait is part of TTFT, or no later token.

    The first `produced_tokens` tokens came before the recovery's decision at `decided_s`, though
    some may have reached the client later. Events without token ids are told apart by their times.
    """
    times_s = record.token_times_s
    before = produced_tokens if record.token_ids else bisect_right(times_s, decided_s)
    return Pause(*times_s[before - 1 : before + 1]) if 0 < before < len(times_s) else None


def fault_to_first_token_s(
    victims: Iterable[tuple[StreamRecord, float]], fault_s: float
) -> float | None:
    """TFS: from the fault to the first token of any interrupted stream after its recovery decision.

    Args:
        victims: each interrupted stream with the time of its recovery decision. A token on its
            way at the instance's death is no success, and comes before the decision.
        fault_s: time of the fault.
    """
    resumed = (
        next((at_s for at_s in record.token_times_s if at_s > decided_s), None)
        for record, decided_s in victims
    )
    return min((at_s - fault_s for at_s in resumed if at_s is not None), default=None)


def duration_s(records: Sequence[StreamRecord]) -> float:
    """Seconds from the first send to the last end."""
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.sent_s for record in records)


def meets(record: StreamRecord, slo: Slo) -> bool:
    """Return whether a request is complete and within the SLO. A single token has no TPOT."""
    return (
        record.completed
        and (arrival_ttft_s(record) or 0.0) <= slo.ttft_s
        and (tpot_s(record) or 0.0) <= slo.tpot_s
    )


def goodput_per_s(records: Sequence[StreamRecord], slo: Slo) -> float:
    """Requests that meet the SLO, per second of the run."""
    run_s = duration_s(records)
    return sum(meets(record, slo) for record in records) / run_s if run_s > 0 else 0.0


def request_rates(records: Sequence[StreamRecord]) -> tuple[float, float] | None:
    """Requests per second of the trace and of the client; None: no rate."""
    due = sorted(record.due_s for record in records)
    sent = sorted(record.sent_s for record in records)
    if len(due) < 2 or due[0] == due[-1] or sent[0] == sent[-1]:
        return None
    return (len(due) - 1) / (due[-1] - due[0]), (len(sent) - 1) / (sent[-1] - sent[0])


def summary(records: Sequence[StreamRecord], slo: Slo) -> dict[str, object]:
    """The measures of one run for the report."""
    tokens = sum(record.tokens for record in records)
    run_s = duration_s(records)
    rates = request_rates(records)
    return {
        "streams": len(records),
        "completed": sum(record.completed for record in records),
        "errors": sum(not record.completed for record in records),
        "tokens": tokens,
        "duration_s": run_s,
        "tokens_per_s": tokens / run_s if run_s > 0 else 0.0,
        "goodput_per_s": goodput_per_s(records, slo),
        "slo_met": sum(meets(record, slo) for record in records),
        "asked_per_s": rates[0] if rates else None,
        "offered_per_s": rates[1] if rates else None,
        "late": sum(record.lag_s > LATE_S for record in records),
        "ttft_s": spread(map(ttft_s, records)),
        "arrival_ttft_s": spread(map(arrival_ttft_s, records)),
        "tpot_s": spread(map(tpot_s, records)),
        "tbt_s": spread(gap for record in records for gap in gaps_s(record)),
        "max_gap_s": spread(map(max_gap_s, records)),
        "latency_s": spread(map(latency_s, records)),
        "lag_s": spread(record.lag_s for record in records),
    }
