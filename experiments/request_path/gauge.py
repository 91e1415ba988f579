"""The path of a request of 4 tokens, and of a death with one victim, through the code of kvrs: how
many functions are called how often, in how many files of how many lines, and how often the next
call is in another file. The sixth of six equal ones is traced; beside it the CPU of a request, hot
and cold.

python -m experiments.request_path.gauge [--json] [--calls request|death] [--out DIR]
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
# The bars of the fold: files, functions, calls, changes of file.
MOST = {"request": (34, 180, 330, 170), "death": (24, 140, 280, 110)}
_PRODUCT = str(Path(kvrs.__file__).parent) + "/"


@dataclass
class Trace:
    """The calls of functions of kvrs in this thread while it is entered, in their order."""

    calls: list[tuple[str, str]] = field(default_factory=list)  # Files and functions.

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PRODUCT):
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


def cpu_us(*, is_idle: bool) -> float:
    config = make_config(NODES)
    infos = [make_info(each.id, node.id, each.role) for node, each in config.cluster.instances()]
    return uvloop.run(whole.cpu_us(config, infos, ROUNDS, is_idle=is_idle))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON alone")
    parser.add_argument("--calls", choices=MOST, help="print the calls of one of them instead")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    record = Record()
    traces = {"request": uvloop.run(traced_request()), "death": asyncio.run(traced_death())}
    if options.calls:
        print(*(f"{file} {name}" for file, name in traces[options.calls].calls), sep="\n")
        return 0
    figures: dict[str, Any] = {name: trace.figures() for name, trace in traces.items()}
    cpu = {"hot": cpu_us(is_idle=False), "cold": cpu_us(is_idle=True)}
    is_met = all(
        found <= most
        for name, limits in MOST.items()
        for found, most in zip(figures[name].values(), limits, strict=False)
    )
    document = figures | {"request_cpu_us": cpu, "at_most": MOST, "met": is_met}
    if options.json:
        print(json.dumps(document, indent=1))
        return 0
    text = as_text(figures, cpu)
    print(text)
    record.keep(options.out, "gauge", document, text)
    return 0 if is_met else 1


def as_text(figures: dict[str, dict[str, int]], cpu: dict[str, float]) -> str:
    heads = f"{'files':>12}{'functions':>12}{'calls':>12}{'changes of file':>18}{'their lines':>14}"
    lines = [f"{'':<10}{heads}"]
    for name, found in figures.items():
        shown = [
            f"{value} ({most})" for value, most in zip(found.values(), MOST[name], strict=False)
        ]
        cells = f"{shown[0]:>12}{shown[1]:>12}{shown[2]:>12}{shown[3]:>18}"
        lines.append(f"{name:<10}{cells}{found['lines_of_files']:>14}")
    lines.append("in brackets: at most")
    lines.append(f"CPU of a request, us: hot {cpu['hot']:.0f}, cold {cpu['cold']:.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
