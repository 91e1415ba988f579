"""The public API of the laboratory, for programs that import kvrs_lab.

These names keep their meaning between minor versions, like those of `kvrs.api`. The import of this
module loads no torch.
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
    """Read a `report.json`.

    Raises:
        ReportError: the file cannot be read, or is of another schema version.
    """
    return load_report(path, SCHEMA_VERSION)
