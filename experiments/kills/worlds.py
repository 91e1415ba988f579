"""Deaths in virtual time. Thousands of random worlds, each with random faults, worlds with every
kind of fault in turn, and worlds of one subject each, in which every invariant is checked.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from experiments.record import Record
from kvrs.core.model import actions as act
from kvrs_lab.sim.cluster import POISONED, Outcome
from kvrs_lab.sim.command import deaths_of, rows
from kvrs_lab.sim.world import World
from kvrs_testkit.random_worlds import (
    KINDS,
    contended,
    in_turn,
    poisoned,
    ranked,
    scenario,
    sick,
)

# By scenario: outcomes, and what went wrong by seed.
Others = dict[str, tuple[list[Outcome], dict[int, str]]]
HIT_AT_LEAST = 8  # Streams that depend on the victims, of every kind of death.
OTHERS = 40  # Worlds of each other scenario.
MAX_DEATHS = 9  # Of three poisoned requests, which are refused at the third each.


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
    return f"{deaths} deaths of three poisoned requests" if deaths > MAX_DEATHS else ""


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
