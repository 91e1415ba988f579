"""Loads DistServe with what it lacks, and exchanges its worker class.

`load` comes first in a process: only after it can `distserve.*`, and modules that subclass it, be
imported.
"""

import inspect
import os
from dataclasses import dataclass
from pathlib import Path

from distserve_patches import checkout

# By these a worker process learns what to load: the same as the process that started it.
_KIND_ENV = "KVRS_DISTSERVE_WORKER"
_MEMORY_ENV = "KVRS_DISTSERVE_LOGICAL_GPU_BYTES"
_PACE_ENV = "KVRS_DISTSERVE_PACE"
# Some thousand tokens of a small model.
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
    """Import the checkout at `home` (none: the environment's DISTSERVE_HOME) and patch it; a second
    call does nothing.

    With `off_gpu` it runs on a CPU: kvrs' engine stands for SwiftTransformer, and shared memory for
    GPU memory, of which each worker finds `logical_gpu_bytes`. There a profile's name or path as
    `pace` makes each step of a worker last as long as that profile says.

    Raises:
        ConfigError: there is no checkout, or it is not the one that kvrs was written for.
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
    """In a worker process: load what the process that started it had loaded. Elsewhere: nothing."""
    if (kind := os.environ.pop(_KIND_ENV, None)) is not None:
        memory_bytes, pace = int(os.environ[_MEMORY_ENV]), os.environ.get(_PACE_ENV)
        _load(_Loaded(checkout.find(None), kind == "cpu", memory_bytes, pace))


def use_worker(worker: type) -> None:
    """Let engines start `worker` in every new actor: a subclass of `checkout.para_worker()` at the
    top of an importable module.

    Each concurrency group that its methods name gets a thread of its own.
    """
    import distserve.single_stage_engine as engines
    import ray

    assert _loaded is not None, "`load` comes first"
    # Ray was started elsewhere, perhaps long ago; nothing of ours is in the environment that it
    # gives to workers.
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

    # Here, because `python -m distserve_patches.fingerprints` imports this module first.
    from distserve_patches import compat, fingerprints

    fingerprints.check(what.home)
    compat.apply()
    if what.off_gpu:
        from distserve_patches.cpu import runtime

        runtime.apply(what.logical_gpu_bytes, what.pace)
    _loaded = what
