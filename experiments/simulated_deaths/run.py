"""Thousands of random worlds in virtual time, each with random faults; every invariant is checked
in each of them.
"""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.record import Record
from kvrs.sim.cluster import Outcome
from kvrs.sim.command import deaths_of, rows
from kvrs.sim.fault_scenarios import FAULT_SCENARIOS
from kvrs.sim.scenarios import scenario

HIT_AT_LEAST = 8  # Streams that depend on the victims, of every kind of death.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    record = Record(arguments.first, arguments.first + arguments.seeds - 1, timed=False)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    begun_s, outcomes, broken = time.process_time(), list[Outcome](), dict[int, str]()
    for done, seed in enumerate(seeds, 1):
        try:
            outcomes.append(scenario(seed).run())
        except AssertionError as error:
            broken[seed] = repr(error)
        if done % 500 == 0:
            print(f"{done} of {len(seeds)} worlds, {len(broken)} violated an invariant", flush=True)
    text = as_text(outcomes, broken, time.process_time() - begun_s)
    print(text, end="")
    record.keep(arguments.out, "simulated_deaths", as_figures(outcomes, broken, seeds), text)
    deaths = deaths_of(outcomes)
    missed = [name for name in FAULT_SCENARIOS if deaths.get(name, (0, 0))[1] < HIT_AT_LEAST]
    return 1 if broken or missed else 0


def as_text(outcomes: Sequence[Outcome], broken: dict[int, str], cpu_s: float) -> str:
    lines = [
        f"{len(outcomes) + len(broken)} worlds in {cpu_s:.0f} s of CPU time; "
        f"{len(broken)} of them violated an invariant"
    ]
    lines += [f"  seed {seed}: {what}" for seed, what in broken.items()]
    lines += [
        "",
        *(f"{name:<40}{value:>14}" for name, value in rows(outcomes)),
        "",
        f"{'death':<34}{'times':>8}{'streams hit':>14}",
    ]
    lines += [
        f"{name:<34}{times:>8,}{streams:>14,}"
        for name, (times, streams) in deaths_of(outcomes).items()
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def as_figures(outcomes: Sequence[Outcome], broken: dict[int, str], seeds: range) -> dict[str, Any]:
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
            for name, (times, streams) in deaths_of(outcomes).items()
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
