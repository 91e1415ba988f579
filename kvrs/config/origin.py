"""The origin of a proxy's configuration: a file, which `kvrs lab up` may have written, or its
command line.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from kvrs.config.command_line import CommandLine
from kvrs.config.file import Config


class UpCommand(msgspec.Struct, frozen=True):
    """A `kvrs lab up`, which writes a file for each of its proxies, with the ports that it
    chose.
    """

    pid: int
    file: str | None  # The one that it was given; None: it has none.
    digest: str  # Of the configuration of that file.


class ConfigFile(msgspec.Struct, frozen=True):
    """Reads the file, or the environment of a command line, again whenever it is called."""

    path: Path | None  # None: the proxy has no file.
    read: Callable[[], Config]  # Raises ConfigError.
    launch: UpCommand | None = None
    command_line: CommandLine | None = None  # In place of a file.

    def __call__(self) -> Config:
        return self.read()

    @property
    def note(self) -> str | None:
        """Why the file is not the one that an operator edits."""
        if self.command_line is not None:
            return "this proxy was started without a file: its command line counts"
        if self.launch is None:
            return None
        if self.launch.file is None:
            return "this proxy was started by kvrs lab up without a file: only its options count"
        return f"this proxy was started by kvrs lab up, which read {self.launch.file} at its start"
