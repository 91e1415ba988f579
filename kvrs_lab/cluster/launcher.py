"""Starts a whole cluster: the proxies on this machine, and instances and agents here or on the
machines of a Ray cluster.

All files of a run are in one private directory, and the agents' segments in another one below
`backup.directory`. A guard process ends and removes the rest when this process is gone.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from kvrs.config.cluster import Backend
from kvrs.config.distserve import check_home
from kvrs.config.file import ENV_NAME, Config, config_digest, read_admin_tokens, read_secret
from kvrs.config.origin import UpCommand
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.net.admin import AdminError
from kvrs.protocol.instance import ExitReport
from kvrs_engine.engine.ranks.settings import check_layouts
from kvrs_lab.cluster.exits import tell_exit
from kvrs_lab.cluster.fault_injection import members_of, rows_of
from kvrs_lab.cluster.loopback_ray import LoopbackRay
from kvrs_lab.cluster.placing import faults_of_ray, faults_without_ray
from kvrs_lab.cluster.ports import resolve_all, several_proxies
from kvrs_lab.cluster.processes import (
    START_TIMEOUT_S,
    LaunchError,
    Process,
    Progress,
    processes_of,
)
from kvrs_lab.cluster.proxies import ProxyProcess
from kvrs_lab.cluster.remote import RemoteSupervisor
from kvrs_lab.cluster.run_directory import RunDirectory
from kvrs_lab.cluster.signals import EndingSignals
from kvrs_lab.cluster.supervised import MachineSupervisor, StartWait, wait_ready
from kvrs_lab.cluster.victims import closing_process, open_processes

STOP_TIMEOUT_S = 15.0
_LOOK_INTERVAL_S = 0.05


class Cluster:
    """A running cluster; a context manager that leaves nothing behind."""

    _admin_token: bytes | None = None  # Token of the proxies' admin ports.
    _untold: str | None = None  # Reason of a failed write, which is tried again.

    def __init__(
        self,
        config: Config,
        progress: Progress,
        proxies: int = 1,
        ray: str | None = None,
        launch: UpCommand | None = None,
    ) -> None:
        """Check the configuration. `ray` is the address of a Ray cluster whose machines have the
        nodes; `launch` is the command that proxies show, by default this process without a file.

        Raises:
            ConfigError: these proxies, or this backend, cannot be started.
        """
        if faults := [*(faults_of_ray(config) if ray else faults_without_ray(config))]:
            raise ConfigError(faults)
        self._asked = config
        self._proxy_settings = several_proxies(config.proxy, proxies)
        self._progress = progress
        self._launch = launch or UpCommand(os.getpid(), None, config_digest(config))
        self.processes: dict[InstanceId, Process] = {
            process.name: process for process in processes_of(config)
        }
        self.proxies: list[ProxyProcess] = []
        self._remote = None if ray is None else RemoteSupervisor(ray, progress, self._tell_exit)
        self._behind: set[int] = set()  # Proxies that have not read their last file.

    def __enter__(self) -> Self:
        check_home(self._asked, os.environ)
        config, *others = resolve_all(
            self._asked,
            self._proxy_settings,
            nodes_too=self._remote is None,
        )
        self._proxy_settings = [config.proxy, *(other.proxy for other in others)]
        self._signals = EndingSignals()
        self._run = RunDirectory()
        self._ray = LoopbackRay(config, self._run)  # DistServe only.
        self._environment: dict[str, str] = {}  # Extra variables of instances, agents and servers.
        self.supervisor: MachineSupervisor | RemoteSupervisor = self._remote or MachineSupervisor(
            self._run, self._environment, self._tell_exit
        )
        self._progress(f"logs are in {self.run_directory} while it runs")
        self.config = config
        self._run.guard(config)
        try:
            self._signals.interrupt()
            self._start()
            self._signals.hand_back()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the proxies, then the instances. The guard ends the rest and removes the run
        directory.
        """
        self._signals.ignore()
        try:
            for proxy in self.proxies:
                proxy.stop()
            give_up_s = time.monotonic() + STOP_TIMEOUT_S
            for proxy in self.proxies:
                proxy.wait(give_up_s - time.monotonic())
            self.supervisor.stop()
            self._ray.stop()
        finally:
            self._run.close()
            self._signals.restore()

    @property
    def run_directory(self) -> Path:
        return self._run.path

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """Addresses of the proxies for clients."""
        return [proxy.url for proxy in self.proxies]

    @property
    def admin_url(self) -> str:
        return self.admin_urls[0]

    @property
    def admin_urls(self) -> list[str]:
        return [proxy.admin.url for proxy in self.proxies]

    def state(self, proxy: int | None = None) -> Any:
        """`/kvrs/v1/state` of a proxy; without a number, of the first proxy that answers.

        Raises:
            AdminError: no answer, or an answer without a state.
        """
        if proxy is not None:
            return self.proxies[proxy].admin.state()
        for number in range(len(self.proxies) - 1):
            with contextlib.suppress(AdminError):
                return self.state(number)
        return self.state(len(self.proxies) - 1)

    def kill(self, *names: InstanceId, number: signal.Signals = signal.SIGKILL) -> list[int]:
        """Signal instances and agents that are up, all at once; return their process ids by the
        state. An instance with worker processes loses these. Ended processes are started again.

        Raises:
            LaunchError: an instance or agent is not up, so none was killed.
            FaultError: the state of a process is wrong or outdated.
        """
        rows = rows_of(self.state())
        for name in names:
            if name not in rows or rows[name]["health"] != "up":
                raise LaunchError(f"{name!r} is not up, so it cannot be killed")
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(closing_process(process))
                for name in names
                for process in open_processes(rows[name])
            ]
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, number)
        return [int(rows[name]["pid"]) for name in names]

    def wait_all_up(self, timeout_s: float | None = None) -> float:
        """Wait until every proxy sees every instance, agent and other proxy up; return the seconds.
        `timeout_s` None: the longest start of a process.
        """
        limit_s = START_TIMEOUT_S if timeout_s is None else timeout_s
        started_s = time.monotonic()
        while down := self.down():
            if time.monotonic() - started_s > limit_s:
                raise LaunchError(f"after {limit_s:.0f} s these are not up: {down}")
            self.check()
            time.sleep(0.1)
        return time.monotonic() - started_s

    def down(self) -> dict[str, str]:
        """The health of every process that is not up in some proxy's state. Instances and agents
        that the proxy has removed are left out.
        """
        down: dict[str, str] = {}
        for number, proxy in enumerate(self.proxies):
            try:
                state = self.state(number)
            except AdminError:
                down[proxy.settings.id] = "down"
                continue
            rows = rows_of(state)
            own = members_of(self.config)
            health = {name: rows[name]["health"] for name in own if name in rows}
            health |= state["proxies"][0]["peers"]
            down |= {name: each for name, each in health.items() if each != "up"}
        return down

    def drain(self, cut: threading.Event) -> None:
        """End the proxies as their drain settings say, until all have ended or `cut` is set."""
        for proxy in self.proxies:
            proxy.drain()
        while not (all(proxy.is_over for proxy in self.proxies) or cut.wait(_LOOK_INTERVAL_S)):
            continue

    def _start(self) -> None:
        security = self.config.security
        if self._remote is None and security.secret_file is None and ENV_NAME not in os.environ:
            os.environ[ENV_NAME] = secrets.token_hex(32)  # Secret of this run only.
        self.secret = read_secret(security, os.environ)
        tokens = read_admin_tokens(security, os.environ)
        self._admin_token = tokens[0] if tokens else None
        if self._remote is None:
            self.config = self._run.own(self.config, self._progress)
            check_layouts(self.config)
        else:
            self.config = self._remote.join(self.config)
            self._signals.interrupt()
        self._write_files()
        if self.config.cluster.backend is Backend.DISTSERVE:
            self._progress("starting Ray on loopback")
            self._environment["RAY_ADDRESS"] = self._ray.start()
            self._signals.interrupt()
        kinds = Counter(process.kind for process in self.processes.values())
        counts = " and ".join(f"{count} {kind}s" for kind, count in kinds.items())
        self._progress(f"starting {counts}")
        self.supervisor.start(self.processes.values(), self.config)
        supervisor = self.supervisor
        wait_ready(self.processes, supervisor.status, supervisor.log_tail, self._progress)
        self._start_proxies()
        self.wait_all_up()

    def follow_fleet(self) -> None:
        """Place nodes again that were lost with their machines, and tell all processes the new
        addresses for pages and checkpoints.

        Raises:
            LaunchError: Ray does not answer any more.
        """
        is_news = self._untold is not None
        if self._remote is not None and (config := self._remote.look(self.config)) is not None:
            self.config, is_news = config, True
            self._behind = {*range(len(self.proxies))}
        if is_news:
            try:
                self._write_files()
                self._untold = None
            except OSError as error:  # The disk is full.
                if self._untold != str(error):
                    self._progress(f"instances are not told of others: {error}")
                self._untold = str(error)
        for number in [*self._behind]:
            with contextlib.suppress(AdminError):  # The proxy may not have seen the loss yet.
                self.proxies[number].admin.reload()
                self._behind.discard(number)

    def _write_files(self) -> None:
        self.supervisor.learn(self.config)
        for settings in self._proxy_settings:
            self._run.write_config(self.config.model_copy(update={"proxy": settings}), settings.id)

    def _start_proxies(self) -> None:
        self._progress(
            "starting the proxy"
            if len(self._proxy_settings) == 1
            else f"starting {len(self._proxy_settings)} proxies"
        )
        for settings in self._proxy_settings:
            self.proxies.append(
                ProxyProcess(
                    settings,
                    partial(self._spawn_proxy, settings.id),
                    partial(self._run.log_tail, settings.id),
                    self._admin_token,
                )
            )
            self.proxies[-1].start()
        wait = StartWait(START_TIMEOUT_S, self._progress)
        for proxy in self.proxies:
            while not proxy.status.has_served:
                self.check()
                name = proxy.settings.id
                if wait.is_over([name]):
                    raise LaunchError(
                        f"{name} did not answer within {wait.limit}\n{self._run.log_tail(name)}"
                    )
                time.sleep(0.05)

    def _tell_exit(self, instance: InstanceId, report: ExitReport) -> None:
        admins = [admin for proxy in self.proxies for admin in proxy.admins]
        tell_exit(admins, instance, report, self._progress)

    def _spawn_proxy(self, name: str) -> subprocess.Popen[bytes]:
        """Start a proxy with its own file, which contains the environment's settings."""
        arguments = [
            "-m",
            "kvrs",
            "proxy",
            "--no-env",
            "--config",
            str(self._run.config_path(name)),
            "--launch",
            msgspec.json.encode(self._launch).decode(),
        ]
        return self._run.spawn(name, *arguments)

    def check(self) -> None:
        """Raises LaunchError: DistServe's Ray has ended, or no proxy can be restarted, or a proxy
        never served.
        """
        states = [proxy.status for proxy in self.proxies]
        none_serves = all(state.fault is not None for state in states)
        for state in states:
            if state.fault is not None and (none_serves or not state.has_served):
                raise LaunchError(state.fault)
        self._ray.check()

    def keep_logs(self, directory: Path) -> None:
        self._run.keep_logs(directory)
