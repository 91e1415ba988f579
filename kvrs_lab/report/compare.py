"""Reports side by side: every measure, and its ratio to the first report's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrs.tables import folded
from kvrs_lab.report.measures import MEASURES, Report, load_report
from kvrs_lab.report.report import SCHEMA_VERSION
from kvrs_lab.report.table import milliseconds, recoveries_by_option

NOTE = "Times count from arrival. Each report is one run: repeat a small difference."


def compare_reports(paths: Sequence[Path]) -> RenderableType:
    """A table of two or more reports (files, or directories with a `report.json`).

    Raises:
        ReportError: a file is no report of this version.
    """
    reports = [load_report(path, SCHEMA_VERSION) for path in paths]
    return Group(_table(names_of(paths), reports), Text(NOTE, style="dim"))


def names_of(paths: Sequence[Path]) -> list[str]:
    """Shortest names that differ."""
    folders = [
        path if path.is_dir() else path.parent if path.name == "report.json" else path
        for path in paths
    ]
    names = [folder.name or str(folder) for folder in folders]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _table(names: Sequence[str], reports: Sequence[Report]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for number, name in enumerate(names):
        table.add_column(Text(name), justify="right")
        if number:
            table.add_column(Text(f"/ {names[0]}"), justify="right")
    _add(
        table,
        "exact",
        [
            "-" if report["exact"] is None else "yes" if report["exact"] else "NO"
            for report in reports
        ],
    )
    _add(
        table,
        "streams completed",
        [f"{report['completed']} / {report['streams']}" for report in reports],
    )
    _add(table, "recoveries", [recoveries_by_option(report) for report in reports])
    for name, title, *_ in MEASURES:
        values = [report["measures"][name] for report in reports]
        if any(value is not None for value in values):
            table.add_row(title, *_cells(name, values))
    for key in differing_settings(reports):
        _add(
            table, f"setting: {key}", [str(report["settings"].get(key, "-")) for report in reports]
        )
    return folded(table)


def _add(table: Table, title: str, cells: Sequence[str]) -> None:
    first, *others = cells
    table.add_row(
        title, Text(first), *(part for other in others for part in (Text(other), Text("")))
    )


def _cells(name: str, values: Sequence[float | None]) -> list[Text]:
    seconds = name.endswith("_s") and not name.endswith("_per_s")
    first, *others = values
    cells = [Text(_shown(first, seconds))]
    for own in others:
        found = _ratio(own, first)
        cells += [Text(_shown(own, seconds)), Text("-" if found is None else f"{found:.2f}")]
    return cells


def _shown(value: float | None, seconds: bool) -> str:
    if value is None:
        return "-"
    return milliseconds(value) if seconds else f"{value:,.1f}/s"


def _ratio(value: float | None, first: float | None) -> float | None:
    return value / first if first and value is not None else None


def differing_settings(reports: Sequence[dict[str, Any]]) -> list[str]:
    keys = sorted({key for report in reports for key in report["settings"]})
    return [
        key for key in keys if len({str(report["settings"].get(key)) for report in reports}) > 1
    ]
