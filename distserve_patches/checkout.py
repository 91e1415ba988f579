"""Finds and imports a checkout of DistServe, without checks and patches."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from kvrs.errors import ConfigError

HOME_ENV = "DISTSERVE_HOME"


def find(home: Path | str | None) -> Path:
    """Find the directory of the checkout: `home`, or that of the environment.

    Raises:
        ConfigError: the directory is missing.
    """
    given = home or os.environ.get(HOME_ENV)
    if not given:
        raise ConfigError(f"{HOME_ENV}: not set; allowed: a checkout of DistServe")
    root = Path(given).resolve()
    if not (root / "distserve" / "single_stage_engine.py").is_file():
        raise ConfigError(
            f"{HOME_ENV}: got {root}; allowed: a checkout of DistServe "
            f"(distserve/single_stage_engine.py is not there)"
        )
    return root


def import_plain(home: Path, *, off_gpu: bool) -> None:
    """Import the checkout, with a stand-in for SwiftTransformer if `off_gpu`.

    Raises:
        ConfigError: an import of the checkout is missing.
    """
    # First on the path, before an installed DistServe; no top module of it hides another package.
    sys.path.insert(0, str(home))
    try:
        _import(off_gpu=off_gpu)
    except ImportError as error:
        raise ConfigError(
            f"DistServe at {home}: {error}; `pip install 'kvrs[distserve]'` brings what it imports"
        ) from error
    except (OSError, RuntimeError) as error:
        # SwiftTransformer is missing, or was built for another torch.
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"DistServe at {home}: {reason} (SWIFT_TRANSFORMER_LIB_PATH says where the library is)"
        ) from error


def _import(*, off_gpu: bool) -> None:
    if not off_gpu:
        importlib.import_module("distserve")
        return

    from distserve_patches.cpu import library

    with library.offered():
        importlib.import_module("distserve")


def para_worker() -> Any:
    """Return upstream's `ParaWorker` as a plain class, without Ray's decorator, to subclass."""
    from distserve.worker import ParaWorker

    return ParaWorker.__ray_metadata__.modified_class.__ray_actor_class__
