"""The rate at which hand-offs that stay lose what they lost in the seed's paper: about 8 % of the
goodput, with 90 % of the requests at one node.

    python -m experiments.load_skew.rates                  # what fits in 15 min of 5 repeats
    python -m experiments.load_skew.rates --limit-s 280    # as many as fit
    python -m experiments.load_skew.rates --repeats 10     # five more
    python -m experiments.load_skew.rates --rates 4.2 --repeats 20  # in one_rate.json
    python -m experiments.load_skew.rates --distserve      # servers of DistServe

A premise test comes first: runs of the baseline alone, at rates between two that it halves, find
where it loses that much. The rates around it are measured. A run goes on from the repeats that are
kept, if the code has not changed since.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.progress import Progress

from experiments.command_line import parser_of
from experiments.distserve_servers import add_option, check_option, processes_for
from experiments.load_skew.run import MOST_CPU, figures, load, requests, settings, start
from experiments.record import Record
from experiments.results import is_of_this_code
from kvrs.config.policy import Handoff
from kvrs_lab.report.student import Interval, interval
from kvrs_testkit.processes import cpu_ticks, share_used

SHARE = 0.9
PUBLISHED = 0.086
# What the baseline serves is PUBLISHED less than all: this share of the requests is lost.
LOST = PUBLISHED / (1 + PUBLISHED)
# Between them lies the rate that is looked for: at 5.85 a second of its own a node is beyond its
# limit, and at a third of what it can do it loses nothing (load_skew.txt).
LEAST, MOST, HALVINGS = 2.5, 6.0, 4
PREMISE_S = 40.0
APART = 0.3  # Between the rates that are measured.
# `auto` beside `rom`: load_skew.txt.
MODES = (Handoff.OWN_PAIR, Handoff.ROM)

# By rate, then by hand-off: a run each.
Rows = dict[str, dict[str, list[dict[str, Any]]]]


def gains(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> Interval:
    """The gain of the other hand-off, run by run: both of a run get the same requests."""
    found = interval(
        [b["good"] / a["good"] - 1 for a, b in zip(own, other, strict=True) if a["good"]]
    )
    return found or Interval(float("nan"), None, 0)


def lost(runs: list[dict[str, Any]]) -> float:
    """The share of requests that came too late."""
    good = sum(int(run["good"]) for run in runs)
    return 1 - good / sum(int(run["requests"]) for run in runs)


def kept(path: Path, seconds: float, rates: Sequence[float]) -> Rows:
    """Repeats that the same code has measured in the same way; none of a void result. Without
    rates those that are kept, if there are any.
    """
    nothing: Rows = {f"{rate:g}": {mode.value: [] for mode in MODES} for rate in rates}
    if not is_of_this_code(path):
        return nothing
    found = json.loads(path.read_text())
    rows: Rows = found["rows"]
    if found["seconds"] != seconds or (rates and [*rows] != [*nothing]):
        return nothing
    return rows


def premise(urls: list[str], seed: int) -> list[float]:
    """The rates around that at which the baseline loses what it lost in the paper."""
    least, most = LEAST, MOST
    for _ in range(HALVINGS):
        rate = (least + most) / 2
        records = uvloop.run(load(urls, requests(seed, PREMISE_S, SHARE, rate), seed))
        gone = lost([figures(records, PREMISE_S)])
        print(f"premise: {rate:.2f} requests/s, the baseline loses {gone:.1%}", flush=True)
        least, most = (rate, most) if gone < LOST else (least, rate)
    middle = round((least + most) / 2, 1)
    return [round(middle + step * APART, 1) for step in (-1, 0, 1)]


def as_text(rows: Rows, repeats: int, seconds: float) -> str:
    def percent(found: Interval) -> str:
        half = "" if found.half_width is None else f" ± {found.half_width:.1%}"
        return f"{found.mean:+.1%}{half}"

    lines = [
        f"{SHARE:.0%} of the requests at one node, {repeats} runs of {seconds:g} s each",
        "",
        f"{'requests/s':>10}{'own_pair loses':>16}{'rom loses':>12}{'rom gains':>20}",
    ]
    for rate, ways in rows.items():
        own, rom = ways[Handoff.OWN_PAIR.value], ways[Handoff.ROM.value]
        gained = percent(gains(own, rom))
        lines.append(f"{rate:>10}{lost(own):>16.1%}{lost(rom):>12.1%}{gained:>20}")
    lines += ["", f"the seed reports +{PUBLISHED:.1%} for `rom`"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="without a premise test")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--limit-s", type=float, default=900.0, help="no repeat goes beyond")
    add_option(parser)
    arguments = parser.parse_args()
    check_option(parser, distserve=arguments.distserve)
    name = "one_rate" if len(arguments.rates) == 1 else "rates"
    name = f"distserve_{name}" if arguments.distserve else name
    begun_s = time.monotonic()
    record = Record(arguments.seed)
    rows = kept(arguments.out / f"{name}.json", arguments.seconds, arguments.rates)
    with processes_for(settings(distserve=arguments.distserve)) as processes:
        urls = start(processes, MODES)
        if not rows:
            around = premise(urls[Handoff.OWN_PAIR], arguments.seed)
            rows = {f"{rate:g}": {mode.value: [] for mode in MODES} for rate in around}
        done = first = len(next(iter(rows.values()))[Handoff.OWN_PAIR.value])
        before, took_s = cpu_ticks(), 0.0
        with Progress(disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("repeats", total=arguments.repeats, completed=done)
            while done < arguments.repeats:
                repeat_s = time.monotonic()
                if done > first and repeat_s - begun_s + took_s > arguments.limit_s:
                    break
                repeated(rows, urls, arguments.seed + done, arguments.seconds)
                took_s = time.monotonic() - repeat_s
                done += 1
                progress.advance(task)
        cpu = share_used(before, cpu_ticks())
    text = as_text(rows, done, arguments.seconds)
    print(text, end="")
    record.check_cpu(cpu, MOST_CPU)
    found: dict[str, Any] = {
        "share": SHARE,
        "repeats": done,
        "seconds": arguments.seconds,
    }
    if done < arguments.repeats:
        found["waiting"] = [f"repeat {number}" for number in range(done, arguments.repeats)]
    is_void = record.keep_beside(
        arguments.out, name, found | {"cpu_share": round(cpu, 3), "rows": rows}, text
    )
    return 2 if is_void else 0


def repeated(rows: Rows, urls: dict[Handoff, list[str]], seed: int, seconds: float) -> None:
    """One run of every rate and hand-off, in an order of the seed's; both hand-offs of a rate get
    the same requests.
    """
    order = random.Random(seed)
    for rate in order.sample([*rows], len(rows)):
        asked = requests(seed, seconds, SHARE, float(rate))
        for mode in order.sample(MODES, len(MODES)):
            records = uvloop.run(load(urls[mode], asked, seed))
            rows[rate][mode.value].append(figures(records, seconds))


if __name__ == "__main__":
    sys.exit(main())
