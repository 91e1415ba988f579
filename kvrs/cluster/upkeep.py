"""What `kvrs up` does from the moment at which its cluster is up."""

import threading
from collections.abc import Callable

from kvrs.cluster.launcher import Cluster
from kvrs.cluster.rolling import RestartError, RollingRestart
from kvrs.config import Config
from kvrs.errors import ConfigError

LOOK_INTERVAL_S = 0.5


class Upkeep:
    """Looks after a cluster until `stop`. `restart` may be called from a signal handler, and takes effect in `run`."""

    def __init__(self, say: Callable[[str], None], read_config: Callable[[], Config]) -> None:
        self.stop = threading.Event()
        self._say = say
        self._read_config = read_config  # As it is on disk by then.
        self._told: set[str] = set()  # Which proxies are known to be missing.
        self._pids: dict[str, int | None] = {}
        self._asked = 0  # How often a rolling restart was asked for and nothing has been said to it.

    def restart(self) -> None:
        self._asked += 1

    def run(self, cluster: Cluster) -> None:
        """Raises LaunchError, or ProxyError: the cluster cannot go on."""
        self._asked = 0  # Whoever asked during the start has what he wants.
        self._pids = _pids(cluster)
        while not self.stop.wait(LOOK_INTERVAL_S):
            cluster.check()
            self._tell_faults(cluster)
            self._tell_ends(cluster)
            if self._asked:
                self._asked = 0
                self._restart_all(cluster)
                self._pids = _pids(cluster)

    def _tell_faults(self, cluster: Cluster) -> None:
        """Once each, of proxies that cannot be brought back while others serve."""
        faults = {proxy.settings.id: proxy.fault for proxy in cluster.proxies if proxy.fault is not None}
        for name in faults.keys() - self._told:
            self._say(f"{faults[name]}\nit is tried again; the other proxies serve")
        self._told = set(faults)

    def _tell_ends(self, cluster: Cluster) -> None:
        former, self._pids = self._pids, _pids(cluster)
        for name, pid in self._pids.items():
            if pid != former[name]:
                self._say(f"{name} ended and is started again, as process {pid}")

    def _restart_all(self, cluster: Cluster) -> None:
        try:
            cluster.renew(self._read_config())
        except ConfigError as error:
            self._say(f"nothing is restarted: {error}")
            return
        self._say("restarting everything, one process at a time")
        try:
            if RollingRestart(cluster, self._say, self._goes_on).run():
                self._say("everything was restarted")
        except RestartError as error:
            self._say(f"the restart ends here: {error}")
        self._look()

    def _goes_on(self) -> bool:
        self._look()
        return not self.stop.is_set()

    def _look(self) -> None:
        if self._asked:
            self._asked = 0
            self._say("a restart is under way already: the new one is ignored")


def _pids(cluster: Cluster) -> dict[str, int | None]:
    return {proxy.settings.id: proxy.pid for proxy in cluster.proxies}
