"""The directory of the agents' segments, one per run, so that it can be removed with the run.

A killed agent leaves its segments to its successor; only the guard removes them, at the end of the
run.
"""

from pathlib import Path

from kvrs.config.file import Config
from kvrs.errors import ConfigError


def own_segments(config: Config, run_directory: Path) -> tuple[Config, list[Path]]:
    """The same configuration with a directory of this run below `backup.directory`, and that
    directory, not yet created.

    Without agents there is none.
    """
    if not config.agents_run:
        return config, []
    own = Path(config.backup.directory) / run_directory.name
    return config.model_copy(
        update={"backup": config.backup.model_copy(update={"directory": str(own)})}
    ), [own]


def make_segments(directories: list[Path]) -> None:
    """Create the directories of `own_segments`, without access for other users.

    Raises:
        ConfigError: one cannot be created.
    """
    for own in directories:
        try:
            own.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(
                [
                    f"backup.directory: {own.parent}: {error.strerror}; allowed: a "
                    f"directory to write in"
                ]
            ) from None
