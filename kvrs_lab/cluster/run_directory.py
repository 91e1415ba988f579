"""The files of one run: a private directory with configurations and logs, and a directory for the
agents' segments, which outlive a killed agent. The guard removes both.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from kvrs.config.file import Config, dump_config
from kvrs.config.sections import DraftSourceName
from kvrs.errors import ConfigError
from kvrs_lab.cluster.guard import start_guard
from kvrs_lab.cluster.processes import LaunchError, Progress

# Ray puts Unix sockets 67 characters below its directory, and socket paths have at most 107.
_LONGEST = 40
_TAIL_LINES = 20


class RunDirectory:
    """The directory of a run. Processes write log files there, which mark them for the guard."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="kvrs-"))
        if len(str(self.path)) > _LONGEST:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix="kvrs-", dir="/tmp"))
        self._owned: Config | None = None

    def guard(self, config: Config, *, apart: bool = False) -> None:
        """Start the guard, before any other file is made; `apart` as in `start_guard`."""
        self._guard = start_guard(self.path, segments_of(config, self.path), apart=apart)

    def close(self) -> None:
        """Let the guard end the rest and remove the files."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard.wait()

    def own(self, config: Config, progress: Progress = lambda line: None) -> Config:
        """The configuration with this run's segments, and with a generated model if none is named.
        Both are made on the first call.

        Raises:
            ConfigError: the directory of segments cannot be made.
            LaunchError: the model cannot be generated.
        """
        if self._owned is None:
            self._owned = self._with_model(with_segments(config, self.path), progress)
        model = {"model": self._owned.cluster.model}
        draft = {"draft": config.speculation.draft or self._owned.speculation.draft}
        changes = {
            "backup": self._owned.backup,
            "cluster": config.cluster.model_copy(update=model),
            "speculation": config.speculation.model_copy(update=draft),
        }
        return config.model_copy(update=changes)

    def _with_model(self, config: Config, progress: Progress) -> Config:
        if config.cluster.model is not None:
            return config
        progress("generating a tiny random model")
        drafts, model = config.speculation, self.path / "tiny-llama"
        is_pair = drafts.source is DraftSourceName.DRAFT and drafts.draft is None
        # A separate process, so that the launcher never loads torch.
        pair = self.path / "pair"
        arguments = ["--pair", str(pair)] if is_pair else [str(model)]
        seed = str(config.cluster.engine.seed)
        if self.spawn("tiny", "-m", "kvrs_engine.engine.tiny", *arguments, seed).wait():
            raise LaunchError(
                f"the tiny random model could not be generated\n{self.log_tail('tiny')}"
            )
        if is_pair:
            (pair / "target").rename(model)
            drafts = drafts.model_copy(update={"draft": str(pair / "draft")})
        cluster = config.cluster.model_copy(update={"model": str(model)})
        return config.model_copy(update={"cluster": cluster, "speculation": drafts})

    def spawn(self, log_name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a Python process with a log file. Ctrl-C at a terminal does not reach it."""
        with self.open_log(log_name) as log:
            return subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, process_group=0
            )

    def config_path(self, proxy: str = "config") -> Path:
        """Path of a proxy's configuration; by default, that of all other processes."""
        return self.path / f"{proxy}.yaml"

    def write_config(self, config: Config, proxy: str = "config") -> None:
        """Replace a configuration file atomically, so that no process reads a part of it.

        Raises:
            OSError: a failed write, after which the former file stays.
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


def segments_of(config: Config, run_directory: Path) -> Path:
    """The directory of a run's agent segments, below `backup.directory`."""
    return Path(config.backup.directory) / run_directory.name


def with_segments(config: Config, run_directory: Path) -> Config:
    """The configuration with a new directory for segments, if agents run. Other users have no
    access.

    Raises:
        ConfigError: the directory cannot be made.
    """
    if not config.agents_run:
        return config
    own = segments_of(config, run_directory)
    try:
        own.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"backup.directory: {own.parent}: {error.strerror}; allowed: a directory to write in"
        ) from None
    backup = config.backup.model_copy(update={"directory": str(own)})
    return config.model_copy(update={"backup": backup})
