"""`kvrs lab report`: one report drawn again, or several beside each other."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kvrs.errors import ConfigError, check_extras
from kvrs.tables import output
from kvrs_lab.report.compare import compare_reports, comparison, load_reports, names_of
from kvrs_lab.report.measures import ReportError, load_report, outline
from kvrs_lab.report.output import claim_directory
from kvrs_lab.report.report import SCHEMA_VERSION
from kvrs_lab.report.table import terminal_table


def run_report(paths: Sequence[Path], out: Path | None, as_json: bool) -> None:
    """Print a report, or the comparison of several; with `out` write the page of one there.

    Raises:
        ReportError: a file is no report of this version.
        ConfigError, MissingExtraError: the page cannot be written, or not be drawn.
    """
    if len(paths) > 1:
        if out is not None:
            raise ConfigError(f"--out: got {len(paths)} reports; allowed: one, whose page it draws")
        _several(paths, as_json)
        return
    if out is not None:
        check_extras("report")
        claim_directory(out)
    _one(paths[0], out, as_json)


def _one(path: Path, out: Path | None, as_json: bool) -> None:
    report = load_report(path, SCHEMA_VERSION)
    if as_json:
        print(json.dumps(outline(report), indent=2))
    else:
        _drawn(path, lambda: output().print(terminal_table(report)))
    if out is not None:
        # Here and not above: matplotlib takes a second to load.
        from kvrs_lab.report.html import write_html

        _drawn(path, lambda: write_html(report, out / "report.html"))
        Console(stderr=True).print(f"page: {out / 'report.html'}", markup=False, soft_wrap=True)


def _several(paths: Sequence[Path], as_json: bool) -> None:
    if as_json:
        print(json.dumps(comparison(names_of(paths), load_reports(paths)), indent=2))
    else:
        output().print(compare_reports(paths))


def _drawn(path: Path, draw: Callable[[], object]) -> None:
    """Files come from outside: one that lacks what a page shows is no report."""
    try:
        draw()
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{path}: it lacks what a page shows: {error}") from None
