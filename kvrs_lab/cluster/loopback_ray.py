"""The Ray of one run, on this machine, for the workers of DistServe."""

import logging
import os
import secrets
from functools import cache
from typing import Any

from kvrs.config.file import Config
from kvrs_lab.cluster.processes import LaunchError, gpus_of
from kvrs_lab.cluster.run_directory import RunDirectory

# Ray holds none of the tensors, but needs some shared memory.
OBJECT_STORE_BYTES = 80 << 20

ENVIRONMENT = {
    # One thread per process: engines share the cores, and exact KV needs one order of additions.
    "OMP_NUM_THREADS": "1",
    # Despite its name this variable keeps every socket of Ray on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Hide Ray's messages about deaths, which kvrs reports itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "worker died or was killed|Raylet is "
    "terminated|has been marked dead",
}


@cache
def ray_token() -> str:
    """Return one token for all clusters of this process, since Ray reads the token only once."""
    return secrets.token_hex(32)


class LoopbackRay:
    """The Ray of one run, from `start` to `stop`."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        self._config, self._run = config, run
        self._node: Any = None

    def start(self) -> str:
        """Start Ray; return its address for processes that join. Raises LaunchError: Ray does not
        start.
        """
        os.environ.update(RAY_AUTH_TOKEN=ray_token(), RAY_TMPDIR=str(self._run.path), **ENVIRONMENT)
        # Ray's memory monitor would end workers for the memory of other programs.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        import ray

        try:
            ray.init(
                num_cpus=1,
                num_gpus=gpus_of(self._config),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                _temp_dir=str(self._run.path / "ray"),
            )
        except Exception as error:  # Ray raises the base class when its processes are too slow.
            said = " ".join(str(error).split()) or type(error).__name__
            raise LaunchError(
                f"Ray did not start: {said:.300}; on a busy machine give it more time, as by "
                "RAY_raylet_start_wait_time_s=120"
            ) from None
        self._node = ray._private.worker._global_node
        return str(ray.get_runtime_context().gcs_address)

    def check(self) -> None:
        """Raises LaunchError: Ray has ended."""
        # Ray's public functions call the processes that may be gone.
        for name, process in () if self._node is None else self._node.dead_processes():
            if name in ("raylet", "gcs_server"):
                raise LaunchError(
                    f"Ray's {name} ended with status {process.returncode}; DistServe cannot run "
                    f"without it"
                )

    def stop(self) -> None:
        if self._node is not None:
            import ray

            ray.shutdown()
