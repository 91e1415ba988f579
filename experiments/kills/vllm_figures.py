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
from kvrs_testkit.vllm_servers import PAGE_TOKENS

HIT_AT_LEAST = 8
# A stream's last blocks may not have been sent yet when death comes.
BEHIND_BLOCKS = 2
UNPROTECTED_SHARE = 0.05  # As when the agent had just died.
FETCHING = ("restore", "split")
# `auto` restores a stream at the node that has its pages, where nothing has to cross a link.
SPLIT_SHARE = 0.25
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Death(StrEnum):
    HANG = "hang"  # SIGSTOP of the whole server; it wakes when its streams have ended elsewhere.
    SERVER = "server"  # SIGKILL of the whole server: connections break.
    WORKER = "worker"  # SIGKILL of its worker process: HTTP 200, an error event, [DONE].
    NODE = "node"  # SIGKILL of the server and of its node's agent.


ON_THEIR_WAY_S = 0.05  # Tokens of a server may still be when it is hit.


class Damage(StrEnum):
    """The damage to pages that agents hold when death comes."""

    FLIP = "flip"  # One bit of every fifth page: the checksum is wrong, and the page is not used.
    NEGATE = "negate"  # All numbers of all pages, with right checksums: tails of streams change.


@dataclass
class Wave:
    """One wave of streams and the death in it."""

    option: str
    death: Death
    damage: Damage | None
    victim: str
    struck_s: float  # When it was hit, since the start of the wave.
    streams: list[dict[str, Any]]  # The proxy's rows of those that were open then.
    requests: Sequence[ReplayRequest]
    records: list[StreamRecord]
    recoveries: list[dict[str, Any]]
    # By the other decode servers, from the hit to the end of the wave.
    pulled_tokens: float
    pulled_bytes: float
    damaged_pages: int
    ended: list[str]  # Other decode servers that are not there any more.
    off_reasons: list[str]  # Of their connectors.
    withdrawn: list[str]  # Why self-tests have withdrawn restore from servers.

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
        "damage": None if first.damage is None else first.damage.value,
        "kills": len(waves),
        "kills_per_hour": round(kills_per_hour),
        "streams": len(verdicts),
        "hit": sum(wave.hit for wave, _ in waves),
        "ended_first": sum(wave.ended_first for wave, _ in waves),
        "recoveries": dict(Counter(row["option"] for _, row in recoveries)),
        "unprotected": dict(
            Counter(
                stream["unprotected"] or "nothing sent yet"
                for wave, _ in waves
                for stream in wave.streams
                if stream["decode"] == wave.victim and not any(stream["protected"].values())
            )
        ),
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
        **_of_pages(of_waves),
        **_of_others(of_waves),
    }


def _of_pages(waves: Sequence[tuple[Wave, list[StreamVerdict]]]) -> dict[str, Any]:
    """Pages of checkpoints, in tokens. `full_blocks_tokens` could be loaded at most."""
    found, nothing_loaded = Counter[str](), Counter[str]()
    for wave, verdicts in waves:
        found["damaged_pages"] += wave.damaged_pages
        loaded = set()
        for row, index in wave.recovered():
            found["loaded_tokens"] += row["loaded_tokens"] or 0
            found["computed_tokens"] += row["computed_tokens"] or 0
            if row["loaded_tokens"]:
                loaded.add(index)
        for option in FETCHING:
            for row, index in wave.recovered(option):
                blocks = (wave.history_tokens(row, index) - 1) // PAGE_TOKENS
                found["full_blocks_tokens"] += (blocks - _first_page(row)) * PAGE_TOKENS
                if not row["loaded_tokens"]:
                    why = row["fetch_fault"] or "not reported"
                    nothing_loaded[_NUMBER.sub("N", why)] += 1
        found["loaded_streams"] += len(loaded)
        found["loaded_streams_exact"] += sum(verdicts[index].exact for index in loaded)
    names = ("full_blocks_tokens", "loaded_tokens", "computed_tokens", "loaded_streams")
    counts = {name: found[name] for name in (*names, "loaded_streams_exact", "damaged_pages")}
    return counts | {"nothing_loaded": dict(nothing_loaded)}


def _first_page(recovery: dict[str, Any]) -> int:
    """Where what is loaded begins: behind the front of a split."""
    chosen = recovery["option"]
    return int(
        next(each["first_page"] for each in recovery["estimates"] if each["option"] == chosen)
    )


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
        "off_reasons": dict(Counter(each for wave, _ in waves for each in wave.off_reasons)),
        "withdrawn": dict(Counter(each for wave, _ in waves for each in wave.withdrawn)),
    }


def faults_of(row: dict[str, Any]) -> list[str]:
    """The parts of the claim that a row does not bear out; empty when all of it holds."""
    option, hit, recoveries, damage = row["option"], row["hit"], row["recoveries"], row["damage"]
    # With negated pages streams of which some were loaded are to differ.
    changed = row["loaded_streams"] if damage == Damage.NEGATE else 0
    faults = []
    if row["exact"] != row["streams"] - changed:
        faults.append(f"{row['exact']} of {row['streams'] - changed} streams are exact")
    if damage == Damage.NEGATE and row["loaded_streams_exact"]:
        faults.append(f"{row['loaded_streams_exact']} streams did not use what was loaded")
    if hit < HIT_AT_LEAST:
        faults.append(f"only {hit} streams were hit")
    # A stream of which no agent has a page is recomputed.
    able = hit - sum(row["unprotected"].values()) if option in FETCHING else hit
    if recoveries.get(option, 0) < able * (SPLIT_SHARE if option == "split" else 1):
        faults.append(f"{recoveries.get(option, 0)} of {able} streams were recovered by {option}")
    if option == "migrate" and row["pulled_tokens"] < row["moved_tokens"]:
        faults.append(
            f"{row['moved_tokens']} tokens were to be moved, {row['pulled_tokens']} were pulled"
        )
    if option == "recompute" and row["pulled_tokens"]:
        faults.append(f"{row['pulled_tokens']} tokens were pulled")
    faults += _faults_of_fetches(row) if option in FETCHING else []
    faults += [
        f"{row[name]} {name}" for name in ("bystanders_harmed", "engines_ended") if row[name]
    ]
    return faults + [f"a connector is off: {reason}" for reason in row["off_reasons"]]


def _faults_of_fetches(row: dict[str, Any]) -> list[str]:
    loaded, full = row["loaded_tokens"], row["full_blocks_tokens"]
    if sum(row["unprotected"].values()) > UNPROTECTED_SHARE * row["hit"]:
        return [f"without a page at an agent: {row['unprotected']}"]
    if row["damage"] == Damage.FLIP:
        return [] if 0 < loaded < full else [f"{loaded} of {full} tokens loaded beside damage"]
    fetching = sum(row["recoveries"].get(option, 0) for option in FETCHING)
    behind = BEHIND_BLOCKS * PAGE_TOKENS * fetching
    return [] if full - behind <= loaded <= full else [f"{loaded} of {full} tokens were loaded"]


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
    "loaded": "loaded_tokens",
    "computed": "computed_tokens",
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
