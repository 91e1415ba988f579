"""Finds a checkout of DistServe, loads it with what it lacks, and exchanges its worker class.

`load` comes first in a process: only after it can `distserve.*`, and modules that subclass it, be imported.
"""

import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrs.errors import ConfigError

HOME_ENV = "DISTSERVE_HOME"
# Tell a worker process what is loaded where it was started.
_KIND_ENV = "KVRS_DISTSERVE_WORKER"
_MEMORY_ENV = "KVRS_DISTSERVE_LOGICAL_GPU_BYTES"
# Some thousand tokens of a small model.
LOGICAL_GPU_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Loaded:
    home: Path
    off_gpu: bool
    logical_gpu_bytes: int


_loaded: _Loaded | None = None


def load(home: Path | str | None = None, *, off_gpu: bool = False, logical_gpu_bytes: int = LOGICAL_GPU_BYTES) -> None:
    """Import the checkout at `home` (none: the environment's DISTSERVE_HOME) and patch it; a second call does nothing.

    With `off_gpu` it runs on a CPU: kvrs' engine stands for SwiftTransformer, and shared memory for GPU memory, of which each
    worker believes to have `logical_gpu_bytes`.

    Raises:
        ConfigError: there is no checkout, or it is not the one that kvrs was written for.
    """
    asked = _Loaded(checkout(home), off_gpu, logical_gpu_bytes)
    if _loaded is not None:
        assert _loaded == asked, f"DistServe is loaded already: {_loaded}"
        return
    _load(asked)

    from distserve_patches.worker import PageWorker

    use_worker(PageWorker)


def load_in_worker() -> None:
    """In a worker process: load what the process that started it had loaded. Elsewhere: nothing."""
    if (kind := os.environ.pop(_KIND_ENV, None)) is not None:
        _load(_Loaded(checkout(None), kind == "cpu", int(os.environ[_MEMORY_ENV])))


def para_worker() -> Any:
    """Upstream's `ParaWorker` as the plain class that it is below Ray's decorator: what to subclass."""
    from distserve.worker import ParaWorker

    return ParaWorker.__ray_metadata__.modified_class.__ray_actor_class__


def use_worker(worker: type) -> None:
    """Let engines start `worker` in every new actor: a subclass of `para_worker()` at the top of an importable module.

    What its methods name as their concurrency group gets a thread of its own.
    """
    import distserve.single_stage_engine as engines
    import ray

    assert _loaded is not None, "load comes first"
    # Ray was started elsewhere, perhaps long ago; nothing of ours is in the environment that it gives to workers.
    environment = {
        HOME_ENV: str(_loaded.home),
        _KIND_ENV: "cpu" if _loaded.off_gpu else "gpu",
        _MEMORY_ENV: str(_loaded.logical_gpu_bytes),
    }
    if _loaded.off_gpu:
        # One thread per process, and one order of additions.
        environment["OMP_NUM_THREADS"] = "1"
    named = (getattr(method, "__ray_concurrency_group__", None) for _, method in inspect.getmembers(worker))
    groups = {group: 1 for group in named if group}
    actor = ray.remote(num_cpus=0, num_gpus=1, concurrency_groups=groups, runtime_env={"env_vars": environment})
    engines.ParaWorker = actor(worker)


def checkout(home: Path | str | None) -> Path:
    """Where DistServe is.

    Raises:
        ConfigError: it is not there.
    """
    given = home or os.environ.get(HOME_ENV)
    if not given:
        raise ConfigError([f"{HOME_ENV}: not set; allowed: a checkout of DistServe"])
    root = Path(given).resolve()
    if not (root / "distserve" / "single_stage_engine.py").is_file():
        raise ConfigError(
            [f"{HOME_ENV}: got {root}; allowed: a checkout of DistServe (distserve/single_stage_engine.py is not there)"]
        )
    return root


def import_plain(home: Path, *, off_gpu: bool) -> None:
    """Import the checkout unchecked and without our patches.

    Raises:
        ConfigError: something is missing that it imports.
    """
    # Before an installed DistServe; a checkout has no module at its top that others could mean.
    sys.path.insert(0, str(home))
    try:
        _import(off_gpu=off_gpu)
    except ImportError as error:
        raise ConfigError([f"DistServe at {home}: {error}; `pip install 'kvrs[distserve]'` brings what it imports"]) from error
    except (OSError, RuntimeError) as error:
        # SwiftTransformer is not there, or was built for another torch.
        reason = " ".join(str(error).split())
        raise ConfigError([f"DistServe at {home}: {reason} (SWIFT_TRANSFORMER_LIB_PATH says where the library is)"]) from error


def _import(*, off_gpu: bool) -> None:
    if not off_gpu:
        importlib.import_module("distserve")
        return

    from distserve_patches.cpu import library

    with library.offered():
        importlib.import_module("distserve")


def _load(what: _Loaded) -> None:
    global _loaded
    import_plain(what.home, off_gpu=what.off_gpu)

    from distserve_patches import compat, fingerprints

    fingerprints.check()
    compat.apply()
    if what.off_gpu:
        from distserve_patches.cpu import runtime

        runtime.apply(what.logical_gpu_bytes)
    _loaded = what
