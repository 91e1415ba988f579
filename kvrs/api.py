"""The public API: what a program that imports kvrs may rely on.

These names keep their meaning between minor versions; everything else may move. Importing this
module loads neither torch nor a web server. Traces, faults, reports and explained decisions are in
`kvrs_lab.api`.
"""

from kvrs import __version__
from kvrs.config.file import Config, load_config, parse_config
from kvrs.core.event_log import Header, LogEntry, Rerun
from kvrs.core.event_log import read as read_event_log
from kvrs.core.event_log import rerun as rerun_event_log
from kvrs.core.model import actions, events
from kvrs.core.recovery import RecoveryPolicy
from kvrs.errors import (
    ConfigError,
    KvrsError,
    LogError,
    MissingExtraError,
)
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.catalog import decode_table, prefill_table

__all__ = [
    "Config",
    "ConfigError",
    "Header",
    "InstanceId",
    "KvrsError",
    "LogEntry",
    "LogError",
    "MissingExtraError",
    "NodeId",
    "RecoveryPolicy",
    "Rerun",
    "StreamId",
    "__version__",
    "actions",
    "decode_table",
    "events",
    "load_config",
    "parse_config",
    "prefill_table",
    "read_event_log",
    "rerun_event_log",
]
