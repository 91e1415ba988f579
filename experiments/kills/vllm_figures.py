"""Figures of a series at real vLLM: the waves of one option and kind of death make a row, whose
faults are the parts of the claim that it does not bear out.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from rich.table import Table

from kvrs_lab.report import oracle
from kvrs_lab.report.oracle import StreamVerdict
from kvrs_lab.traces.records import ReplayRequest, StreamRecord

HIT_AT_LEAST = 8
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Death(StrEnum):
    HANG = "hang"  # SIGSTOP of the whole server; it wakes when its streams have ended elsewhere.
    SERVER = "server"  # SIGKILL of the whole server: connections break.
    WORKER = "worker"  # SIGKILL of its worker process: HTTP 200, an error event, [DONE].


ON_THEIR_WAY_S = 0.05  # Tokens of a server may still be when it is hit.


@dataclass
class Wave:
    """One wave of streams and the death in it."""

    option: str
    death: Death
    victim: str
    struck_s: float  # When it was hit, since the start of the wave.
    streams: list[dict[str, Any]]  # The proxy's rows of those that were open then.
    requests: Sequence[ReplayRequest]
    records: list[StreamRecord]
    recoveries: list[dict[str, Any]]
    # By the other decode servers, from the hit to the end of the wave.
    pulled_tokens: float
    pulled_bytes: float
    ended: list[str]  # Other decode servers that are not there any more.

    @property
    def hit(self) -> int:
        """Streams on the victim as it was hit."""
        there = [each for each in self.streams if each["decode"] == self.victim]
        return len(there) - self.ended_first

    @property
    def ended_first(self) -> int:
        """Streams that were there a moment before, and had sent their last token by then."""
        recovered = {row["stream"] for row in self.recoveries}
        return sum(
            each["decode"] == self.victim
            and each["id"] not in recovered
            and (record := self.records[self.index(each)]).completed
            and record.ended_s <= self.struck_s + ON_THEIR_WAY_S
            for each in self.streams
        )

    def index(self, stream: dict[str, Any]) -> int:
        """Request of an open stream: vLLM's chunks have ids of their own, and sizes are unique."""
        sizes = [(len(each.prompt_ids), each.max_tokens) for each in self.requests]
        return sizes.index((stream["prompt_tokens"], stream["max_tokens"]))

    def recovered(self, option: str | None = None) -> Iterator[tuple[dict[str, Any], int]]:
        """Recoveries of streams that were open then, and their requests; all, or by one option."""
        of_streams = {each["id"]: self.index(each) for each in self.streams}
        for row in self.recoveries:
            if row["stream"] in of_streams and option in (None, row["option"]):
                yield row, of_streams[row["stream"]]

    def history_tokens(self, recovery: dict[str, Any], index: int) -> int:
        return len(self.requests[index].prompt_ids) + int(recovery["produced_tokens"])


def figures_of(
    waves: Sequence[tuple[Wave, Sequence[StreamRecord]]], kills_per_hour: float
) -> dict[str, Any]:
    """A row of the table: waves of one option and kind of death, each with its undisturbed records.

    `moved_tokens` is what the migrated streams had: so much the other servers must have pulled.
    """
    first = waves[0][0]
    of_waves = [(wave, oracle.judge(wave.records, clean)) for wave, clean in waves]
    verdicts = [each for _, judged in of_waves for each in judged]
    difference = oracle.total(verdicts)
    recoveries = [(wave, row) for wave, _ in waves for row in wave.recoveries]
    gaps_s = sorted(row["gap_s"] for _, row in recoveries if row["gap_s"] is not None)
    return {
        "option": first.option,
        "death": first.death.value,
        "kills": len(waves),
        "kills_per_hour": round(kills_per_hour),
        "streams": len(verdicts),
        "hit": sum(wave.hit for wave, _ in waves),
        "ended_first": sum(wave.ended_first for wave, _ in waves),
        "recoveries": dict(Counter(row["option"] for _, row in recoveries)),
        "causes": dict(Counter(_NUMBER.sub("N", row["cause"]) for _, row in recoveries)),
        "exact": sum(verdict.exact for verdict in verdicts),
        "errors": sum(not record.completed for wave, _ in waves for record in wave.records),
        "lost": difference.lost,
        "repeated": difference.repeated,
        "different": difference.different,
        "text_different": sum(not verdict.text_equal for verdict in verdicts),
        "moved_tokens": sum(
            wave.history_tokens(*recovered)
            for wave, _ in waves
            for recovered in wave.recovered("migrate")
        ),
        "pulled_tokens": round(sum(wave.pulled_tokens for wave, _ in waves)),
        "pulled_bytes": round(sum(wave.pulled_bytes for wave, _ in waves)),
        "gap_s_p50": round(gaps_s[len(gaps_s) // 2], 3) if gaps_s else None,
        "gap_s_max": round(gaps_s[-1], 3) if gaps_s else None,
        **_of_others(of_waves),
    }


def _of_others(waves: Sequence[tuple[Wave, list[StreamVerdict]]]) -> dict[str, Any]:
    """Streams and servers that were not hit."""
    bystanders = harmed = 0
    gaps_s = [0.0]
    for wave, verdicts in waves:
        recovered = {index for _, index in wave.recovered()}
        harmed += len(wave.recoveries) - len([*wave.recovered()])  # Before the death.
        for stream in wave.streams:
            if stream["decode"] == wave.victim:
                continue
            index = wave.index(stream)
            bystanders += 1
            harmed += index in recovered or not verdicts[index].exact
            gaps_s += [
                later - earlier for earlier, later in pairwise(wave.records[index].token_times_s)
            ]
    return {
        "bystanders": bystanders,
        "bystanders_harmed": harmed,
        "bystander_gap_s_max": round(max(gaps_s), 3),
        "engines_ended": sum(len(wave.ended) for wave, _ in waves),
    }


def faults_of(row: dict[str, Any]) -> list[str]:
    """The parts of the claim that a row does not bear out; empty when all of it holds."""
    option, hit, recoveries, faults = row["option"], row["hit"], row["recoveries"], []
    if row["exact"] != row["streams"]:
        faults.append(f"{row['exact']} of {row['streams']} streams are exact")
    if hit < HIT_AT_LEAST:
        faults.append(f"only {hit} streams were hit")
    if recoveries.get(option, 0) < hit:
        faults.append(f"{recoveries.get(option, 0)} of {hit} streams were recovered by {option}")
    if option == "migrate" and row["pulled_tokens"] < row["moved_tokens"]:
        faults.append(
            f"{row['moved_tokens']} tokens were to be moved, {row['pulled_tokens']} were pulled"
        )
    if option == "recompute" and row["pulled_tokens"]:
        faults.append(f"{row['pulled_tokens']} tokens were pulled")
    return faults + [
        f"{row[name]} {name}" for name in ("bystanders_harmed", "engines_ended") if row[name]
    ]


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in _TIMES}


_TIMES = ("kills_per_hour", "gap_s_p50", "gap_s_max", "bystander_gap_s_max")
COLUMNS = {
    "kills": "kills",
    "streams": "streams",
    "hit": "hit",
    "exact": "exact",
    "lost": "lost",
    "repeated": "repeated",
    "other": "different",
    "to move": "moved_tokens",
    "pulled": "pulled_tokens",
    "bystanders": "bystanders",
    "harmed": "bystanders_harmed",
}


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    is_timed = all(name in row for row in rows for name in _TIMES)
    times = ("their gap s", "gap p50/max s") if is_timed else ()
    table = Table("option", "death", *COLUMNS, *times)
    for row in rows:
        cells = [str(row[key]) for key in COLUMNS.values()]
        if is_timed:
            gaps = f"{row['gap_s_p50']} / {row['gap_s_max']}"
            cells += [str(row["bystander_gap_s_max"]), gaps]
        table.add_row(row["option"], row["death"], *cells)
    return table
