"""The main loop of `kvrs lab up` while its cluster runs, and rolling restarts: every process of the
cluster is restarted, one at a time, without a failed stream.
"""

import signal
import threading
import time
from collections.abc import Callable

from kvrs.config.file import Config
from kvrs.config.origin import UpCommand
from kvrs.errors import ConfigError, KvrsError
from kvrs.net.admin import AdminError
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.cluster.processes import START_TIMEOUT_S, Kind, Process, hosts_of, instances_in
from kvrs_lab.cluster.proxies import ProxyProcess

LOOK_INTERVAL_S = 0.5
_RESTART_LOOK_S = 0.1


class Upkeep:
    """Watches a cluster until `stop`. `restart` may be called from a signal handler, and takes
    effect in `run`.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        read_config: Callable[[], Config],
        read_launch: Callable[[], UpCommand | None] = lambda: None,
    ) -> None:
        self.stop = threading.Event()
        self._say = say
        self._read_config = read_config  # Reads the file again.
        self._read_launch = read_launch
        self._reported: set[str] = set()  # Proxies that are reported to be down.
        self._starts: dict[str, int] = {}  # Of all processes, when they were looked at last.
        # Requests for a rolling restart that are not answered yet.
        self._requested = 0

    def restart(self) -> None:
        self._requested += 1

    def run(self, cluster: Cluster) -> None:
        """Raises LaunchError: the cluster cannot go on."""
        self._starts = _starts(cluster)
        while not self.stop.wait(LOOK_INTERVAL_S):
            cluster.check()
            cluster.follow_fleet()
            self._report_faults(cluster)
            self._report_ends(cluster)
            if self._requested:
                self._requested = 0
                self._restart_all(cluster)
                self._starts = _starts(cluster)

    def _report_faults(self, cluster: Cluster) -> None:
        """Report, once each, proxies that cannot be restarted while others serve."""
        faults = {
            proxy.settings.id: proxy.status.fault
            for proxy in cluster.proxies
            if proxy.status.fault is not None
        }
        for name in faults.keys() - self._reported:
            self._say(f"{faults[name]}\nit is restarted from time to time; the other proxies serve")
        self._reported = set(faults)

    def _report_ends(self, cluster: Cluster) -> None:
        former, self._starts = self._starts, _starts(cluster)
        ended = {name for name, count in self._starts.items() if count > former.get(name, count)}
        for proxy in cluster.proxies:
            if (name := proxy.settings.id) in ended:
                self._say(f"{name} ended and was restarted, as process {proxy.pid}")
        for process in cluster.processes.values():
            if process.name in ended:
                self._say(f"{process.label} ended and is started again")

    def _restart_all(self, cluster: Cluster) -> None:
        try:
            cluster.renew(self._read_config(), self._read_launch())
        except (ConfigError, OSError) as error:
            self._say(f"nothing is restarted: {error}")
            return
        self._say("restarting all processes, one at a time")
        try:
            if RollingRestart(cluster, self._say, self._goes_on).run():
                self._say("all processes were restarted")
        except RestartError as error:
            self._say(f"the rollout stops: {error}")
        self._look()

    def _goes_on(self) -> bool:
        self._look()
        return not self.stop.is_set()

    def _look(self) -> None:
        if self._requested:
            self._requested = 0
            self._say("a rolling restart is under way already: the request is ignored")


def _starts(cluster: Cluster) -> dict[str, int]:
    """How often each process was started."""
    found = {proxy.settings.id: proxy.status.starts for proxy in cluster.proxies}
    return found | {name: each.starts for name, each in cluster.supervisor.status().items()}


class RestartError(KvrsError):
    """A process failed to restart; the rollout stops, and the other processes run on."""


class _StoppedError(KvrsError):
    """No further process is to be restarted."""


class RollingRestart:
    """`run` restarts proxies, then instances with the hosts of their stages, then agents. Each has
    to be up in the state of every proxy before the next one.
    """

    def __init__(
        self, cluster: Cluster, say: Callable[[str], None], goes_on: Callable[[], bool]
    ) -> None:
        """`goes_on` is polled; when it returns False, no further process is restarted."""
        self._cluster = cluster
        self._say = say
        self._goes_on = goes_on

    def run(self) -> bool:
        """Restart all; False if `goes_on` ended it.

        Raises:
            RestartError: a process failed to restart.
            LaunchError: no proxy serves any more, or DistServe's Ray has ended.
        """
        cluster = self._cluster
        try:
            # Wait for processes that are being restarted already.
            self._until(lambda: not cluster.down(), "the restart has not begun", START_TIMEOUT_S)
            for proxy in cluster.proxies:
                self._restart_proxy(proxy)
            for kinds in ((Kind.INSTANCE, Kind.SERVER), (Kind.AGENT,)):
                for process in cluster.processes.values():
                    if process.kind in kinds:
                        self._restart(process)
        except _StoppedError:
            return False
        return True

    def _restart_proxy(self, proxy: ProxyProcess) -> None:
        former = proxy.signal(signal.SIGTERM)  # It hands its streams over.

        def is_new() -> bool:
            if proxy.status.fault is not None:
                raise RestartError(proxy.status.fault)
            return proxy.pid != former and not self._cluster.down()

        drain_s = proxy.settings.drain_delay_s + proxy.settings.drain_s
        self._until_new(is_new, proxy.settings.id, drain_s, START_TIMEOUT_S)

    def _restart(self, process: Process) -> None:
        known: list[set[int]] = []

        def is_known() -> bool:
            nonlocal known
            known = self._pids(process)
            return all(known)

        self._until(is_known, process.label, START_TIMEOUT_S)
        for host in hosts_of(self._cluster.config, process):
            self._cluster.end(host)  # It goes on until the instance has ended.
        self._cluster.end(process.name)

        def is_new() -> bool:
            if fault := self._cluster.supervisor.status()[process.name].fault:
                raise RestartError(f"{process.label}: {fault}")
            found = self._pids(process)
            return all(new and not new & old for new, old in zip(found, known, strict=True))

        drain_s = self._cluster.config.cluster.drain_s
        self._until_new(is_new, process.label, drain_s, process.start_timeout_s)

    def _pids(self, process: Process) -> list[set[int]]:
        """The process ids of a process in the state of each proxy, under all of its names; empty
        where a proxy does not answer.
        """
        names = instances_in(self._cluster.config, process) or [process.name]
        found: list[set[int]] = []
        for number in range(len(self._cluster.proxies)):
            try:
                rows = rows_of(self._cluster.state(number))
                found.append({rows[name]["pid"] for name in names if name in rows} - {None})
            except AdminError:
                found.append(set())
        return found

    def _until_new(
        self, is_new: Callable[[], bool], name: str, drain_s: float, start_s: float
    ) -> None:
        self._until(is_new, name, start_s + drain_s)
        self._until(lambda: not self._cluster.down(), name, start_s)
        self._say(f"{name} is up again")

    def _until(self, holds: Callable[[], bool], name: str, within_s: float) -> None:
        """Wait for a condition. Raises _StoppedError: `goes_on` ended it."""
        give_up_s = time.monotonic() + within_s
        while not holds():
            self._check_goes_on()
            self._cluster.check()
            if time.monotonic() > give_up_s:
                raise RestartError(
                    f"{name}: {within_s:.0f} s later these are not up: {self._cluster.down()}"
                )
            time.sleep(_RESTART_LOOK_S)
        self._check_goes_on()

    def _check_goes_on(self) -> None:
        if not self._goes_on():
            raise _StoppedError
