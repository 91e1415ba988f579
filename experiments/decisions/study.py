"""Predictions and regret of recovery decisions in random simulated states.

    python -m experiments.decisions.study [--states N ...] [--quick] [--jobs N] [--beside FILE]
        [--name NAME] [--out DIR]

`--beside`: the kept result of another version, state by state. All is in virtual time.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.command_line import parser_of
from experiments.decisions.states import STATES, STOCK_STATES, State, as_row, observe
from experiments.record import Record

QUICK = [*range(0, STATES, 15), 1000]
RESAMPLED = 2000  # Samples of the states for an interval of a mean.
WITHIN = 0.2
# Bars: predictions' median error and p95, and their share within 20 %; regret; stock states.
ERROR, ERROR_P95, SHARE_WITHIN = 0.12, 0.60, 0.65
REGRET, STOCK_REGRET = 0.07, 0.15
COVERED, WIDTH = (0.85, 0.95), 3.0  # Share of real costs in their intervals; high over low.
OF_STOCK = ("auto", "rom", "recompute", "migrate")
LONGER, SHARE_LONGER = 0.05, 0.1  # Than before, and share of the states that may be.

Row = dict[str, Any]


def worked_out(number: int) -> Row:
    state = STOCK_STATES[number - 1000] if number >= 1000 else State.drawn(number)
    return as_row(state, *observe(state))


def regret_of(row: Row, name: str = "auto") -> float:
    """Return the mean pause of the victims in a future over that in the best one, less 1."""
    return float(row["pauses_s"][name] / min(row["pauses_s"].values()) - 1)


def errors_of(rows: Sequence[Row], option: str = "") -> list[float]:
    """Return predicted / real cost less 1 of each victim's first recovery under `auto`. `option`:
    of those that chose it; empty: of all.
    """
    return [
        victim["predicted_s"] / victim["real_s"] - 1
        for row in rows
        for victim in row["victims"]
        if victim["real_s"] and option in ("", victim["option"])
    ]


def p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean."""
    rng = random.Random(0)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLED))
    return means[int(0.025 * RESAMPLED)], means[int(0.975 * RESAMPLED)]


def predictions(console: Console, rows: Sequence[Row]) -> Iterator[str]:
    """Print the errors of predictions; yield the missed bars."""
    table = Table(title="Predicted over real cost, first recoveries under auto")
    for name in ("states", "victims", "median ratio", "error, median", "p95", "within 20 %"):
        table.add_column(name, justify="left" if name == "states" else "right")
    groups = {
        "all": rows,
        "four victims and more": [row for row in rows if not row["is_of_few"]],
        "one to three": [row for row in rows if row["is_of_few"]],
    }
    for name, of in groups.items():
        if not (found := errors_of(of)):
            continue
        sizes = [abs(error) for error in found]
        within = sum(size <= WITHIN for size in sizes) / len(sizes)
        table.add_row(
            name,
            str(len(found)),
            f"x{1 + median(found):.2f}",
            f"{median(sizes):.0%}",
            f"{p95(sizes):.0%}",
            f"{within:.0%}",
        )
        if name == "all":
            for what, value, bar in (
                ("median error", median(sizes), ERROR),
                ("p95 of the error", p95(sizes), ERROR_P95),
            ):
                if value > bar:
                    yield f"{what} {value:.0%}, bar {bar:.0%}"
            if within < SHARE_WITHIN:
                yield f"within 20 % {within:.0%}, bar {SHARE_WITHIN:.0%}"
    console.print(table)
    options = Table(title="By chosen option")
    for name in ("option", "victims", "median ratio", "error, median", "p95"):
        options.add_column(name, justify="left" if name == "option" else "right")
    for option in sorted({victim["option"] for row in rows for victim in row["victims"]}):
        found = errors_of(rows, option)
        sizes = [abs(error) for error in found]
        ratio, error = f"x{1 + median(found):.2f}", f"{median(sizes):.0%}"
        options.add_row(option, str(len(found)), ratio, error, f"{p95(sizes):.0%}")
    console.print(options)


def intervals(console: Console, rows: Sequence[Row]) -> Iterator[str]:
    """Print the share of real costs in their predicted intervals, and their width; yield the missed
    bars.
    """
    found = [
        victim
        for row in rows
        for victim in row["victims"]
        if victim["real_s"] and victim.get("low_s") is not None
    ]
    if not found:
        return
    inside = fmean(each["low_s"] <= each["real_s"] <= each["high_s"] for each in found)
    width = median(each["high_s"] / each["low_s"] for each in found)
    console.print(
        f"Intervals: {inside:.0%} of {len(found)} real costs are inside; the upper end is "
        f"x{width:.2f} of the lower one at the median",
        highlight=False,
    )
    if not COVERED[0] <= inside <= COVERED[1]:
        yield f"intervals cover {inside:.0%}, bar {COVERED[0]:.0%} to {COVERED[1]:.0%}"
    if width > WIDTH:
        yield f"intervals are x{width:.2f} wide, bar x{WIDTH:g}"


def regrets(console: Console, rows: Sequence[Row]) -> Iterator[str]:
    """Print the regret of each policy and option; yield the missed bar."""
    table = Table(title="Mean pause of an event over its best future")
    for name in ("future", "states", "mean", "95 % interval", "median", "p95"):
        table.add_column(name, justify="left" if name == "future" else "right")
    by_name = dict[str, list[float]]()
    for row in rows:
        for name in row["pauses_s"]:
            if " " not in name:  # Not of a single victim.
                by_name.setdefault(name, []).append(regret_of(row, name))
    for name, found in by_name.items():
        low, high = interval(found)
        table.add_row(
            name,
            str(len(found)),
            f"{fmean(found):.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{median(found):.1%}",
            f"{p95(found):.0%}",
        )
    console.print(table)
    if fmean(by_name["auto"]) > REGRET:
        yield f"regret {fmean(by_name['auto']):.1%}, bar {REGRET:.0%}"


def stock(console: Console, rows: Sequence[Row]) -> Iterator[str]:
    """Print the pauses of the states as stock vLLM; yield the missed bars."""
    if not rows:
        return
    table = Table(title="As stock vLLM: mean pause in ms")
    for name in ("profile", "Gbit/s", "nodes", "victims", *OF_STOCK):
        table.add_column(name, justify="left" if name == "profile" else "right")
    table.add_column("auto over best", justify="right")
    for row in rows:
        pauses = (f"{1e3 * row['pauses_s'][name]:.0f}" for name in OF_STOCK)
        facts = row["profile"], row["link_gbit_s"], row["nodes"], len(row["victims"])
        table.add_row(*map(str, facts), *pauses, f"{regret_of(row):.0%}")
        if (regret := regret_of(row)) > STOCK_REGRET:
            yield f"state {row['number']} as stock vLLM {regret:.0%}, bar {STOCK_REGRET:.0%}"
    console.print(table)


def beside(console: Console, rows: Sequence[Row], before: Sequence[Row]) -> Iterator[str]:
    """Compare pauses under `auto` with those of another version; yield the missed bar."""
    others = {row["number"]: row["pauses_s"]["auto"] for row in before if row["pauses_s"]}
    ratios = {
        row["number"]: row["pauses_s"]["auto"] / others[row["number"]]
        for row in rows
        if row["number"] in others
    }
    found = [*ratios.values()]
    low, high = interval(found)
    longer = sorted(number for number, ratio in ratios.items() if ratio > 1 + LONGER)
    console.print(
        f"Mean pause over that of the other version, {len(found)} states: mean {fmean(found):.3f} "
        f"({low:.3f} to {high:.3f}), median {median(found):.3f}, least {min(found):.2f}, most "
        f"{max(found):.2f}; more than {LONGER:.0%} longer in {len(longer)}: {longer}",
        markup=False,
        highlight=False,
    )
    if len(longer) > SHARE_LONGER * len(found):
        yield f"longer in {len(longer)} of {len(found)} states, bar {SHARE_LONGER:.0%}"


def show(console: Console, rows: Sequence[Row], before: Sequence[Row]) -> list[str]:
    """Print the tables; return the missed bars."""
    without = [row["number"] for row in rows if not row["pauses_s"]]
    rows = [row for row in rows if row["pauses_s"]]
    drawn = [row for row in rows if not row["is_stock"]]
    console.print(f"{len(rows)} states; without so many victims, and left out: {without}")
    missed = [*predictions(console, drawn), *intervals(console, drawn), *regrets(console, drawn)]
    missed += stock(console, [row for row in rows if row["is_stock"]])
    if before:
        missed += beside(console, rows, before)
    return missed


def main() -> int:
    parser = parser_of(__doc__, __file__)
    numbers = [*range(STATES), *(state.number for state in STOCK_STATES)]
    parser.add_argument("--states", type=int, nargs="+", default=None)
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} states")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--beside", type=Path, default=None, help="a kept study of before")
    parser.add_argument("--name", default="study", help="name of the kept result")
    options = parser.parse_args()
    numbers = options.states or (QUICK if options.quick else numbers)
    record = Record(timed=False)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        rows = [*track(pool.map(worked_out, numbers), "states", total=len(numbers))]
    return keep(options, record, rows)


def keep(options: argparse.Namespace, record: Record, rows: Sequence[Row]) -> int:
    console = Console(record=True, width=120)
    before = json.loads(options.beside.read_text())["states"] if options.beside else []
    missed = show(console, rows, before)
    console.print("missed:", missed or "nothing", markup=False)
    figures = {"states": rows, "missed": missed}
    record.keep(options.out, options.name, figures, console.export_text())
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
