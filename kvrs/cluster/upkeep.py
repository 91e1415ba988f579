"""The main loop of `kvrs up` while its cluster runs, and rolling restarts: every process of the
cluster is restarted, one at a time, without a failed stream.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from kvrs.cluster.fault_injection import rows_of
from kvrs.cluster.launcher import Cluster
from kvrs.cluster.processes import Kind, Process, instances_in
from kvrs.config.file import Config
from kvrs.config.origin import UpCommand
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import InstanceId
from kvrs.load.admin import AdminError

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
        self._pids: dict[str, int | None] = {}
        self._starts: dict[InstanceId, int] = {}  # Of instances, servers and agents.
        # Requests for a rolling restart that are not answered yet.
        self._requested = 0

    def restart(self) -> None:
        self._requested += 1

    def run(self, cluster: Cluster) -> None:
        """Raises LaunchError, or ProxyError: the cluster cannot go on."""
        self._requested = 0  # A request during the start is fulfilled by it.
        self._note(cluster)
        while not self.stop.wait(LOOK_INTERVAL_S):
            cluster.check()
            cluster.follow_fleet()
            self._report_faults(cluster)
            self._report_ends(cluster)
            if self._requested:
                self._requested = 0
                self._restart_all(cluster)
                self._note(cluster)

    def _note(self, cluster: Cluster) -> None:
        """Processes that ended until now are not reported."""
        self._pids, self._starts = _pids(cluster), _starts(cluster)

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
        pids, starts = self._pids, self._starts
        self._note(cluster)
        for name, pid in self._pids.items():
            if pid != pids[name]:
                self._say(f"{name} ended and was restarted, as process {pid}")
        for process, count in self._starts.items():
            if count > starts.get(process, count):
                self._say(f"{cluster.processes[process].label} ended and is started again")

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


def _starts(cluster: Cluster) -> dict[InstanceId, int]:
    return {name: one.starts for name, one in cluster.supervisor.status().items()}


def _pids(cluster: Cluster) -> dict[str, int | None]:
    return {proxy.settings.id: proxy.pid for proxy in cluster.proxies}


class RestartError(KvrsError):
    """A process failed to restart; the rollout stops, and the other processes run on."""


class RollingRestart:
    """`run` restarts proxies, then instances, then agents. Each has to be up in the state of every
    proxy before the next one. Those that were removed at the proxies are left as they are.
    """

    def __init__(
        self, cluster: Cluster, say: Callable[[str], None], goes_on: Callable[[], bool]
    ) -> None:
        """`goes_on` is polled; when it returns False, no further process is restarted."""
        self._cluster = cluster
        self._start_s = cluster.config.cluster.start_timeout_s
        self._say = say
        self._goes_on = goes_on

    def run(self) -> bool:
        """Restart all; False if `goes_on` ended it.

        Raises:
            RestartError: a process failed to restart.
            LaunchError, ProxyError: no proxy serves any more, or DistServe's Ray has ended.
        """
        cluster = self._cluster
        # Wait for processes that are being restarted already.
        if not self._until(lambda: not cluster.down(), "the restart has not begun", self._start_s):
            return False
        for number in range(len(cluster.proxies)):
            if not self._restart_proxy(number):
                return False
        for kinds in ((Kind.INSTANCE, Kind.SERVER), (Kind.AGENT,)):
            for process in [each for each in cluster.processes.values() if each.kind in kinds]:
                if not self._restart(process):
                    return False
        return True

    def _restart_proxy(self, number: int) -> bool:
        cluster, proxy = self._cluster, self._cluster.proxies[number]
        former = proxy.signal(signal.SIGTERM)  # It hands its streams over.
        name = proxy.settings.id

        def is_new() -> bool:
            if proxy.status.fault is not None:
                raise RestartError(proxy.status.fault)
            return proxy.pid != former and not cluster.down()

        return self._until(
            is_new, name, self._start_s + proxy.settings.drain_delay_s + proxy.settings.drain_s
        ) and self._all_up(name, self._start_s)

    def _restart(self, process: Process) -> bool:
        cluster = self._cluster
        former: dict[int, set[int]] = {}

        def is_known() -> bool:
            former.update(
                {number: self._pids(number, process) for number in range(len(cluster.proxies))}
            )
            return all(former.values()) or self._is_removed(process)

        if not self._until(is_known, process.label, self._start_s):
            return False
        if not all(former.values()):
            self._say(f"{process.label} was removed, and is not restarted")
            return True
        cluster.end(process.name)

        def is_new() -> bool:
            if fault := cluster.supervisor.status()[process.name].fault:
                raise RestartError(f"{process.label}: {fault}")
            found = {number: self._pids(number, process) for number in former}
            is_other = all(found[each] and not former[each] & found[each] for each in former)
            return is_other or self._is_removed(process)

        start_s = process.start_timeout_s
        within_s = start_s + cluster.config.cluster.drain_s
        return self._until(is_new, process.label, within_s) and self._all_up(process.label, start_s)

    def _pids(self, proxy: int, process: Process) -> set[int]:
        """The process ids of a process in the state of a proxy, under all of its names."""
        return {row["pid"] for row in self._rows(proxy, process) or ()} - {None}

    def _is_removed(self, process: Process) -> bool:
        """An operator has had all proxies remove the process."""
        return all(self._rows(each, process) == [] for each in range(len(self._cluster.proxies)))

    def _rows(self, proxy: int, process: Process) -> list[dict[str, Any]] | None:
        """None: the proxy does not answer."""
        try:
            rows = rows_of(self._cluster.state(proxy))
        except AdminError:
            return None
        names = instances_in(self._cluster.config, process) or [process.name]
        return [rows[name] for name in names if name in rows]

    def _all_up(self, name: str, within_s: float) -> bool:
        if not self._until(lambda: not self._cluster.down(), name, within_s):
            return False
        self._say(f"{name} is up again")
        return True

    def _until(self, holds: Callable[[], bool], name: str, within_s: float) -> bool:
        """Wait for a condition; False: `goes_on` ended it."""
        give_up_s = time.monotonic() + within_s
        while not holds():
            if not self._goes_on():
                return False
            self._cluster.check()
            if time.monotonic() > give_up_s:
                raise RestartError(
                    f"{name}: {within_s:.0f} s later these are not up: {self._cluster.down()}"
                )
            time.sleep(_RESTART_LOOK_S)
        return self._goes_on()
