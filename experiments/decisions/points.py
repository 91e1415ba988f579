"""Recoveries of real clusters: a wave of streams under which one instance is killed, and predicted
beside real costs.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, log
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from kvrs.net.admin import AdminClient
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.passes import Run, Target, run_pass
from kvrs_lab.traces.records import ReplayRequest

# Bars: the median of the factors by which predictions are off, and the share within the second one.
OFF_MEDIAN, OFF, SHARE_WITHIN = 1.5, 2.0, 0.8
LEAST_JUDGED = 0.5  # Of the recoveries: the machine kept the pace of the profile.
_LOOK_S = 0.05
_UNDER_WAY_S = 300.0


_TIMES = ("predicted_s", "low_s", "high_s", "real_s")


@dataclass(slots=True)
class Point:
    """One recovery."""

    option: str
    predicted_s: float
    low_s: float  # The predicted interval.
    high_s: float
    real_s: float
    victims: int  # Of its death.
    # Steps of the target over the profile's, before the kill or behind the recovery, whichever was
    # longer; None: they were not compared.
    pace: float | None = None

    @property
    def off(self) -> float:
        """The factor between predicted and real cost, at least 1."""
        return exp(abs(log(self.predicted_s / self.real_s)))

    def as_row(self) -> dict[str, Any]:
        row = asdict(self) | {"off": self.off}
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}


@dataclass(slots=True)
class Wave:
    """Streams under way, and the death of the decode instance that had most of them."""

    victim: str
    killed_s: float  # Since the beginning of the run.
    streams: list[dict[str, Any]]  # The proxy's rows at the kill.
    rows: list[dict[str, Any]]  # Its recoveries that brought a token.
    run: Run
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    def points(self) -> list[Point]:
        victims = len({row["stream"] for row in self.rows})
        return [
            Point(row["option"], **{name: row[name] for name in _TIMES}, victims=victims)
            for row in self.rows
        ]


async def wave(
    url: str,
    admin_url: str,
    requests: Sequence[ReplayRequest],
    tokens: int,
    kill: Callable[[str], None],
) -> Wave:
    """Send requests; when all have `tokens` tokens, kill the decode instance that has most of them,
    and wait until all have ended.
    """
    async with AdminPort(AdminClient(admin_url)) as port:
        begun_s, begun_wall_s = time.monotonic(), time.time()
        load = asyncio.create_task(run_pass(Target(url), requests, [], 0))
        try:
            async with asyncio.timeout(_UNDER_WAY_S):
                streams = await _under_way(port, len(requests), tokens, load)
            ((victim, _),) = Counter(each["decode"] for each in streams).most_common(1)
            killed_s = time.monotonic() - begun_s
            kill(victim)
            run = await load
        finally:
            load.cancel()
        found = (await port.state())["recoveries"]
    rows = [
        row
        for row in found
        if row["at_s"] >= begun_wall_s and row["from"] == victim and row["real_s"] is not None
    ]
    return Wave(victim, killed_s, streams, rows, run)


async def _under_way(
    port: AdminPort, count: int, tokens: int, load: asyncio.Task[Run]
) -> list[dict[str, Any]]:
    while not load.done():
        streams: list[dict[str, Any]] = (await port.state())["streams"]
        if len(streams) == count and all(each["output_tokens"] >= tokens for each in streams):
            return streams
        await asyncio.sleep(_LOOK_S)
    raise RuntimeError("streams had ended before all were under way")


def row_of(asked: str, one: Wave, points: Sequence[Point]) -> dict[str, Any]:
    """Return the figures of a wave, for the kept result."""
    pressure = one.run.cpu_pressure
    return {
        "asked": asked,
        "victim": one.victim,
        "load": round(one.load, 2),
        "cpu_pressure": None if pressure is None else round(pressure, 3),
        "failed": sum(not record.completed for record in one.run.records),
        "recoveries": [point.as_row() for point in points],
    }


def conditions(rows: Sequence[dict[str, Any]], seed: int) -> str:
    """Describe the load of the machine during the waves."""
    pressures = [row["cpu_pressure"] for row in rows if row["cpu_pressure"] is not None]
    pressure = f"{fmean(pressures):.0%}" if pressures else "not known"
    load = fmean(row["load"] for row in rows)
    return f"{len(rows)} kills, seed {seed}; load average {load:.1f}, CPU pressure {pressure}"


def show(console: Console, points: Sequence[Point], judged: Sequence[Point]) -> None:
    """Print the factors by option, and all points."""
    table = Table(title="Predicted and real cost of recoveries")
    for name in ("option", "n", "judged", "predicted / real", "off, median", "p80", "within x2"):
        table.add_column(name, justify="left" if name == "option" else "right")
    for option in [*sorted({each.option for each in points}), "all"]:
        of = [each for each in points if option in (each.option, "all")]
        counted = [each for each in judged if option in (each.option, "all")]
        cells = [*_cells(counted)] if counted else ["-"] * 4
        table.add_row(option, str(len(of)), str(len(counted)), *cells)
    console.print(table)
    rows = Table(title="All points: off by a factor, and steps over the profile's where compared")
    for name in ("option", "victims", "predicted, s", "low", "high", "real, s", "off", "steps"):
        rows.add_column(name, justify="left" if name == "option" else "right")
    for each in points:
        costs = (f"{value:.3f}" for value in (getattr(each, name) for name in _TIMES))
        pace = "-" if each.pace is None else f"x{each.pace:.2f}"
        rows.add_row(each.option, str(each.victims), *costs, f"x{each.off:.2f}", pace)
    console.print(rows)


def _cells(points: Sequence[Point]) -> Iterator[str]:
    offs = sorted(each.off for each in points)
    yield f"x{median(each.predicted_s / each.real_s for each in points):.2f}"
    yield f"x{median(offs):.2f}"
    yield f"x{offs[min(len(offs) - 1, int(0.8 * len(offs)))]:.2f}"
    yield f"{_within(points):.0%}"


def _within(points: Sequence[Point]) -> float:
    return sum(each.off <= OFF for each in points) / len(points)


def missed(points: Sequence[Point], judged: Sequence[Point]) -> Iterator[str]:
    """Yield the bars that were missed."""
    if len(judged) < LEAST_JUDGED * len(points) or not judged:
        yield (
            f"the machine did not keep the pace: {len(judged)} of {len(points)} recoveries with "
            f"steps as in the profile, bar {LEAST_JUDGED:.0%}"
        )
        return
    if (off := median(each.off for each in judged)) > OFF_MEDIAN:
        yield f"median off by x{off:.2f}, bar x{OFF_MEDIAN}"


def missed_within(judged: Sequence[Point]) -> Iterator[str]:
    """Yield the bar of the spread, if it was missed."""
    if judged and (share := _within(judged)) < SHARE_WITHIN:
        yield f"within x{OFF:g} {share:.0%}, bar {SHARE_WITHIN:.0%}"
