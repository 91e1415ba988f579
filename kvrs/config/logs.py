"""Section `logs` of the configuration."""

from enum import StrEnum
from typing import TypedDict

from pydantic import Field

from kvrs.config.settings import Settings


class LogFormat(StrEnum):
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogOptions(TypedDict):
    level: str
    as_json: bool


class LogSettings(Settings):
    format: LogFormat = Field(default=LogFormat.CONSOLE, strict=False)
    """console: a line of words and key=value; json: an object per line."""
    level: LogLevel = Field(default=LogLevel.INFO, strict=False)
    """Lowest level that is logged; `kvrs --log-level` and KVRS_LOG_LEVEL override it."""
    access: bool = False
    """Log a line for each request of a client (docs/guide/monitoring.md#logs)."""

    @property
    def options(self) -> LogOptions:
        """Arguments for `log_to` and `log_to_stderr` of `kvrs.process.logs`."""
        return {"level": self.level.value, "as_json": self.format is LogFormat.JSON}
