"""The main loop of `kvrs lab up` while its cluster runs."""

import threading
from collections.abc import Callable

from kvrs_lab.cluster.launcher import Cluster

LOOK_INTERVAL_S = 0.5


class Upkeep:
    """Watches a cluster until `stop`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.stop = threading.Event()
        self._say = say
        self._reported: set[str] = set()  # Proxies that were reported to be down.
        self._starts: dict[str, int] = {}  # Starts of each process at the last check.

    def run(self, cluster: Cluster) -> None:
        """Watch the cluster until `stop`. Raises LaunchError: the cluster cannot go on."""
        self._starts = _starts(cluster)
        while not self.stop.wait(LOOK_INTERVAL_S):
            cluster.check()
            cluster.follow_fleet()
            self._report_faults(cluster)
            self._report_ends(cluster)

    def _report_faults(self, cluster: Cluster) -> None:
        """Report, once each, proxies that cannot be restarted."""
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


def _starts(cluster: Cluster) -> dict[str, int]:
    """Number of starts of each process."""
    found = {proxy.settings.id: proxy.status.starts for proxy in cluster.proxies}
    return found | {name: each.starts for name, each in cluster.supervisor.status().items()}
