"""The path of a request of 4 tokens, and of a death with one victim, through the code of kvrs: how
many functions are called how often, in how many files of how many lines, and how often the next
call is in another file. The sixth of six equal ones is traced; beside it the CPU of a request, hot
and cold.

python -m experiments.request_path.gauge [--json] [--calls request|death] [--out DIR]
python -m experiments.request_path.gauge --check | --keep-less

`--check` fails where a path has become longer than `most.json` allows: the most of three traces,
in the one version of Python for which these counts hold. `--keep-less` writes what has become
shorter, and never what has become longer.
"""

import asyncio
import json
import logging
import sys
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Self

import uvloop

import kvrs
from experiments.command_line import parser_of
from experiments.record import Record
from experiments.request_path import whole
from experiments.request_path.death import make_config, make_info, recover

BEFORE = 5  # Equal ones.
ROUNDS = 200
NODES = 2  # Each with a prefill and a decode instance.
# The bars: what a path shall come down to.
BARS = {
    "request": {"files": 24, "changes_of_file": 160, "functions": 165},
    "death": {"files": 24, "changes_of_file": 135, "functions": 165},
}
# The ratchet: what a path may have now. It is only ever written lower.
RATCHET = Path(__file__).parent / "most.json"
COUNTED = {
    "request": ("files", "changes_of_file", "functions"),
    "death": ("files", "changes_of_file", "functions"),
    "either": ("files", "lines_of_files"),  # What somebody reads who follows both.
}
TRACES = 3  # How a turn of the event loop falls differs by a few calls.
PYTHON = (3, 11)  # Other versions call other functions of generators and comprehensions.
# What timers call when their time comes, or to be set anew: some runs have it in the path.
TIMERS = ("_TimerWheel._arm", "_TimerWheel._look", "RowLog.write")
_PRODUCT = str(Path(kvrs.__file__).parent) + "/"


@dataclass
class Trace:
    """The calls of functions of kvrs in this thread while it is entered, in their order, without
    those of timers.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)  # Files and functions.
    _timer: FrameType | None = None  # Frame of the running timer's callback.

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._timer is not None:
            if event == "return" and frame is self._timer:
                self._timer = None
        elif event == "call" and code.co_qualname in TIMERS:
            self._timer = frame
        elif event == "call" and code.co_filename.startswith(_PRODUCT):
            self.calls.append((code.co_filename.removeprefix(_PRODUCT), code.co_qualname))

    def figures(self) -> dict[str, int]:
        files = [file for file, _ in self.calls]
        return {
            "files": len(set(files)),
            "functions": len(set(self.calls)),
            "calls": len(self.calls),
            "changes_of_file": sum(a != b for a, b in pairwise(files)),
            "lines_of_files": sum(map(_lines, set(files))),
        }


def _lines(file: str) -> int:
    return len(Path(_PRODUCT, file).read_text().splitlines())


async def traced_request() -> Trace:
    config = make_config(NODES)
    infos = [make_info(each.id, node.id, each.role) for node, each in config.cluster.instances()]
    trace = Trace()
    async with aclosing(whole.exchanges(config, infos, is_idle=False)) as made:
        for _ in range(BEFORE):
            await anext(made)
        with trace:
            await anext(made)
    return trace


async def traced_death() -> Trace:
    for _ in range(BEFORE):
        await recover()
    trace = Trace()
    await recover(trace)
    return trace


def figures_of(traces: dict[str, Trace]) -> dict[str, dict[str, int]]:
    """The figures of each path, and the files that either of them walks."""
    files = {file for trace in traces.values() for file, _ in trace.calls}
    found = {name: trace.figures() for name, trace in traces.items()}
    return found | {"either": {"files": len(files), "lines_of_files": sum(map(_lines, files))}}


def longest() -> dict[str, dict[str, int]]:
    """The most of each count in `TRACES` traces of each path."""
    found = [figures_of(traced()) for _ in range(TRACES)]
    return {
        name: {count: max(each[name][count] for each in found) for count in counted}
        for name, counted in COUNTED.items()
    }


def traced() -> dict[str, Trace]:
    return {"request": uvloop.run(traced_request()), "death": asyncio.run(traced_death())}


def check() -> int:
    """Compare the longest traces with the ratchet; 1 where a count has risen."""
    if sys.version_info[:2] != PYTHON:
        print(f"the paths are not compared: their counts hold for Python {PYTHON[0]}.{PYTHON[1]}")
        return 0
    most, found = json.loads(RATCHET.read_text()), longest()
    risen, fallen = [], []
    for name, counts in found.items():
        for count, value in counts.items():
            line = f"{name}: {count.replace('_', ' ')} {value}, at most {most[name][count]}"
            if value > most[name][count]:
                risen.append(line)
            elif value < most[name][count]:
                fallen.append(line)
    for line in (*risen, *fallen):
        print(line)
    if risen:
        print("a path has become longer: what comes onto it lets something go from it")
    elif fallen:
        print("a path has become shorter; --keep-less keeps that")
    return 1 if risen else 0


def keep_less() -> None:
    most, found = json.loads(RATCHET.read_text()), longest()
    less = {
        name: {count: min(value, most[name][count]) for count, value in counts.items()}
        for name, counts in found.items()
    }
    RATCHET.write_text(json.dumps(less, indent=1) + "\n")


def cpu_us(*, is_idle: bool) -> float:
    config = make_config(NODES)
    infos = [make_info(each.id, node.id, each.role) for node, each in config.cluster.instances()]
    return uvloop.run(whole.cpu_us(config, infos, ROUNDS, is_idle=is_idle))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON alone")
    parser.add_argument("--calls", choices=BARS, help="print the calls of one of them instead")
    parser.add_argument("--check", action="store_true", help="compare with the ratchet alone")
    parser.add_argument("--keep-less", action="store_true", help="lower the ratchet alone")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.check:
        return check()
    if options.keep_less:
        keep_less()
        return 0
    if options.calls:
        print(*(f"{file} {name}" for file, name in traced()[options.calls].calls), sep="\n")
        return 0
    record = Record()
    figures: dict[str, Any] = figures_of(traced())
    cpu = {"hot": cpu_us(is_idle=False), "cold": cpu_us(is_idle=True)}
    is_met = all(
        figures[name][count] <= most for name, bars in BARS.items() for count, most in bars.items()
    )
    document = figures | {"request_cpu_us": cpu, "at_most": BARS, "met": is_met}
    if options.json:
        print(json.dumps(document, indent=1))
        return 0
    text = as_text(figures, cpu)
    print(text)
    record.keep(options.out, "gauge", document, text)
    return 0 if is_met else 1


def as_text(figures: dict[str, dict[str, int]], cpu: dict[str, float]) -> str:
    counts = [*next(iter(figures.values()))]
    lines = [f"{'':<10}" + "".join(f"{count.replace('_', ' '):>18}" for count in counts)]
    for name, found in figures.items():
        bars = BARS.get(name, {})
        cells = (
            ""
            if count not in found
            else f"{found[count]} ({bars[count]})"
            if count in bars
            else f"{found[count]}"
            for count in counts
        )
        lines.append(f"{name:<10}" + "".join(f"{cell:>18}" for cell in cells))
    lines.append("in brackets: at most")
    lines.append(f"CPU of a request, us: hot {cpu['hot']:.0f}, cold {cpu['cold']:.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
