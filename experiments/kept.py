"""Kept results: their figures, the bars that they miss, and figures of them in prose.

A figure in a page of docs/ that comes from a kept result has a comment behind it:

    a token over TLS took the proxy 1.22<!-- kept: tls/results/tls.json ratio .2f --> times the CPU

It names the result below experiments/, where in it the figure is (keys and indices between
slashes; `name=d0` chooses the entry of a list), and its format, with a factor if need be
(`.1f*100`). `python -m experiments.run_all --readme` writes the figures anew; a test compares them.
"""

import json
import re
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parent

_MARKED = re.compile(r"([+-]?\d[\d,]*(?:\.\d+)?)(<!-- kept: (\S+) ([^>]+) (\S+) -->)")
_MISS = re.compile(r"\bMISSED\b|\bFAILED\b|\bmissed$")


@cache
def kept(path: str) -> Any:
    """The figures of a kept result, by its path below experiments/."""
    return json.loads((EXPERIMENTS / path).read_text())


def runs_of(path: str) -> list[dict[str, Any]]:
    """The circumstances of the runs that made a result, the last one at the end; a result that is
    measured in parts has several.
    """
    result = kept(path)
    earlier = [run for run in result.get("runs", []) if "commit" in run]
    return [*earlier, result["run"]]


def misses(path: str) -> list[str]:
    """What the text of a kept result says of bars that it misses."""
    text = (EXPERIMENTS / path).with_suffix(".txt")
    return misses_in(text.read_text()) if text.exists() else []


def misses_in(text: str) -> list[str]:
    """The lines that name a missed bar. Where one says no more than that there is one, those of
    its paragraph that have a bar.
    """
    return [
        " ".join(line.split())
        for paragraph in text.split("\n\n")
        for line in _missing_lines(paragraph.strip().splitlines())
    ]


def _missing_lines(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not _MISS.search(line):
            continue
        if line not in ("MISSED", "FAILED"):
            yield line.removeprefix("MISSED: ")
        else:
            yield from [each for each in lines if "bar" in each] or [
                "a bar that only its README names"
            ]


def figure_at(path: str, where: str) -> Any:
    """The figure at a place of a kept result.

    Raises:
        KeyError, IndexError, StopIteration: there is nothing at this place.
    """
    return reduce(_step, where.split("/"), kept(path))


def _step(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value[key]
    name, equals, wanted = key.partition("=")
    if equals:
        return next(each for each in value if str(each[name]) == wanted)
    return value[int(key)]


def renewed(page: str) -> str:
    """The page with every marked figure as the kept results have it now."""

    def figure(match: re.Match[str]) -> str:
        form, _, factor = match[5].partition("*")
        return f"{figure_at(match[3], match[4]) * float(factor or 1):{form}}{match[2]}"

    return _MARKED.sub(figure, page)
