"""`kvrs lab report`: a single report, or several side by side."""

from collections.abc import Sequence
from pathlib import Path

from kvrs.tables import output
from kvrs_lab.report.compare import compare_reports
from kvrs_lab.report.measures import ReportError, load_report
from kvrs_lab.report.report import SCHEMA_VERSION
from kvrs_lab.report.table import terminal_table


def run_report(paths: Sequence[Path]) -> None:
    """Print a report, or the comparison of several.

    Raises:
        ReportError: a file is no report of this version.
    """
    if len(paths) > 1:
        output().print(compare_reports(paths))
        return
    report = load_report(paths[0], SCHEMA_VERSION)
    try:
        output().print(terminal_table(report))
    except (KeyError, TypeError, AttributeError) as error:  # A file may be of any origin.
        raise ReportError(f"{paths[0]}: it lacks what a table shows: {error}") from None
