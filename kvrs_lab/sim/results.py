"""The results of simulations as tables and files."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from kvrs.config.policy import PolicyName
from kvrs.errors import MissingExtraError, check_extras
from kvrs.tables import folded
from kvrs_lab.report.measures import combine_reports
from kvrs_lab.report.report import Report, write_report
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
    """Means over the seeds of each measure of the clients, with 95 % intervals of several seeds."""
    runs = [each.summary for each in simulated.clients.values()]
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


def latency_table(found: Mapping[str, Simulated]) -> Table:
    """A row for each measure and policy; the values are means over the seeds."""
    table = Table("", box=box.SIMPLE)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for title, key in LATENCIES:
        for name, simulated in found.items():
            row = latencies(simulated)[key]
            table.add_row(f"{title} {name}".strip(), *(_shown(row[column]) for column in _COLUMNS))
    for name, simulated in found.items():
        measured = latencies(simulated)
        for title, key in (("goodput", "goodput_per_s"), ("tokens per second", "tokens_per_s")):
            value, half = measured[key]["mean"], measured[key]["half_width"]
            text = "-" if value is None else f"{value:,.2f}/s"
            table.add_row(
                f"{title} {name}".strip(), text + ("" if half is None else f" ± {half:,.2f}")
            )
    return folded(table)


def _shown(value: Mapping[str, float | None]) -> str:
    half = value["half_width"]
    return milliseconds(value["mean"]) + ("" if half is None else f" ± {milliseconds(half)}")


def write_results(
    out: Path, name: str, document: Mapping[str, Any], found: Mapping[PolicyName, Simulated]
) -> str:
    """Write all files of a simulation: the document under its name, the rows of requests as CSV,
    and a report with its page for each policy. Returns their names.
    """
    (out / name).write_text(json.dumps(document, indent=2) + "\n")
    rows = [
        {"policy": policy.value, **row}
        for policy, simulated in found.items()
        for clients in simulated.clients.values()
        for row in clients.requests
    ]
    names = [name, *_write_rows(out, rows)]
    for policy, simulated in found.items():
        reports = [each.report for each in simulated.clients.values() if each.report is not None]
        if reports:
            folder = out if len(found) == 1 else out / policy.value
            names += [
                str((folder / file).relative_to(out)) for file in _write_report(folder, reports)
            ]
    return f"{', '.join(names)} in {out}"


def _write_rows(out: Path, rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    with (out / "requests.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return ["requests.csv"]


def _write_report(folder: Path, reports: list[Report]) -> list[str]:
    report = combine_reports(reports)
    write_report(report, folder / "report.json")
    try:
        check_extras("report")
    except MissingExtraError:
        return ["report.json"]
    # Here and not above: matplotlib takes a second to load.
    from kvrs_lab.report.html import write_html

    write_html(report, folder / "report.html")
    return ["report.json", "report.html"]
