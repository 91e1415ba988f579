"""Keeps the processes of one machine: instances, servers of DistServe and agents."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO

from kvrs.cluster.exits import LOOK_INTERVAL_S as KILLS_INTERVAL_S
from kvrs.cluster.exits import Exit, KernelKills, classify
from kvrs.cluster.keeper import Keeper, Make, Spawner, forked, nursery_of
from kvrs.cluster.processes import Kind, Process, Progress, instances_in
from kvrs.cluster.run_directory import RunDirectory
from kvrs.config.file import Config
from kvrs.engine.forking import Nursery
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId

# How often a process is started, in all, that ends during its start without a reason of its own.
STARTS = 3
LOOK_INTERVAL_S = 0.05
START_TIMEOUT = "cluster.start_timeout_s"  # The setting, as errors name it.
_SAY_INTERVAL_S = 10.0
_JOIN_S = 5.0


class LaunchError(KvrsError):
    """The cluster did not come up; the message names the process and ends with its last log
    lines.
    """


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """State of one process."""

    has_served: bool
    starts: int
    fault: str | None  # Why it cannot serve, as it is configured.


class Keepers:
    """`start`, then a keeper for each process until `stop`."""

    def __init__(
        self,
        run: RunDirectory,
        environment: Mapping[str, str],
        ended: Callable[[Exit], object] | None = None,
    ) -> None:
        """`ended` is called from other threads."""
        self._run = run
        self._environment = environment
        self._ended, self._kills, self._stopping = ended, KernelKills(), threading.Event()
        self._keepers: dict[InstanceId, Keeper] = {}
        self._spawners: list[Spawner] = []
        self._nurseries: list[tuple[Nursery, IO[str]]] = []  # And their log files.

    def start(self, processes: Iterable[Process], config: Config, starts: int = 0) -> None:
        """With what `learn` was given. `starts`: how many there have been of each."""
        threading.Thread(target=self._look_at_kills, name="kills", daemon=True).start()
        for process in processes:
            with_spare, status = False, None
            if _is_forked(config, process):
                make, with_spare = self._forking(process), config.state_plane.enabled
            else:
                spawner = self._spawning(process)
                make, status = spawner.make, spawner.status
            keeper = Keeper(
                process.name,
                make,
                with_spare=with_spare,
                starts=starts,
                ended=partial(self._tell_end, instances_in(config, process)),
                status=status,
            )
            self._keepers[process.name] = keeper
            keeper.start()

    def _look_at_kills(self) -> None:
        while not self._stopping.wait(KILLS_INTERVAL_S):
            self._kills.look()

    def _tell_end(self, instances: Iterable[InstanceId], start: int, status: int | None) -> None:
        if status is None or self._ended is None:
            return
        if (found := classify(status, kernel_killed=self._kills.lately())) is not None:
            for instance in instances:
                self._ended(Exit(instance, start, *found))

    def _forking(self, process: Process) -> Make:
        log = self._run.open_log(process.name)
        nursery = nursery_of(self._run.config_path(), process.name, self._environment, log)
        self._nurseries.append((nursery, log))
        return partial(forked, nursery)

    def _spawning(self, process: Process) -> Spawner:
        def spawn(line: int) -> subprocess.Popen[bytes]:
            config = str(self._run.config_path())
            arguments = ("--config", config, "--name", process.name, "--line", str(line))
            with self._run.open_log(process.name) as log:
                return subprocess.Popen(
                    [sys.executable, "-m", "kvrs.cluster.hosted", *arguments],
                    env=os.environ | self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[line],
                    process_group=0,
                )

        spawner = Spawner(spawn)
        self._spawners.append(spawner)
        return spawner

    def status(self) -> dict[InstanceId, ProcessStatus]:
        return {
            name: ProcessStatus(keeper.has_served, keeper.starts, keeper.fault)
            for name, keeper in self._keepers.items()
        }

    def fault(self, name: InstanceId) -> str | None:
        """Why a process cannot serve, as it is configured now."""
        return self._keepers[name].fault

    def end(self, name: InstanceId) -> None:
        """Have a process drain and end. It is started again."""
        self._keepers[name].stop()

    def learn(self, config: Config) -> None:
        """Have all processes read this configuration."""
        self._run.write_config(config)
        for keeper in self._keepers.values():
            keeper.learn()

    def stop(self) -> None:
        """End all processes, at once."""
        self._stopping.set()
        for keeper in self._keepers.values():
            keeper.close()
        for keeper in self._keepers.values():
            keeper.join(_JOIN_S)
        for spawner in self._spawners:
            spawner.close()
        for nursery, log in self._nurseries:
            nursery.close()
            log.close()


def _is_forked(config: Config, process: Process) -> bool:
    """The process is a whole instance. The memory of ranks ends with their instance."""
    ranks = {instance.id: instance.ranks for _, instance in config.cluster.instances()}
    return process.kind is Kind.INSTANCE and ranks[process.name] == 1


class StartWait:
    """The time that processes may take to start; now and then it says which ones still do."""

    def __init__(self, timeout_s: float, progress: Progress) -> None:
        self._timeout_s, self._progress = timeout_s, progress
        self._began_s = self._said_s = time.monotonic()
        self.limit = f"{timeout_s:.0f} s ({START_TIMEOUT})"

    def is_over(self, waiting: Iterable[str]) -> bool:
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_INTERVAL_S:
            self._said_s = now_s
            passed = f"{now_s - self._began_s:.0f} s of {self._timeout_s:.0f} s"
            self._progress(f"waiting for {', '.join(waiting)}: {passed}")
        return now_s - self._began_s > self._timeout_s


def wait_ready(
    processes: Mapping[InstanceId, Process],
    status: Callable[[], Mapping[InstanceId, ProcessStatus]],
    log_tail: Callable[[InstanceId], str],
    progress: Progress,
    starts: int = 0,
) -> None:
    """Wait until all have served. `starts`: how many there had been of each.

    Raises:
        LaunchError: one does not start.
    """
    waiting = dict(processes)
    wait = StartWait(max(process.start_timeout_s for process in processes.values()), progress)
    while waiting:
        for name, one in status().items():
            if (process := waiting.get(name)) is None:
                continue
            if one.has_served:
                del waiting[name]
                progress(f"{process.label} is up")
            elif one.fault is not None:
                lines = one.fault.splitlines()
                raise LaunchError("\n".join(f"{process.label}: {line}" for line in lines))
            elif one.starts - starts > STARTS:
                raise LaunchError(
                    f"{process.label} ended {STARTS} times while it started\n{log_tail(name)}"
                )
        labels = [process.label for process in waiting.values()]
        if waiting and wait.is_over(labels):
            tail = log_tail(next(iter(waiting)))
            raise LaunchError(f"{', '.join(labels)} did not start within {wait.limit}\n{tail}")
        time.sleep(LOOK_INTERVAL_S)
