"""The public API of the laboratory: what a program that imports kvrs_lab may rely on.

As with `kvrs.api`, these names keep their meaning between minor versions, and importing this module
loads no torch.
"""

from pathlib import Path

from kvrs.errors import TraceError
from kvrs_lab.explain.explanation import Explanation, Question, explain
from kvrs_lab.faults.language import Fault, load_faults
from kvrs_lab.report.measures import Report, ReportError, load_report
from kvrs_lab.report.report import SCHEMA_VERSION
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.mooncake import Trace, TraceRequest

__all__ = [
    "Explanation",
    "Fault",
    "Question",
    "Report",
    "ReportError",
    "Trace",
    "TraceError",
    "TraceRequest",
    "explain",
    "load_faults",
    "load_trace",
    "read_report",
]


def read_report(path: Path) -> Report:
    """The content of a `report.json`.

    Raises:
        ReportError: the file cannot be read, or is of another schema version.
    """
    return load_report(path, SCHEMA_VERSION)
