"""Reports side by side: every measure, its ratio to the first report's, and the interval of the
ratio.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrs.tables import folded
from kvrs_lab.report.measures import MEASURES, Report, ReportError, load_report, outline, values_of
from kvrs_lab.report.report import SCHEMA_VERSION
from kvrs_lab.report.student import Interval, interval, ratio
from kvrs_lab.report.table import recoveries_by_option

NOTE = (
    "Times count from arrival. ± and [ ] are 95 % intervals (Student) over repeated "
    "runs; one run has none. "
    "A ratio is green where it is better and red where it is worse, if its interval excludes 1."
)


def compare_reports(paths: Sequence[Path]) -> RenderableType:
    """A table of two or more reports (files, or directories with a `report.json`).

    Raises:
        ReportError: fewer than two, or a file that is no report of this version.
    """
    reports = load_reports(paths)
    return Group(_table(names_of(paths), reports), Text(NOTE, style="dim"))


def load_reports(paths: Sequence[Path]) -> list[Report]:
    """Two or more reports.

    Raises:
        ReportError: fewer than two, or a file that is no report of this version.
    """
    if len(paths) < 2:
        raise ReportError(f"got {len(paths)} report(s); allowed: at least two to compare")
    return [load_report(path, SCHEMA_VERSION) for path in paths]


def comparison(names: Sequence[str], reports: Sequence[Report]) -> dict[str, Any]:
    """The same as JSON: each report's outline, and each measure with its ratios to the first."""
    measures = []
    for name, title, _, more_is_better in MEASURES:
        values = [values_of(report, name) for report in reports]
        if any(values):
            ratios = [ratio(own, values[0]) for own in values[1:]]
            measures.append(
                {
                    "measure": name,
                    "title": title,
                    "more_is_better": more_is_better,
                    "values": [_plain(interval(own)) for own in values],
                    "ratios": [None, *map(_plain, ratios)],
                }
            )
    return {
        "reports": [
            {"name": name, **outline(report)} for name, report in zip(names, reports, strict=True)
        ],
        "measures": measures,
        "differing_settings": differing_settings(reports),
    }


def _plain(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names as short as possible while they differ."""
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
    _add(table, "runs", [str(len(report["repeats"])) for report in reports])
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
    _add(table, "recoveries, run 1", [recoveries_by_option(report) for report in reports])
    for name, title, _, more_is_better in MEASURES:
        values = [values_of(report, name) for report in reports]
        if any(values):
            table.add_row(title, *_cells(name, values, more_is_better))
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


def _cells(name: str, values: Sequence[list[float]], more_is_better: bool) -> list[Text]:
    seconds = name.endswith("_s") and not name.endswith("_per_s")
    cells = [Text(_shown(interval(values[0]), seconds))]
    for own in values[1:]:
        cells += [
            Text(_shown(interval(own), seconds)),
            _ratio(ratio(own, values[0]), more_is_better),
        ]
    return cells


def _shown(found: Interval | None, seconds: bool) -> str:
    if found is None:
        return "-"
    scale, unit = (
        (1000, " ms") if seconds and abs(found.mean) < 10 else (1, " s" if seconds else "/s")
    )
    spread = "" if found.half_width is None else f" ± {found.half_width * scale:,.1f}"
    return f"{found.mean * scale:,.1f}{spread}{unit}"


def _ratio(found: Interval | None, more_is_better: bool) -> Text:
    if found is None:
        return Text("-")
    if found.half_width is None:
        return Text(f"{found.mean:.2f}")
    low, high = found.mean - found.half_width, found.mean + found.half_width
    style = "" if low <= 1 <= high else "green" if (found.mean > 1) == more_is_better else "red"
    return Text(f"{found.mean:.2f} [{low:.2f}, {high:.2f}]", style=style)


def differing_settings(reports: Sequence[dict[str, Any]]) -> list[str]:
    keys = sorted({key for report in reports for key in report["settings"]})
    return [
        key for key in keys if len({str(report["settings"].get(key)) for report in reports}) > 1
    ]
