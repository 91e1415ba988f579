"""The Ray of one run: it starts instances, servers and agents as actors, and restarts them."""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvrs.cluster.processes import Kind, Process, Progress, gpus_of
from kvrs.cluster.run_directory import RunDirectory
from kvrs.cluster.starts import start_fault, starts
from kvrs.config.file import Config
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId

# How often a process is started, in all, that ends during its start without a reason of its own.
STARTS = 3
LOOK_INTERVAL_S = 0.2
# Ray holds no tensors of ours; it only needs some shared memory.
OBJECT_STORE_BYTES = 80 << 20

ENVIRONMENT = {
    # One thread per process: several engines share the cores, and KV is exact only with one order
    # of additions.
    "OMP_NUM_THREADS": "1",
    # Despite its name this variable keeps every socket of Ray on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # kvrs reports deaths itself; Ray's paragraph about each is not shown.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "worker died or was killed|Raylet is "
    "terminated|has been marked dead",
}


class LaunchError(KvrsError):
    """The cluster did not come up; the message names the process and ends with its last log
    lines.
    """


@cache
def ray_token() -> str:
    """One token for all clusters of this process: Ray reads it once and remembers it."""
    return secrets.token_hex(32)


class RayActors:
    """One actor per process; `start`, then `create`, then `wait_ready`."""

    def __init__(
        self, processes: Mapping[InstanceId, Process], run: RunDirectory, progress: Progress
    ) -> None:
        self._processes = processes
        self._run = run
        self._progress = progress
        self._actors: dict[InstanceId, Any] = {}
        self._runs = False

    def start(self, config: Config) -> None:
        """Start Ray on loopback, with one logical node per node of the cluster."""
        import ray

        nodes = Counter(f"kvrs-{process.node}" for process in self._processes.values())
        ray.init(
            num_cpus=1,
            num_gpus=gpus_of(config),
            resources={node: float(count) for node, count in nodes.items()},
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            _temp_dir=str(self._run.path / "ray"),
        )
        self._runs = True

    def create(self, config_path: Path) -> None:
        import ray

        from kvrs.cluster.actor import AgentActor, InstanceActor, ServerActor

        actors = {Kind.AGENT: AgentActor, Kind.INSTANCE: InstanceActor, Kind.SERVER: ServerActor}
        for name, process in self._processes.items():
            actor = ray.remote(actors[process.kind])
            # Restarted without limit.
            options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 2}
            self._actors[name] = actor.options(
                resources={f"kvrs-{process.node}": 1.0}, **options
            ).remote(str(config_path), name, str(self._run.path))

    def wait_ready(self) -> None:
        """Raises LaunchError: one does not start."""
        import ray

        waiting = {actor.wait_ready.remote(): name for name, actor in self._actors.items()}
        timeout_s = max(process.start_timeout_s for process in self._processes.values())
        deadline_s = time.monotonic() + timeout_s
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=LOOK_INTERVAL_S)
            for reference in done:
                name = waiting.pop(reference)
                try:
                    ray.get(reference)
                    self._progress(f"{self._processes[name].label} is up")
                except ray.exceptions.RayActorError:
                    # The actor ended, or is about to be restarted. Ray would repeat the call by
                    # itself, with a paragraph in the log each time.
                    time.sleep(LOOK_INTERVAL_S)
                    waiting[self._actors[name].wait_ready.remote()] = name
            self.check()
            for name in waiting.values():
                self._check_start(name)
                if time.monotonic() > deadline_s:
                    raise LaunchError(
                        f"{self._processes[name].label} did not start within {timeout_s:.0f} s\n"
                        f"{self._run.log_tail(name)}"
                    )

    def _check_start(self, name: InstanceId) -> None:
        """Raise LaunchError when waiting any longer is useless."""
        label = self._processes[name].label
        if fault := start_fault(self._run.path, name):
            raise LaunchError("\n".join(f"{label}: {line}" for line in fault.splitlines()))
        if starts(self._run.path, name) > STARTS:
            raise LaunchError(
                f"{label} ended {STARTS} times while it started\n{self._run.log_tail(name)}"
            )

    def end(self, name: InstanceId) -> None:
        """Have a process drain and end. It is started again."""
        self._actors[name].end.remote()

    def check(self) -> None:
        """Raises LaunchError: Ray has ended."""
        # Without its raylet an instance ends at once, without the GCS within a minute, and is not
        # restarted. Ray's public functions ask the very processes that may be gone.
        if self._runs:
            import ray

            for name, process in ray._private.worker._global_node.dead_processes():
                if name in ("raylet", "gcs_server"):
                    raise LaunchError(
                        f"Ray's {name} ended with status {process.returncode}; no "
                        f"instance can serve without it"
                    )

    def stop(self) -> None:
        if self._runs:
            import ray

            ray.shutdown()
