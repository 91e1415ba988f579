"""Source of a proxy's configuration: a file, possibly written by `kvrs lab up`, or the command
line.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from kvrs.config.command_line import CommandLine
from kvrs.config.file import Config


class UpCommand(msgspec.Struct, frozen=True):
    """A running `kvrs lab up`, which writes a file with the ports that it has chosen for each of
    its proxies.
    """

    pid: int
    file: str | None  # Configuration file given to the command; None: no file.
    digest: str  # Digest of the configuration in that file.


class ConfigFile(msgspec.Struct, frozen=True):
    """Reader of a proxy's configuration, from its file or its command line; each call
    reads anew.
    """

    path: Path | None  # Path of the configuration file; None: the proxy has no file.
    read: Callable[[], Config]  # Read and check the configuration. Raises ConfigError.
    launch: UpCommand | None = None
    command_line: CommandLine | None = None  # The command line, if the proxy has no file.

    def __call__(self) -> Config:
        return self.read()

    @property
    def note(self) -> str | None:
        """Reason why an edit of this file changes nothing, for operators; None: an edit counts."""
        if self.command_line is not None:
            return "this proxy was started without a file: its command line counts"
        if self.launch is None:
            return None
        if self.launch.file is None:
            return "this proxy was started by kvrs lab up without a file: only its options count"
        return f"this proxy was started by kvrs lab up, which read {self.launch.file} at its start"
