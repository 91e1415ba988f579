"""The latencies of simulated clients, as a document and as a table."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from kvrs.tables import folded
from kvrs_lab.report.student import interval
from kvrs_lab.report.table import milliseconds
from kvrs_lab.sim.seeds import Simulated

# Title and key in the summary of a run.
LATENCIES = (
    ("TTFT", "arrival_ttft_s"),
    ("TPOT", "tpot_s"),
    ("end to end", "latency_s"),
    ("gap between tokens", "tbt_s"),
    ("longest gap of a stream", "max_gap_s"),
)
_COLUMNS = ("mean", "p50", "p90", "p99")
_RATES = ("goodput_per_s", "tokens_per_s")


def latencies(simulated: Simulated) -> dict[str, Any]:
    """Means over the seeds of each client measure, with 95 % intervals for several seeds."""
    runs = [*simulated.clients.values()]
    return {
        key: {column: _over_seeds([run[key][column] for run in runs]) for column in _COLUMNS}
        for _, key in LATENCIES
    } | {key: _over_seeds([run[key] for run in runs]) for key in _RATES}


def _over_seeds(values: list[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    found = interval(known)
    return {
        "mean": fmean(known) if known else None,
        "half_width": None if found is None else found.half_width,
    }


def latency_table(simulated: Simulated) -> Table:
    """A table with a row for each measure; values are means over the seeds."""
    table = Table("", box=box.SIMPLE)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    measured = latencies(simulated)
    for title, key in LATENCIES:
        table.add_row(title, *(_shown(measured[key][column]) for column in _COLUMNS))
    for title, key in (("goodput", "goodput_per_s"), ("tokens per second", "tokens_per_s")):
        value, half = measured[key]["mean"], measured[key]["half_width"]
        text = "-" if value is None else f"{value:,.2f}/s"
        table.add_row(title, text + ("" if half is None else f" ± {half:,.2f}"))
    return folded(table)


def _shown(value: Mapping[str, float | None]) -> str:
    half = value["half_width"]
    return milliseconds(value["mean"]) + ("" if half is None else f" ± {milliseconds(half)}")
