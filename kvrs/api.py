"""The public API: what a program that imports kvrs may rely on.

These names keep their meaning between minor versions; everything else may move. Importing this
module loads neither torch nor a web server.
"""

from pathlib import Path

from kvrs import __version__
from kvrs.config.file import Config, load_config, parse_config
from kvrs.core.event_log import Header, LogEntry, Rerun
from kvrs.core.event_log import read as read_event_log
from kvrs.core.event_log import rerun as rerun_event_log
from kvrs.core.explanation import Explanation, Question, explain
from kvrs.core.model import actions, events
from kvrs.core.recovery import RecoveryPolicy
from kvrs.errors import (
    ConfigError,
    KvrsError,
    LogError,
    MissingExtraError,
    TraceError,
)
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.catalog import decode_table, prefill_table
from kvrs_lab.faults.language import Fault, load_faults
from kvrs_lab.report.measures import Report, ReportError, load_report
from kvrs_lab.report.report import SCHEMA_VERSION
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.mooncake import Trace, TraceRequest

__all__ = [
    "Config",
    "ConfigError",
    "Explanation",
    "Fault",
    "Header",
    "InstanceId",
    "KvrsError",
    "LogEntry",
    "LogError",
    "MissingExtraError",
    "NodeId",
    "Question",
    "RecoveryPolicy",
    "Report",
    "ReportError",
    "Rerun",
    "StreamId",
    "Trace",
    "TraceError",
    "TraceRequest",
    "__version__",
    "actions",
    "decode_table",
    "events",
    "explain",
    "load_config",
    "load_faults",
    "load_trace",
    "parse_config",
    "prefill_table",
    "read_event_log",
    "read_report",
    "rerun_event_log",
]


def read_report(path: Path) -> Report:
    """The content of a `report.json`.

    Raises:
        ReportError: the file cannot be read, or is of another schema version.
    """
    return load_report(path, SCHEMA_VERSION)
