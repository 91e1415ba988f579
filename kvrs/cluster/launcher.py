"""Brings a whole cluster up on this machine: Ray, instances and agents as Ray actors, and the proxies in front of them.

Everything of one run lives in one private directory, and the agents' segments in another one below `backup.directory`;
a guard process ends and removes what is left when this process is gone.
"""

import contextlib
import http.client
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

from kvrs.cluster.config import Backend
from kvrs.cluster.faults import closing_process, members_of, open_processes, rows_of
from kvrs.cluster.guard import start_guard
from kvrs.cluster.ports import doors, resolve_all
from kvrs.cluster.processes import Kind, Process, check_home, gpus_of, processes_of
from kvrs.cluster.proxies import ProxyProcess
from kvrs.cluster.segments import make_segments, own_segments
from kvrs.cluster.signals import EndingSignals
from kvrs.cluster.starts import start_fault, starts
from kvrs.config import ENV_NAME, Config, dump_config, read_secret
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import InstanceId, NodeId
from kvrs.proxy.config import ProxySettings

Progress = Callable[[str], None]

START_TIMEOUT_S = 120.0
# DistServe converts the weights of a model before it loads them for the first time.
DISTSERVE_START_TIMEOUT_S = 1800.0
# An instance that ends while it starts, for no reason that it could name, is started so often in all.
STARTS = 3
LOOK_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 15.0
# Ray keeps no tensors of ours; it only wants some shared memory to exist.
OBJECT_STORE_BYTES = 80 << 20

ENVIRONMENT = {
    # One thread per process: several engines share the cores, and one order of additions is what makes KV exact.
    "OMP_NUM_THREADS": "1",
    # Ray calls it so, but what it does is to keep every one of its sockets on loopback.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Deaths are our business, and are reported as such; Ray's paragraph about each is not shown.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "worker died or was killed|Raylet is terminated|has been marked dead",
}


# What a rolling restart takes over from a file that was changed: of these sections everything, but who and where a proxy is.
RENEWED = ("proxy", "policy", "slo", "transfer")
FIXED_OF_PROXY = ("id", "host", "port", "admin_port", "peer_port", "gossip_port", "peers", "event_log")

# Ray puts Unix sockets 67 characters below its directory, and their paths end at 107.
LONGEST_RUN_DIRECTORY = 40


class LaunchError(KvrsError):
    """The cluster did not come up; the message names the process and ends with its last log lines."""


class Cluster:
    """A running cluster; a context manager that leaves nothing behind."""

    def __init__(self, config: Config, progress: Progress, proxies: int = 1) -> None:
        """Raises ConfigError: these proxies, or this backend, cannot be had."""
        self._asked = config
        self._doors = doors(config.proxy, proxies)
        self._progress = progress
        self.processes: dict[InstanceId, Process] = {process.name: process for process in processes_of(config)}
        self.proxies: list[ProxyProcess] = []
        self._actors: dict[InstanceId, Any] = {}
        self._ray_runs = False

    def __enter__(self) -> Self:
        check_home(self._asked, os.environ)
        config, *others = resolve_all(self._asked, self._doors)
        self._doors = [config.proxy, *(other.proxy for other in others)]
        self._signals = EndingSignals()
        self.run_directory = _new_run_directory()
        self._progress(f"logs are in {self.run_directory} while it runs")
        self.config, segments = own_segments(config, self.run_directory)
        self._guard = start_guard(self.run_directory, *segments)
        try:
            self._signals.interrupt()
            make_segments(segments)
            self._start()
            self._signals.hand_back()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the proxies, then Ray with the instances; the guard makes sure and removes the run directory."""
        self._signals.ignore()
        try:
            for proxy in self.proxies:
                proxy.tell_to_end()
            give_up_s = time.monotonic() + STOP_TIMEOUT_S
            for proxy in self.proxies:
                proxy.wait(give_up_s - time.monotonic())
            if self._ray_runs:
                import ray

                ray.shutdown()
        finally:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            self._signals.restore()

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """Of the proxies, for clients."""
        return [proxy.url for proxy in self.proxies]

    @property
    def admin_url(self) -> str:
        return self.admin_urls[0]

    @property
    def admin_urls(self) -> list[str]:
        return [proxy.admin_url for proxy in self.proxies]

    def state(self, proxy: int | None = None) -> Any:
        """`/kvrs/v1/state` of a proxy; of whichever answers, if none is named.

        Raises:
            OSError: it does not answer.
        """
        if proxy is not None:
            return _state_at(self.admin_urls[proxy])
        for number in range(len(self.proxies) - 1):
            with contextlib.suppress(OSError):
                return self.state(number)
        return self.state(len(self.proxies) - 1)

    def kill_proxy(self, number: int) -> int:
        """SIGKILL; the process id. It is brought back."""
        return self.proxies[number].signal(signal.SIGKILL)

    def stop_proxy(self, number: int) -> int:
        """SIGTERM, so that it hands its streams over; the process id. It is brought back."""
        return self.proxies[number].signal(signal.SIGTERM)

    def kill(self, *names: InstanceId) -> list[int]:
        """SIGKILL the processes of instances and agents that are up, all at once; what the state says are their process ids.
        Ray brings them back. An instance that works in processes of its own loses those.

        Raises:
            LaunchError: one is not up; nobody was killed.
            FaultError: what the proxy says of one is not, or no longer, so.
        """
        return self._kill(names, servers_too=False)

    def _kill(self, names: Sequence[InstanceId], *, servers_too: bool) -> list[int]:
        rows = rows_of(self.state())
        for name in names:
            if name not in rows or rows[name]["health"] != "up":
                raise LaunchError(f"{name!r} is not up, so it cannot be killed")
        with contextlib.ExitStack() as stack:
            processes = [process for name in names for process in open_processes(rows[name], server_too=servers_too)]
            for process in processes:
                stack.enter_context(closing_process(process))
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        return [int(rows[name]["pid"]) for name in names]

    def kill_node(self, node: NodeId) -> list[int]:
        """SIGKILL all that runs on a node, its agent too; as `kill`."""
        return self._kill([name for name, member in members_of(self.config).items() if member.node == node], servers_too=True)

    def end(self, name: InstanceId) -> None:
        """Tell an instance, DistServe server or agent to end in good order. Ray brings it back."""
        self._actors[name].end.remote()

    def wait_all_up(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until every proxy sees every instance, agent and other proxy up; the seconds it took."""
        started_s = time.monotonic()
        while down := self.down():
            if time.monotonic() - started_s > timeout_s:
                raise LaunchError(f"after {timeout_s:.0f} s these are not up: {down}")
            self.check()
            time.sleep(0.1)
        return time.monotonic() - started_s

    def down(self) -> dict[str, str]:
        """Who is not up, as some proxy sees it."""
        down: dict[str, str] = {}
        for number, proxy in enumerate(self.proxies):
            try:
                state = self.state(number)
            except OSError:
                down[proxy.settings.id] = "down"
                continue
            rows = rows_of(state)
            health = {name: rows[name]["health"] if name in rows else "unknown" for name in members_of(self.config)}
            health |= state["proxies"][0]["peers"]
            down |= {name: each for name, each in health.items() if each != "up"}
        return down

    def _start(self) -> None:
        os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=ray_token(), RAY_TMPDIR=str(self.run_directory))
        self.secret = self._shared_secret()
        self._write_config()
        self._progress("starting Ray on loopback")
        self._start_ray()
        agents = sum(process.kind is Kind.AGENT for process in self.processes.values())
        engines = "DistServe servers" if self.config.cluster.backend is Backend.DISTSERVE else "instances"
        self._progress(f"starting {len(self._actors) - agents} {engines}" + (f" and {agents} agents" if agents else ""))
        self._wait_ready()
        self._progress("starting the proxy" if len(self._doors) == 1 else f"starting {len(self._doors)} proxies")
        self._start_proxies()
        self.wait_all_up()

    def _shared_secret(self) -> bytes:
        """The configured one, for clusters that others talk to as well; else a new one for this run."""
        if self.config.security.secret_file is None and ENV_NAME not in os.environ:
            os.environ[ENV_NAME] = secrets.token_hex(32)
        return read_secret(self.config.security, os.environ)

    def _write_config(self) -> None:
        """One resolved file for all instances and agents of the run, and one for each proxy."""
        cluster = self.config.cluster
        if cluster.model is None:
            self._progress("generating a tiny random model")
            model = self.run_directory / "tiny-llama"
            # In a process of its own, so that this one never loads torch.
            if self._spawn("tiny", "-m", "kvrs.engine.tiny", str(model), str(cluster.engine.seed)).wait():
                raise LaunchError(f"the tiny random model could not be generated\n{self._log_tail('tiny')}")
            cluster = cluster.model_copy(update={"model": str(model)})
        self.config = self.config.model_copy(update={"cluster": cluster})
        self.config_path = self.run_directory / "config.yaml"
        self._write_files()

    def renew(self, config: Config) -> None:
        """Have whoever is started from now on go by another configuration of this cluster.

        Raises:
            ConfigError: it differs in more than can be changed without a new cluster; nothing has changed.
        """
        asked = self._asked
        fixed = [(f"proxy.{key}", getattr(asked.proxy, key), getattr(config.proxy, key)) for key in FIXED_OF_PROXY]
        fixed += [(key, getattr(asked, key), getattr(config, key)) for key in Config.model_fields if key not in RENEWED]
        if faults := [f"{key}: changed; allowed: what it was, or another `kvrs up`" for key, old, new in fixed if old != new]:
            raise ConfigError(faults)
        kept = [{key: getattr(door, key) for key in FIXED_OF_PROXY} for door in self._doors]
        self._asked, self._doors = config, [config.proxy.model_copy(update=each) for each in kept]
        self.config = self.config.model_copy(
            update={"proxy": self._doors[0]} | {key: getattr(config, key) for key in RENEWED if key != "proxy"}
        )
        for proxy, door in zip(self.proxies, self._doors, strict=True):
            proxy.settings = door
        self._write_files()

    def _write_files(self) -> None:
        self.config_path.write_text(dump_config(self.config))
        for door in self._doors:
            self._config_path_of(door).write_text(dump_config(self.config.model_copy(update={"proxy": door})))

    def _config_path_of(self, proxy: ProxySettings) -> Path:
        return self.run_directory / f"{proxy.id}.yaml"

    def _start_ray(self) -> None:
        import ray

        from kvrs.cluster.actor import AgentActor, InstanceActor, ServerActor

        actors = {Kind.AGENT: AgentActor, Kind.INSTANCE: InstanceActor, Kind.SERVER: ServerActor}
        nodes = Counter(f"kvrs-{process.node}" for process in self.processes.values())
        ray.init(
            num_cpus=1,
            num_gpus=gpus_of(self.config),
            resources={node: float(count) for node, count in nodes.items()},
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            _temp_dir=str(self.run_directory / "ray"),
        )
        self._ray_runs = True
        self._signals.interrupt()
        for name, process in self.processes.items():
            actor = ray.remote(actors[process.kind])
            # Who was killed is brought back however often.
            options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 2}
            self._actors[name] = actor.options(resources={f"kvrs-{process.node}": 1.0}, **options).remote(
                str(self.config_path), name, str(self.run_directory)
            )

    def _wait_ready(self) -> None:
        import ray

        waiting = {actor.wait_ready.remote(): name for name, actor in self._actors.items()}
        is_distserve = self.config.cluster.backend is Backend.DISTSERVE
        timeout_s = DISTSERVE_START_TIMEOUT_S if is_distserve else START_TIMEOUT_S
        deadline_s = time.monotonic() + timeout_s
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=LOOK_INTERVAL_S)
            for reference in done:
                name = waiting.pop(reference)
                try:
                    ray.get(reference)
                    self._progress(f"{self._named(name)} is up")
                except ray.exceptions.RayActorError:
                    # It ended, or is about to be started again; Ray would ask it again by itself, with a paragraph each time.
                    time.sleep(LOOK_INTERVAL_S)
                    waiting[self._actors[name].wait_ready.remote()] = name
            self._check_ray()
            for name in waiting.values():
                self._check_start(name)
                if time.monotonic() > deadline_s:
                    raise LaunchError(f"{self._named(name)} did not start within {timeout_s:.0f} s\n{self._log_tail(name)}")

    def _check_start(self, name: InstanceId) -> None:
        """Raise LaunchError when it makes no sense to wait for it any longer."""
        if fault := start_fault(self.run_directory, name):
            raise LaunchError("\n".join(f"{self._named(name)}: {line}" for line in fault.splitlines()))
        if starts(self.run_directory, name) > STARTS:
            raise LaunchError(f"{self._named(name)} ended {STARTS} times while it started\n{self._log_tail(name)}")

    def _named(self, name: InstanceId) -> str:
        return self.processes[name].label

    def _spawn(self, log_name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A Python process of this run: its log file tells the guard so, and Ctrl-C at a terminal is left to the launcher."""
        with (self.run_directory / f"{log_name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log, process_group=0)

    def _start_proxies(self) -> None:
        for door in self._doors:
            command = ("-m", "kvrs", "proxy", "--config", str(self._config_path_of(door)))
            spawn, log_tail = partial(self._spawn, door.id, *command), partial(self._log_tail, door.id)
            self.proxies.append(ProxyProcess(door, spawn, log_tail))
            self.proxies[-1].start()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for proxy in self.proxies:
            while not proxy.served():
                self.check()
                if time.monotonic() > deadline_s:
                    name = proxy.settings.id
                    raise LaunchError(f"{name} did not answer within {START_TIMEOUT_S:.0f} s\n{self._log_tail(name)}")
                time.sleep(0.05)

    def check(self) -> None:
        """Raises LaunchError, or ProxyError: Ray has ended, or no proxy can be brought back, or one has never served."""
        nobody = all(proxy.fault is not None for proxy in self.proxies)
        for proxy in self.proxies:
            if nobody or not proxy.served():
                proxy.check()
        self._check_ray()

    def _check_ray(self) -> None:
        # Without its raylet an instance ends at once, without the GCS within a minute, and nobody would bring it back.
        # Ray's public functions ask the very processes that may be gone.
        if self._ray_runs:
            import ray

            for name, process in ray._private.worker._global_node.dead_processes():
                if name in ("raylet", "gcs_server"):
                    raise LaunchError(f"Ray's {name} ended with status {process.returncode}; no instance can serve without it")

    def _log_tail(self, name: str) -> str:
        path = self.run_directory / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:]) if path.exists() else "(no log)"

    def keep_logs(self, directory: Path) -> None:
        """Copy the run's own log files somewhere that outlives it."""
        directory.mkdir(parents=True, exist_ok=True)
        for path in self.run_directory.glob("*.log"):
            shutil.copy(path, directory)


@cache
def ray_token() -> str:
    """One for all clusters of this process: Ray reads it once and remembers it."""
    return secrets.token_hex(32)


def _state_at(admin_url: str) -> Any:
    """Raises OSError: it does not answer, or not to the end."""
    try:
        with urllib.request.urlopen(f"{admin_url}/kvrs/v1/state", timeout=10) as answer:  # noqa: S310 - our own URL
            return json.load(answer)
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"no state at {admin_url}: {error!r}") from None


def _new_run_directory() -> Path:
    made = Path(tempfile.mkdtemp(prefix="kvrs-"))
    if len(str(made)) <= LONGEST_RUN_DIRECTORY:
        return made
    made.rmdir()
    return Path(tempfile.mkdtemp(prefix="kvrs-", dir="/tmp"))
