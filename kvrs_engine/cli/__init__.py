"""The engine's part of `kvrs profile` (`kvrs.cli.extras.profile_engine`).

Torch is imported inside the functions, which need it.
"""

from pathlib import Path
from typing import Any

from kvrs.cli.common import filled

__all__ = ["profile"]


def profile(given: dict[str, Any]) -> Path:
    """Measure the engine on this machine; return the file of the table."""
    from kvrs_engine.engine.profiler import ProfileOptions, run_profile

    return run_profile(filled(ProfileOptions, given))
