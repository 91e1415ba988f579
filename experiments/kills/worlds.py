"""Deaths in virtual time. Thousands of random worlds, each with random faults, worlds with every
kind of fault in turn, and worlds of one subject each, in which every invariant is checked; and both
sides of `recovery.poison_deaths`: outages that no request caused, and poisoned requests at once.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.record import Record
from kvrs.core.model import actions as act
from kvrs.sim.cluster import POISONED, Outcome
from kvrs.sim.command import deaths_of, rows
from kvrs.sim.scenarios import (
    KINDS,
    contended,
    in_turn,
    outage,
    poisoned,
    poisons_at_once,
    ranked,
    scenario,
    sick,
)
from kvrs.sim.world import World

# By scenario: outcomes, and what went wrong by seed.
Others = dict[str, tuple[list[Outcome], dict[int, str]]]
HIT_AT_LEAST = 8  # Streams that depend on the victims, of every kind of death.
OTHERS = 40  # Worlds of each other scenario.
ALLOWED = (2, 3)  # `recovery.poison_deaths`.
SPREADS_S = (0.0, 0.06, 0.3)
# Pairs, requests per second, and whether all instances are back soon.
ATTACKS = ((4, 10.0, False), (4, 30.0, False), (4, 30.0, True), (6, 10.0, False))
POISONS = 3
MOST_DEATHS = 9  # Of three poisoned requests, which are refused at the third each.


def all_complete(outcome: Outcome) -> str:
    """The fault that the invariants do not cover: streams that ended otherwise than complete."""
    return "" if set(outcome.ended) == {"complete"} else f"streams ended {dict(outcome.ended)}"


def each_kind_came(outcome: Outcome) -> str:
    """Streams may be refused for a deadline: some settings that are loaded ask for that."""
    missing = set(KINDS) - {hit.death for hit in outcome.hits}
    if not set(outcome.ended) <= {"complete", act.Reason.SLO.value}:
        return f"streams ended {dict(outcome.ended)}"
    return f"never came: {sorted(missing)}" if missing else ""


def few_deaths(outcome: Outcome) -> str:
    deaths = sum(hit.death == POISONED for hit in outcome.hits)
    if set(outcome.ended) != {"complete", "poison"} or outcome.ended["poison"] != 3:
        return f"streams ended {dict(outcome.ended)}"
    return f"{deaths} deaths of three poisoned requests" if deaths > MOST_DEATHS else ""


# By name: how a world is drawn, and what must hold of its outcome beside the invariants.
SCENARIOS: dict[str, tuple[Callable[[int], World], Callable[[Outcome], str]]] = {
    "in turn": (in_turn, each_kind_came),
    "ranks": (ranked, all_complete),
    "contended": (contended, lambda outcome: ""),
    "poisoned": (poisoned, few_deaths),
    "sick": (sick, all_complete),
}


def run_others(seeds: range) -> Others:
    """Each of them with each seed."""
    found: Others = {}
    for name, (make, wrong) in SCENARIOS.items():
        outcomes, broken = found[name] = [], {}
        for seed in seeds:
            try:
                outcomes.append(outcome := make(seed).run())
            except AssertionError as error:
                broken[seed] = repr(error)
            else:
                if what := wrong(outcome):
                    broken[seed] = what
        print(f"{name}: {len(seeds)} worlds, {len(broken)} of them wrong", flush=True)
    return found


def run(options: argparse.Namespace) -> int:
    count = options.seeds or 5000
    seeds = range(options.seed, options.seed + count)
    record = Record(seeds[0], seeds[-1], timed=False)
    begun_s, outcomes, broken = time.process_time(), list[Outcome](), dict[int, str]()
    for done, seed in enumerate(seeds, 1):
        try:
            outcomes.append(scenario(seed).run())
        except AssertionError as error:
            broken[seed] = repr(error)
        if done % 500 == 0:
            print(f"{done} of {count} worlds, {len(broken)} violated an invariant", flush=True)
    others = run_others(range(options.seed, options.seed + min(OTHERS, count)))
    text = as_text(outcomes, broken, others, time.process_time() - begun_s)
    print(text, end="")
    record.keep(options.out, "worlds", as_figures(outcomes, broken, others, seeds), text)
    deaths = deaths_of([*outcomes, *others["in turn"][0]])
    missed = [name for name in KINDS if deaths.get(name, (0, 0))[1] < HIT_AT_LEAST]
    wrong = any(broken for _, broken in others.values())
    return 1 if broken or wrong or missed else 0


def as_text(
    outcomes: Sequence[Outcome],
    broken: dict[int, str],
    others: Others,
    cpu_s: float,
) -> str:
    lines = [
        f"{len(outcomes) + len(broken)} random worlds, {cpu_s:.0f} s of CPU time with those below; "
        f"{len(broken)} of them violated an invariant"
    ]
    lines += [f"  seed {seed}: {what}" for seed, what in broken.items()]
    lines += ["", f"{'scenario':<14}{'worlds':>8}{'streams':>10}{'deaths':>8}{'wrong':>8}"]
    for name, (found, wrong) in others.items():
        streams = sum(sum(each.ended.values()) for each in found)
        deaths = sum(len(each.hits) for each in found)
        lines.append(f"{name:<14}{len(found):>8}{streams:>10,}{deaths:>8,}{len(wrong):>8}")
        lines += [f"  seed {seed}: {what}" for seed, what in wrong.items()]
        lines += [f"  {count:,} refused, {why}" for why, count in _given_up(found).items()]
    lines += [
        "",
        "random worlds:",
        *(f"{name:<40}{value:>14}" for name, value in rows(outcomes)),
        "",
        "random worlds and those in turn:",
        f"{'death':<44}{'times':>8}{'streams hit':>14}",
    ]
    lines += [
        f"{name:<44}{times:>8,}{streams:>14,}"
        for name, (times, streams) in deaths_of([*outcomes, *others["in turn"][0]]).items()
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _given_up(found: Sequence[Outcome]) -> Counter[str]:
    return sum((each.given_up for each in found), Counter[str]())


def as_figures(
    outcomes: Sequence[Outcome],
    broken: dict[int, str],
    others: Others,
    seeds: range,
) -> dict[str, Any]:
    return {
        "seeds": [seeds.start, seeds.stop],
        "broken": {str(seed): what for seed, what in broken.items()},
        "ended": sum((outcome.ended for outcome in outcomes), Counter[str]()),
        "recoveries": sum((outcome.recoveries for outcome in outcomes), Counter[str]()),
        "streams_recovered": sum(outcome.recovered_streams for outcome in outcomes),
        "tokens": sum(outcome.tokens for outcome in outcomes),
        "tokens_dropped": sum(outcome.dropped_tokens for outcome in outcomes),
        "steps": sum(outcome.steps for outcome in outcomes),
        "deaths": {
            name: {"times": times, "streams": streams}
            for name, (times, streams) in deaths_of([*outcomes, *others["in turn"][0]]).items()
        },
        "others": {
            name: {
                "worlds": len(found),
                "ended": sum((each.ended for each in found), Counter[str]()),
                "given_up": _given_up(found),
                "wrong": {str(seed): what for seed, what in wrong.items()},
            }
            for name, (found, wrong) in others.items()
        },
    }


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


def poison_text(rows: Sequence[dict[str, Any]]) -> str:
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


def run_poison(options: argparse.Namespace) -> int:
    seeds = range(options.seeds or 30)
    record = Record(*seeds, timed=False)
    rows = [measure(cell, seeds) for cell in cells()]
    text = poison_text(rows)
    print(text)
    record.keep(options.out, "worlds-poison", {"rows": rows}, text)
    return 0 if all(map(is_met, rows)) else 1
