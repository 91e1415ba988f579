"""The engine's part of `kvrs profile` and `kvrs doctor` (`kvrs.cli.extras.OfEngine`).

Torch is imported inside the functions, which need it.
"""

from pathlib import Path
from typing import Any

from kvrs.cli.common import filled
from kvrs_engine.cli.drafts import draft_findings

__all__ = ["draft_findings", "profile"]


def profile(given: dict[str, Any]) -> Path:
    """Measure the engine on this machine; return the file of the table."""
    from kvrs_engine.engine.profiler import ProfileOptions, run_profile

    return run_profile(filled(ProfileOptions, given))
