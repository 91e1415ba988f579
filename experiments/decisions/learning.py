"""Factors that learn: does a factor per option, learned from earlier deaths, improve anything?

    python -m experiments.decisions.learning [--states N ...] [--quick] [--jobs N] [--out DIR]

States of `study.py`, with steps that take 0.5, 1 and 2.2 times those of the profile. The three
deaths before the kill are what is learned from: per option, the ratio of real to predicted cost.
The same moment then goes on without factors, and with those of two learners. All is in virtual
time.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from math import exp, log
from multiprocessing import get_context
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.command_line import parser_of
from experiments.decisions.states import Future, State, before_kill, observed
from experiments.decisions.study import interval, p95
from experiments.record import Record
from kvrs.core.model.estimates import Option
from kvrs_lab.sim.streams import SimRecovery
from kvrs_lab.sim.world import World

SLOWNESS = (0.5, 1.0, 2.2)
STATES = range(0, 150, 3)
QUICK = STATES[::5]
# Share of the newest observation: of each victim, as kvrs learned until 0.9; of an event's mean.
OF_VICTIM, OF_EVENT = 0.2, 0.5

Row = dict[str, Any]


def learned(recoveries: Iterable[SimRecovery]) -> dict[str, dict[Option, float]]:
    """Return the factors of the two learners by option, from recoveries in order."""
    of_victims, of_events = dict[Option, float](), dict[Option, float]()
    events = dict[tuple[Option, int], list[float]]()
    for each in recoveries:
        if (settled := each.settled) is None or settled.option is Option.START:
            continue
        ratio = log(max(settled.real_s, 0.001) / max(settled.predicted_s, 0.001))
        known = of_victims.get(settled.option, 0.0)
        of_victims[settled.option] = known + OF_VICTIM * (ratio - known)
        events.setdefault((settled.option, round(each.at_s)), []).append(ratio)
    for (option, _), ratios in events.items():
        known = of_events.get(option, 0.0)
        of_events[option] = known + OF_EVENT * (fmean(ratios) - known)
    both = {"by victim": of_victims, "by event": of_events}
    return {name: {each: exp(of[each]) for each in of} for name, of in both.items()}


def recovered(world: World) -> list[SimRecovery]:
    return [each for proxy in world.cluster.proxies for each in proxy.recovered]


def worked_out(number: int, slowness: float) -> Row | None:
    """Return a state's mean pauses, and predicted and real costs, by learner."""
    state = replace(State.drawn(number), slowness=slowness)
    try:
        world, kill_s = before_kill(state)
    except LookupError:
        return None
    factors = learned(recovered(world))
    futures = [Future("none"), *(Future(name, factors=of) for name, of in factors.items())]
    row: Row = {"number": number, "slowness": slowness, "learners": {}}
    for each in observed(world, state, kill_s, futures):
        of = factors.get(each.name, {})
        row["learners"][each.name] = {
            "pause_s": each.mean_s,
            "factors": {option.value: factor for option, factor in of.items()},
            "costs_s": [
                [victim.predicted_s * of.get(Option(victim.option), 1.0), victim.real_s]
                for victim in each.victims
                if victim.real_s
            ],
        }
    return row


def table_of(rows: list[Row]) -> tuple[Table, list[Row]]:
    """Return the table, and its figures."""
    table, figures = Table(title="Learned factors, first recoveries under auto"), list[Row]()
    for name in ("steps", "learner", "states", "median ratio", "error, median", "p95"):
        table.add_column(name, justify="right" if name != "learner" else "left")
    table.add_column("pause over that without (95 % interval)", justify="right")
    for slowness, learner in product(SLOWNESS, ("none", "by victim", "by event")):
        of = [row["learners"] for row in rows if row["slowness"] == slowness]
        if not of:
            continue
        ratios = [said / real for each in of for said, real in each[learner]["costs_s"]]
        errors = [abs(ratio - 1) for ratio in ratios]
        pauses = [each[learner]["pause_s"] / each["none"]["pause_s"] for each in of]
        low, high = interval(pauses)
        figures.append(
            {
                "slowness": slowness,
                "learner": learner,
                "states": len(of),
                "victims": len(ratios),
                "ratio": median(ratios),
                "error": median(errors),
                "error_p95": p95(errors),
                "pause_over_none": fmean(pauses),
                "pause_low": low,
                "pause_high": high,
            }
        )
        table.add_row(
            f"x{slowness:g}",
            learner,
            str(len(of)),
            f"x{median(ratios):.2f}",
            f"{median(errors):.1%}",
            f"{p95(errors):.0%}",
            f"{fmean(pauses):.3f} ({low:.3f} to {high:.3f})",
        )
    return table, figures


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--states", type=int, nargs="+", default=None)
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} states")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    numbers = options.states or (QUICK if options.quick else STATES)
    record = Record(timed=False)
    drawn = [*zip(*product(numbers, SLOWNESS), strict=True)]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        found = pool.map(worked_out, *drawn)
        rows = [row for row in track(found, "states", total=len(drawn[0])) if row is not None]
    console = Console(record=True, width=120)
    table, figures = table_of(rows)
    console.print(table)
    record.keep(options.out, "learning", {"rows": figures, "states": rows}, console.export_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
