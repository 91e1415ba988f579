"""The directory of a run's report."""

from pathlib import Path
from tempfile import TemporaryFile

from kvrs.errors import ConfigError


def claim_directory(directory: Path) -> None:
    """Check that the directory is writable, before a run whose result would be lost.

    Raises:
        ConfigError: the directory is not writable.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out: {directory}: {error.strerror}; allowed: a directory that can be written to"
        ) from None
