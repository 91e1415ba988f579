"""Kept results: their figures, the bars that they miss, and figures of them in prose.

A figure in a page of docs/ that comes from a kept result has a comment behind it:

    a token comes 0.17<!-- kept: healthy_path/results/healthy_path.json added .2f --> ms later

It names the result below experiments/, where in it the figure is, and its format, with a factor if
need be (`.1f*100`). A place is keys and indices between slashes; `name=d0` chooses the entries of a
list that have this. Where it is `*` for all entries, `sum`, `median` or `max` stands before it:
`median rounds/*/cpu_s`. `python -m experiments.run_all --readme` writes the figures anew; a test
compares them.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parent

MARKED = re.compile(r"([+-]?\d[\d,]*(?:\.\d+)?)(<!-- kept:\s(\S+)\s([^>]+?)\s+(\S+)\s+-->)")
_OF_ALL: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "median": statistics.median,
    "max": max,
}
_MISS = re.compile(r"\bMISSED\b|\bFAILED\b|\bmissed$")


@cache
def kept(path: str) -> Any:
    """The figures of a kept result, by its path below experiments/."""
    return json.loads((EXPERIMENTS / path).read_text())


@dataclass(frozen=True, slots=True)
class Results:
    """The results below a folder: the kept ones, or those of a run of its own."""

    root: Path = EXPERIMENTS

    def has(self, path: str) -> bool:
        return (self.root / path).exists()

    def __call__(self, path: str) -> Any:
        """The figures of a result, by its path, such as `notice/results/notice.json`."""
        return _figures(self.root / path)


@cache
def _figures(path: Path) -> Any:
    return json.loads(path.read_text())


def runs_of(path: str) -> list[dict[str, Any]]:
    """The circumstances of the runs that made a result, the last one at the end; a result that is
    measured in parts has several.
    """
    result = kept(path)
    earlier = [run for run in result.get("runs", []) if "commit" in run]
    return [*earlier, result["run"]]


def misses(path: str) -> list[str]:
    """Missed bars, as the text of a kept result names them."""
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


def figure_at(path: str, where: str) -> float:
    """The figure at a place of a kept result.

    Raises:
        ValueError: there is none.
    """
    of_all, _, place = where.partition(" ")
    if of_all not in _OF_ALL:
        of_all, place = "", where
    try:
        found = [float(each) for each in _at(kept(path), place.split("/"))]
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{path}: got {where}; allowed: a place of a figure") from error
    if len(found) != 1 and not of_all:
        raise ValueError(f"{path}: got {where}; allowed: the place of one figure")
    return _OF_ALL[of_all](found) if of_all else found[0]


def _at(value: Any, keys: Sequence[str]) -> Iterator[Any]:
    if not keys:
        yield value
        return
    name, equals, wanted = keys[0].partition("=")
    if keys[0] == "*":
        inner = list(value.values() if isinstance(value, dict) else value)
    elif isinstance(value, dict):
        inner = [value[keys[0]]]
    elif equals:
        inner = [each for each in value if str(each[name]) == wanted]
    else:
        inner = [value[int(keys[0])]]
    for each in inner:
        yield from _at(each, keys[1:])


def renewed(page: str) -> str:
    """The page with every marked figure as the kept results have it now."""

    def figure(match: re.Match[str]) -> str:
        form, _, factor = match[5].partition("*")
        where = " ".join(match[4].split())  # Lines are broken at spaces.
        return f"{figure_at(match[3], where) * float(factor or 1):{form}}{match[2]}"

    return MARKED.sub(figure, page)
