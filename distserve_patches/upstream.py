"""Loads DistServe with its missing parts, and replaces its worker class.

`load` comes first in a process. Only then can `distserve.*`, and modules that subclass it, be
imported.
"""

import inspect
import os
from dataclasses import dataclass
from pathlib import Path

from distserve_patches import checkout

# Environment of a worker process, for the same load as in its parent.
_KIND_ENV = "KVRS_DISTSERVE_WORKER"
_MEMORY_ENV = "KVRS_DISTSERVE_LOGICAL_GPU_BYTES"
_PACE_ENV = "KVRS_DISTSERVE_PACE"
# A few thousand tokens of a small model.
LOGICAL_GPU_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Loaded:
    home: Path
    off_gpu: bool
    logical_gpu_bytes: int
    pace: str | None


_loaded: _Loaded | None = None


def load(
    home: Path | str | None = None,
    *,
    off_gpu: bool = False,
    logical_gpu_bytes: int = LOGICAL_GPU_BYTES,
    pace: str | None = None,
) -> None:
    """Import the checkout at `home` (None: DISTSERVE_HOME of the environment) and patch it, at most
    once.

    `off_gpu` runs on a CPU: the engine of kvrs stands for SwiftTransformer, and shared memory for
    GPU memory, with `logical_gpu_bytes` for each worker. `pace`, a profile's name or path, sets the
    duration of each step there.

    Raises:
        ConfigError: no checkout, or another commit than kvrs was written for.
    """
    assert off_gpu or pace is None, "a GPU has a pace of its own"
    if pace is not None and Path(pace).is_file():
        pace = str(Path(pace).resolve())  # Workers may run in another directory.
    asked = _Loaded(checkout.find(home), off_gpu, logical_gpu_bytes, pace)
    if _loaded is not None:
        assert _loaded == asked, f"DistServe is loaded already: {_loaded}"
        return
    _load(asked)

    from distserve_patches.worker import PageWorker

    use_worker(PageWorker)


def load_in_worker() -> None:
    """Load in a worker process what its parent has loaded; do nothing elsewhere."""
    if (kind := os.environ.pop(_KIND_ENV, None)) is not None:
        memory_bytes, pace = int(os.environ[_MEMORY_ENV]), os.environ.get(_PACE_ENV)
        _load(_Loaded(checkout.find(None), kind == "cpu", memory_bytes, pace))


def use_worker(worker: type) -> None:
    """Let engines start `worker` in every new actor: a subclass of `checkout.para_worker()` at the
    top of an importable module.

    Each concurrency group of its methods gets its own thread.
    """
    import distserve.single_stage_engine as engines
    import ray

    assert _loaded is not None, "`load` comes first"
    # Ray was started elsewhere, so its workers' environment lacks the variables of kvrs.
    environment = {
        checkout.HOME_ENV: str(_loaded.home),
        _KIND_ENV: "cpu" if _loaded.off_gpu else "gpu",
        _MEMORY_ENV: str(_loaded.logical_gpu_bytes),
    }
    if _loaded.pace is not None:
        environment[_PACE_ENV] = _loaded.pace
    if _loaded.off_gpu:
        # One thread per process, and one order of additions.
        environment["OMP_NUM_THREADS"] = "1"
    named = (
        getattr(method, "__ray_concurrency_group__", None)
        for _, method in inspect.getmembers(worker)
    )
    groups = {group: 1 for group in named if group}
    actor = ray.remote(
        num_cpus=0, num_gpus=1, concurrency_groups=groups, runtime_env={"env_vars": environment}
    )
    engines.ParaWorker = actor(worker)


def _load(what: _Loaded) -> None:
    global _loaded
    checkout.import_plain(what.home, off_gpu=what.off_gpu)

    # A late import, because `python -m distserve_patches.fingerprints` imports this module first.
    from distserve_patches import compat, fingerprints

    fingerprints.check(what.home)
    compat.apply()
    if what.off_gpu:
        from distserve_patches.cpu import runtime

        runtime.apply(what.logical_gpu_bytes, what.pace)
    _loaded = what
