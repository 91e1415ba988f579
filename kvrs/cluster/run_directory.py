"""The private directory of one run, with its configuration and log files."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from kvrs.config.file import Config, dump_config
from kvrs.config.origin import UpCommand

# Ray puts Unix sockets 67 characters below its directory, and their paths end at 107.
_LONGEST = 40
_TAIL_LINES = 20


class RunDirectory:
    """Each process of the run writes a log file in it, which marks them for the guard."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="kvrs-"))
        if len(str(self.path)) > _LONGEST:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix="kvrs-", dir="/tmp"))

    def spawn(self, log_name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A Python process with a log file of this run. Ctrl-C at a terminal does not reach it."""
        with self.open_log(log_name) as log:
            return subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, process_group=0
            )

    def spawn_proxy(
        self, name: str, launch: Callable[[], UpCommand | None]
    ) -> subprocess.Popen[bytes]:
        """The environment's settings are in its file already, each proxy's own beside them."""
        arguments = ["-m", "kvrs", "proxy", "--no-env", "--config", str(self.config_path(name))]
        if (told := launch()) is not None:
            arguments += ["--launch", msgspec.json.encode(told).decode()]
        return self.spawn(name, *arguments)

    def config_path(self, proxy: str = "config") -> Path:
        """Path of the configuration of a proxy; without one, of all other processes."""
        return self.path / f"{proxy}.yaml"

    def write_config(self, config: Config, proxy: str = "config") -> None:
        """A process that starts reads the one before or this one, whole.

        Raises:
            OSError: it cannot be written; the one before stays.
        """
        path = self.config_path(proxy)
        scratch = path.with_suffix(".new")
        scratch.write_text(dump_config(config))
        scratch.replace(path)

    def open_log(self, name: str) -> IO[str]:
        return self._log(name).open("a", buffering=1)

    def log_tail(self, name: str) -> str:
        path = self._log(name)
        if not path.exists():
            return "(no log)"
        return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def keep_logs(self, directory: Path) -> None:
        """Copy the log files to a directory that outlives the run."""
        directory.mkdir(parents=True, exist_ok=True)
        for path in self.path.glob("*.log"):
            shutil.copy(path, directory)

    def _log(self, name: str) -> Path:
        return self.path / f"{name}.log"
