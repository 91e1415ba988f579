"""The main loop of `kvrs lab up` while its cluster runs, and the end of that."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

from kvrs.net.admin import AdminError
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.cluster.supervised import ProcessStatus

LOOK_INTERVAL_S = 0.5


class Upkeep:
    """Watches a cluster until it is told to end, then drains it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._stop = threading.Event()
        self._cut = threading.Event()
        self._say = say
        self._reported: set[str] = set()  # Proxies that were reported to be down.
        self._seen: dict[str, ProcessStatus] = {}  # Status of each process at the last check.

    def end(self) -> None:
        """Begin the end; the second call cuts the streams that still run."""
        (self._cut if self._stop.is_set() else self._stop).set()

    def run(self, cluster: Cluster) -> None:
        """Watch the cluster until `end`. Raises LaunchError: the cluster cannot go on."""
        self._seen = _statuses(cluster)
        while not self._stop.wait(LOOK_INTERVAL_S):
            cluster.check()
            cluster.follow_fleet()
            self._report_faults(cluster)
            self._report_ends(cluster)
        self._drain(cluster)

    def _drain(self, cluster: Cluster) -> None:
        streams = 0
        for number in range(len(cluster.proxies)):
            with contextlib.suppress(AdminError):
                streams += len(cluster.state(number)["streams"])
        if streams:
            self._say(
                f"draining: streams that still run ({streams}) have "
                f"{cluster.config.proxy.drain_s:g} s (proxy.drain_s); a second signal cuts them"
            )
        cluster.drain(self._cut)

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
        labels: dict[str, str] = {each.name: each.label for each in cluster.processes.values()}
        pids = {proxy.settings.id: proxy.pid for proxy in cluster.proxies}
        former, self._seen = self._seen, _statuses(cluster)
        for name, now in self._seen.items():
            before, label = former.get(name, now), labels.get(name, name)
            if now.starts > before.starts:
                is_proxy = name in pids
                how = f"was restarted, as process {pids[name]}" if is_proxy else "is started again"
                self._say(f"{label} ended and {how}")
            if now.served > before.served:
                after = "" if now.down_s is None else f" after {now.down_s:.1f} s"
                self._say(f"{label} is up again{after}")


def _statuses(cluster: Cluster) -> dict[str, ProcessStatus]:
    """A copy of the status of each process."""
    found: dict[str, ProcessStatus] = {each.settings.id: each.status for each in cluster.proxies}
    return {name: replace(each) for name, each in (found | cluster.supervisor.status()).items()}
