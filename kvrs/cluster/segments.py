"""Where the agents of one run keep their segments: a directory that is theirs alone, so that it can go when the run does.

An agent that was killed leaves its segments to the one that is started in its place; only whoever knows that the run is
over may remove them.
"""

from pathlib import Path

from kvrs.config import Config
from kvrs.errors import ConfigError


def own_segments(config: Config, run_directory: Path) -> tuple[Config, list[Path]]:
    """The same configuration with a directory of this run's own below `backup.directory`, and that directory, not yet made.

    Without agents there is none.
    """
    if not config.agents_run:
        return config, []
    own = Path(config.backup.directory) / run_directory.name
    return config.model_copy(update={"backup": config.backup.model_copy(update={"directory": str(own)})}), [own]


def make_segments(directories: list[Path]) -> None:
    """Make what `own_segments` named, for nobody else to look into.

    Raises:
        ConfigError: it cannot be made.
    """
    for own in directories:
        try:
            own.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError([f"backup.directory: {own.parent}: {error.strerror}; allowed: a directory to write in"]) from None
