"""Rates of links: hand-offs that stock vLLM fetches, and recoveries beside checkpoints.

    python -m experiments.decisions.rates [--seeds N] [--quick] [--name NAME] [--out DIR]

All is in virtual time. The first part plays hand-offs over one link, which `HandOffMeter` sees as a
proxy does: from the decode call to its first token, with NIXL's counters once a second. The second
part reads what links count with in simulated clusters with and without checkpoints.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, inf, log
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.command_line import parser_of
from experiments.decisions.states import State
from experiments.record import Record
from kvrs.ids import NodeId
from kvrs.transfer.meter import FetchedHandOff, HandOffMeter, Pulled

TOKEN_BYTES = 131072  # Llama-3.1-8B.
TOKENS, LEAST_TOKENS, MOST_TOKENS = 1000, 200, 8000
LINKS_GBIT_S = (10, 25, 100, 400)
STEP_S, STEP_NOISE = 0.02, 0.1  # Of the decode instance.
READ_S = 1.0  # Between two reads of the counters.
WATCHED_S, DROP_S = 120.0, 60.0
SEEDS = 5
# Bars: seconds until the estimate is within x2; estimate over the true rate; with checkpoints, the
# lowest tenth over that without.
BAR_DROP_S, BAR_LOW, BAR_HIGH = 3.0, 0.7, 1.3
BAR_GBIT_S = 100  # Above it a hand-off takes less than a step, and no bar is set.
SOURCE = NodeId("n0")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Hand-offs over one link to one decode instance."""

    gbit_s: float
    at_once: int = 1
    bursts_per_s: float = 1.0
    is_even: bool = True  # All have as many tokens; else they differ.
    in_turn: bool = False  # The link carries one after the other; else it is shared.
    drops: bool = False  # At `DROP_S` to a tenth.
    others: float = 0.0  # Share of the hand-offs that another proxy sends.
    slots: int = 1 << 30  # Hand-offs that the instance fetches at a time.

    def rate(self, at_s: float) -> float:
        return self.gbit_s * 125e6 * (0.1 if self.drops and at_s >= DROP_S else 1.0)


@dataclass(slots=True, eq=False)
class Fetch:
    """One hand-off: its call is sent, its transfer begins, is seen to have ended, brings a
    token.
    """

    sent_s: float
    size_bytes: float
    is_own: bool
    left_bytes: float = 0.0
    posted_s: float = inf
    seen_s: float = inf
    token_s: float = inf


def played(traffic: Traffic, seed: int) -> list[Fetch]:
    """Return the hand-offs with their times. The instance begins transfers at the start of a step,
    and sees their end at the end of one; the next step brings the token.
    """
    rng = random.Random(f"rates/{seed}")
    coming = [*_sent(traffic, rng)]
    fetches, waiting, moving = [*coming], list[Fetch](), list[Fetch]()
    now_s = 0.0
    while coming or waiting or moving:
        end_s = now_s + STEP_S * rng.lognormvariate(0.0, STEP_NOISE)
        while coming and coming[0].sent_s <= now_s:
            waiting.append(coming.pop(0))
        while waiting and len(moving) < traffic.slots:
            moving.append(begun := waiting.pop(0))
            begun.posted_s, begun.left_bytes = now_s, begun.size_bytes
        _carry(moving, traffic, now_s, end_s)
        for fetch in [each for each in moving if each.left_bytes <= 0]:
            moving.remove(fetch)
            fetch.seen_s, fetch.token_s = end_s, end_s + STEP_S
        now_s = end_s
    return fetches


def _sent(traffic: Traffic, rng: random.Random) -> Iterator[Fetch]:
    at_s = rng.expovariate(traffic.bursts_per_s)
    while at_s < WATCHED_S:
        for _ in range(traffic.at_once):
            drawn = round(exp(rng.uniform(log(LEAST_TOKENS), log(MOST_TOKENS))))
            tokens = TOKENS if traffic.is_even else drawn
            yield Fetch(at_s, tokens * TOKEN_BYTES, rng.random() >= traffic.others)
        at_s += rng.expovariate(traffic.bursts_per_s)


def _carry(moving: Sequence[Fetch], traffic: Traffic, now_s: float, end_s: float) -> None:
    """Carry bytes until `end_s`, to all that are open alike or to the first alone."""
    while now_s < end_s - 1e-12:
        open_ = [each for each in moving if each.left_bytes > 0]
        if not open_:
            return
        served = open_[:1] if traffic.in_turn else open_
        rate = traffic.rate(now_s) / len(served)
        until_s = min(end_s, now_s + min(each.left_bytes for each in served) / rate)
        for each in served:
            each.left_bytes -= (until_s - now_s) * rate
            each.left_bytes = 0.0 if each.left_bytes < 1.0 else each.left_bytes
        now_s = until_s


def watched(traffic: Traffic, seed: int) -> list[tuple[float, float]]:
    """Return the estimates at each read: the time, and the estimate over the true rate."""
    fetches, meter = played(traffic, seed), HandOffMeter()
    open_ = dict[Fetch, FetchedHandOff]()
    events = sorted(
        [(each.sent_s, 0, number) for number, each in enumerate(fetches) if each.is_own]
        + [(each.token_s, 1, number) for number, each in enumerate(fetches) if each.is_own]
        + [(READ_S * number, 2, 0) for number in range(ceil(WATCHED_S / READ_S))]
    )
    seen = []
    for at_s, kind, number in events:
        if kind == 0:
            open_[fetches[number]] = FetchedHandOff(SOURCE, fetches[number].size_bytes, 1, at_s)
            meter.begins(open_[fetches[number]])
        elif kind == 1:
            open_.pop(fetches[number]).over_s = at_s
        else:
            over = [each for each in fetches if each.seen_s <= at_s]
            seconds = sum(each.seen_s - each.posted_s for each in over)
            meter.counted(Pulled(len(over), sum(each.size_bytes for each in over), seconds), at_s)
            if (found := meter.measurements(at_s).get(SOURCE)) is not None:
                seen.append((at_s, found.bytes_per_s / traffic.rate(at_s)))
    return seen


def settled(traffic: Traffic, seeds: int) -> list[float]:
    """Return the median estimate over the true rate of the last half, by seed."""
    return [
        median(ratio for at_s, ratio in watched(traffic, seed) if at_s > WATCHED_S / 2)
        for seed in range(seeds)
    ]


def within_two_s(traffic: Traffic, seeds: int) -> list[float]:
    """Return the seconds after the drop until the estimate is within x2 for good (its next
    `READ_S` * 5), by seed.
    """
    found = []
    for seed in range(seeds):
        after = [(at_s - DROP_S, 0.5 <= ratio <= 2) for at_s, ratio in watched(traffic, seed)]
        after = [(at_s, is_near) for at_s, is_near in after if at_s >= 0]
        found.append(
            next(
                (
                    at_s
                    for number, (at_s, _) in enumerate(after)
                    if all(is_near for _, is_near in after[number : number + 5])
                ),
                WATCHED_S - DROP_S,
            )
        )
    return found


def _row(name: str, gbit_s: float, found: Sequence[float], is_missed: bool) -> Row:
    return {
        "case": name,
        "gbit_s": gbit_s,
        "median": round(median(found), 3),
        "least": round(min(found), 3),
        "most": round(max(found), 3),
        "is_missed": is_missed,
    }


def hand_offs(seeds: int, links: Sequence[float]) -> Iterator[Row]:
    for name, traffic in (
        ("drop to a tenth, one second apart: s", Traffic(25, drops=True)),
        ("drop to a tenth, half a second apart: s", Traffic(25, bursts_per_s=2, drops=True)),
        ("drop to a tenth, more than it carries: s", Traffic(25, bursts_per_s=4, drops=True)),
    ):
        found = within_two_s(traffic, seeds)
        yield _row(name, traffic.gbit_s, found, median(found) > BAR_DROP_S)
    for gbit_s in links:
        per_s = min(4.0, gbit_s / 10)
        for name, traffic in (
            ("one at a time, equal", Traffic(gbit_s, bursts_per_s=per_s)),
            ("one at a time, 200 to 8,000 tokens", Traffic(gbit_s, 1, per_s, is_even=False)),
            ("4 at once", Traffic(gbit_s, 4, 0.25)),
            ("16 at once", Traffic(gbit_s, 16, 0.2)),
            ("16 at once, 200 to 8,000 tokens", Traffic(gbit_s, 16, 0.05, is_even=False)),
            ("16 at once, carried in turn", Traffic(gbit_s, 16, 0.2, in_turn=True)),
            ("16 at once, two slots", Traffic(gbit_s, 16, 0.2, slots=2)),
        ):
            found = settled(traffic, seeds)
            is_near = BAR_LOW <= median(found) <= BAR_HIGH
            yield _row(name, gbit_s, found, gbit_s <= BAR_GBIT_S and not is_near)
        found = settled(Traffic(gbit_s, 4, 0.25, others=0.5), seeds)
        yield _row("4 at once, half of another proxy", gbit_s, found, False)


def beside_checkpoints(quick: bool) -> Iterator[Row]:
    """Return what links count with in simulated clusters at 10 Gbit/s over what recoveries get,
    which go before all other traffic: medians and extremes over links and seconds.
    """
    states = (
        ("opt-13b-a100-distserve-tp1", 2, 0.5),
        ("opt-13b-a100-distserve-tp1", 4, 0.8),
        ("llama-3.1-8b-h100-vllm-tp1", 4, 0.5),
        ("llama-3.1-70b-h100-vllm-tp4", 2, 0.5),
    )
    lowest = dict[str, float]()
    for backup in ("off", "both"):
        ratios: dict[str, list[float]] = {"mean": [], "bound": []}
        for profile, nodes, load in states[: 2 if quick else None]:
            state = State(0, profile, 10, backup, nodes, load)
            world = state.world()
            for at_s in range(10, 27):
                world.run_before(at_s)
                view = world.cluster.proxies[0].control.policy.state.view
                for (source, target), link in view.links.items():
                    if source != target and source in view.by_node and link.mean_bytes_per_s:
                        rate = state.link_gbit_s * 125e6
                        ratios["mean"].append(link.mean_bytes_per_s / rate)
                        ratios["bound"].append(link.bytes_per_s / rate)
        for what, found in ratios.items():
            low = sorted(found)[len(found) // 10]
            name = f"checkpoints {backup}: {what} of the rate of recoveries"
            is_missed = low < BAR_LOW * lowest.setdefault(what, low)
            yield _row(name, 10, found, is_missed) | {"tenth": round(low, 3)}


def show(console: Console, rows: Sequence[Row]) -> list[str]:
    table = Table(title="Estimate over the true rate; for drops the seconds until it is within x2")
    for name in ("case", "Gbit/s", "median", "least", "most", "lowest tenth", "bar"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row, after in pairwise([*rows, rows[-1]]):
        figures = (f"{row[name]:.2f}" for name in ("median", "least", "most"))
        tenth = f"{row['tenth']:.2f}" if "tenth" in row else ""
        bar = "missed" if row["is_missed"] else ""
        is_last = row["gbit_s"] != after["gbit_s"]
        table.add_row(row["case"], f"{row['gbit_s']:g}", *figures, tenth, bar, end_section=is_last)
    console.print(table)
    return [f"{row['case']}, {row['gbit_s']:g} Gbit/s" for row in rows if row["is_missed"]]


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="two seeds and two links")
    parser.add_argument("--name", default="rates", help="name of the kept result")
    options = parser.parse_args()
    record = Record(timed=False)
    seeds, links = (2, LINKS_GBIT_S[:2]) if options.quick else (options.seeds, LINKS_GBIT_S)
    rows = [*hand_offs(seeds, links), *beside_checkpoints(options.quick)]
    return keep(options, record, rows)


def keep(options: argparse.Namespace, record: Record, rows: Sequence[Row]) -> int:
    console = Console(record=True, width=120)
    missed = show(console, rows)
    console.print("missed:", missed or "nothing", markup=False)
    figures = {"rows": rows, "missed": missed}
    record.keep(options.out, options.name, figures, console.export_text())
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
