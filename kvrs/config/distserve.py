"""The checkout of DistServe that instances are started from."""

from collections.abc import Mapping
from pathlib import Path

from kvrs.config.cluster import Backend
from kvrs.config.file import Config
from kvrs.errors import ConfigError

HOME_ENV = "DISTSERVE_HOME"


def check_home(config: Config, environ: Mapping[str, str]) -> None:
    """Check that the checkout exists, if DistServe is the configured backend. Raises ConfigError:
    it does not.
    """
    if config.cluster.backend is not Backend.DISTSERVE:
        return
    if not (home := environ.get(HOME_ENV)):
        raise ConfigError(f"{HOME_ENV}: not set; allowed: a checkout of DistServe")
    if not (Path(home) / "distserve" / "llm.py").is_file():
        raise ConfigError(
            f"{HOME_ENV}: {home} has no distserve/llm.py; allowed: a checkout of DistServe"
        )
