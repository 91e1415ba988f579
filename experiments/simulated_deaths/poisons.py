"""Outages that no request caused, and poisoned requests that come at once, in virtual time: both
sides of `recovery.poison_deaths`.

python -m experiments.simulated_deaths.poisons [--outages 40] [--attacks 30] [--out DIR]
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.record import Record
from kvrs.sim.scenarios import outage, poisons_at_once
from kvrs.sim.world import World

ALLOWED = (2, 3)  # `recovery.poison_deaths`.
SPREADS_S = (0.0, 0.06, 0.3)
# Pairs, requests per second, and whether all instances are back soon.
ATTACKS = ((4, 10.0, False), (4, 30.0, False), (4, 30.0, True), (6, 10.0, False))
POISONS = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """Worlds that differ in their seed only."""

    name: str
    allowed: int
    is_attack: bool
    make: Callable[[int], World]


def cells() -> list[Cell]:
    found = []
    for allowed in ALLOWED:
        for spread_s in SPREADS_S:
            for both in (False, True):
                roles = "eight of both stages" if both else "four pairs"
                name = f"outage within {1000 * spread_s:.0f} ms, {roles}"
                found.append(Cell(name, allowed, False, _outages(allowed, spread_s, both=both)))
        for pairs, per_s, are_back in ATTACKS:
            name = f"three poisons, {pairs} pairs, {per_s:.0f}/s" + (", all back" * are_back)
            stay_away = 0.0 if are_back else 0.1
            found.append(Cell(name, allowed, True, _attacks(allowed, pairs, per_s, stay_away)))
    return found


def _outages(allowed: int, spread_s: float, *, both: bool) -> Callable[[int], World]:
    return lambda seed: outage(seed, spread_s, both=both, poison_deaths=allowed)


def _attacks(allowed: int, pairs: int, per_s: float, stay_away: float) -> Callable[[int], World]:
    return lambda seed: poisons_at_once(
        seed, pairs, per_s, poison_deaths=allowed, stay_away=stay_away
    )


def measure(cell: Cell, seeds: Iterable[int]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cell": cell.name,
        "allowed": cell.allowed,
        "is_attack": cell.is_attack,
        "worlds": 0,
        "recovered": 0,
        "innocents_refused": 0,
        "innocents_lost": 0,
        "not_taken": 0,  # New requests, because the queues were too long.
        "poisons": 0,
        "poisons_refused": 0,
        "deaths": 0,
        "deaths_of_one_request": 0,
    }
    first_tokens_s: list[float] = []
    for seed in seeds:
        world = cell.make(seed)
        outcome = world.run()
        row["worlds"] += 1
        row["recovered"] += outcome.recovered_streams
        row["innocents_refused"] += outcome.innocents_refused
        row["innocents_lost"] += outcome.innocents_lost
        row["not_taken"] += outcome.ended["overloaded"]
        row["poisons"] += POISONS * cell.is_attack
        row["poisons_refused"] += outcome.ended["poison"] - outcome.innocents_refused
        deaths = outcome.poison_deaths.values()
        row["deaths"] += sum(deaths)
        row["deaths_of_one_request"] = max(row["deaths_of_one_request"], *deaths, 0)
        first_tokens_s += [
            live.journal.first_token_s - live.journal.arrived_s
            for proxy in world.cluster.proxies
            for live in proxy.streams.values()
            if live.recoveries and live.journal.first_token_s is not None
        ]
    first_tokens_s.sort()
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        at = first_tokens_s[int(share * (len(first_tokens_s) - 1))] if first_tokens_s else 0.0
        row[f"ttft_of_recovered_s_{name}"] = round(at, 3)
    return row


def is_met(row: dict[str, Any]) -> bool:
    """The bars: no innocent stream is refused or lost, and no request ends more than allowed."""
    return (
        not row["innocents_refused"]
        and not row["innocents_lost"]
        and row["deaths_of_one_request"] <= row["allowed"]
        and row["poisons_refused"] == row["poisons"]
    )


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'':42}{'allowed':>9}{'worlds':>8}{'recovered':>11}{'innocents':>11}{'deaths of':>11}"
        f"{'deaths':>8}{'not':>7}{'TTFT of recovered, s':>22}",
        f"{'':42}{'deaths':>9}{'':>8}{'':>11}{'refused':>11}{'one':>11}{'':>8}{'taken':>7}"
        f"{'p50':>8}{'p99':>7}{'max':>7}",
    ]
    for row in rows:
        one = row["deaths_of_one_request"] if row["is_attack"] else "-"
        deaths = row["deaths"] if row["is_attack"] else "-"
        times = [row[f"ttft_of_recovered_s_{name}"] for name in ("p50", "p99", "max")]
        lines.append(
            f"{row['cell']:42}{row['allowed']:>9}{row['worlds']:>8}{row['recovered']:>11,}"
            f"{row['innocents_refused']:>11}{one:>11}{deaths:>8}{row['not_taken']:>7}"
            f"{times[0]:>8.2f}{times[1]:>7.2f}{times[2]:>7.2f}"
            + ("" if is_met(row) else "  MISSED")
        )
    for allowed in ALLOWED:
        of = [row for row in rows if row["allowed"] == allowed]
        outages = [row for row in of if not row["is_attack"]]
        attacks = [row for row in of if row["is_attack"]]
        refused = sum(row["innocents_refused"] for row in outages)
        lost = sum(row["innocents_lost"] for row in of)
        worlds = sum(row["worlds"] for row in attacks)
        victims, deaths = (
            sum(row[what] for row in rows)
            for what, rows in (("recovered", outages), ("deaths", attacks))
        )
        lines.append(
            f"{allowed} deaths allowed: {refused} of {victims:,} victims of outages refused; "
            f"{deaths:,} instances ended in {worlds} attacks; {lost} streams lost that had ended "
            f"nothing"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outages", type=int, default=40, help="worlds of each outage")
    parser.add_argument("--attacks", type=int, default=30, help="worlds of each attack")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = Record(0, max(options.outages, options.attacks) - 1, timed=False)
    rows = []
    for cell in cells():
        seeds = range(options.attacks if cell.is_attack else options.outages)
        rows.append(measure(cell, seeds))
        print(f"{cell.name}, {cell.allowed} deaths allowed: done", flush=True)
    text = as_text(rows)
    print(text)
    record.keep(options.out, "poisons", {"rows": rows}, text)
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
