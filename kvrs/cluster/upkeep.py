"""The main loop of `kvrs up` while its cluster runs."""

import threading
from collections.abc import Callable

from kvrs.cluster.launcher import Cluster
from kvrs.cluster.rolling import RestartError, RollingRestart
from kvrs.config.file import Config
from kvrs.config.origin import UpCommand
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId

LOOK_INTERVAL_S = 0.5


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
            proxy.settings.id: proxy.fault for proxy in cluster.proxies if proxy.fault is not None
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
    return {name: one.starts for name, one in cluster.keepers.status().items()}


def _pids(cluster: Cluster) -> dict[str, int | None]:
    return {proxy.settings.id: proxy.pid for proxy in cluster.proxies}
