"""Prometheus scrapes a cluster whose processes are killed: each alert fires and clears.

python -m experiments.alerts.run --out experiments/alerts/results
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from experiments.record import Record
from kvrs.cli.monitoring import alert_rules
from kvrs.config.file import parse_config
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.processes import Processes, nodes_with_pairs

SCRAPE_S = 5
MOST_SCRAPES = 2
RANKS = 2  # Of p1.
WORKERS = 2
ALL_UP = WORKERS * (4 + 2 + RANKS)  # Instances, agents, ranks, as each worker sees them.
_LOOK_S = 0.1
_MOST_WAIT_S = 240.0
_CLEAR_S = 300.0

Alert = dict[str, str]


class Prometheus:
    """A server of its own directory, and since when each alert has been firing."""

    def __init__(self, directory: Path, admin_ports: Sequence[int]) -> None:
        self._directory = directory
        (self._port,) = free_ports(1)
        (directory / "kvrs.yaml").write_text(alert_rules())
        settings = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": ["kvrs.yaml"],
            "scrape_configs": [
                {
                    "job_name": "kvrs",
                    "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in admin_ports]}],
                }
            ],
        }
        (directory / "prometheus.yml").write_text(json.dumps(settings))

    @contextmanager
    def running(self) -> Iterator[None]:
        with (self._directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def firing(self) -> list[Alert]:
        url = f"http://127.0.0.1:{self._port}/api/v1/alerts"
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                found = json.load(response)["data"]["alerts"]
        except OSError:
            return []
        return [alert["labels"] for alert in found if alert["state"] == "firing"]

    def sees_all_up(self) -> bool:
        """All instances and agents, and all ranks."""
        up = "sum(kvrs_worker_up)+sum(kvrs_agent_up)+sum(kvrs_worker_degree)"
        url = f"http://127.0.0.1:{self._port}/api/v1/query?query={quote(up)}"
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                result = json.load(response)["data"]["result"]
        except OSError:
            return False
        return bool(result) and float(result[0]["value"][1]) == ALL_UP


class Watch:
    """Notes when which alert fires and clears, from a thread."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self.history: list[dict[str, Any]] = []  # Alert, fired and cleared.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        firing: dict[str, dict[str, Any]] = {}
        while not self._ended.wait(_LOOK_S):
            now_s, seen = time.monotonic(), {}
            for labels in self._prometheus.firing():
                seen[json.dumps(labels, sort_keys=True)] = labels
            for key in seen.keys() - firing.keys():
                firing[key] = {"labels": seen[key], "fired_s": now_s, "cleared_s": None}
                self.history.append(firing[key])
            for key in firing.keys() - seen.keys():
                firing.pop(key)["cleared_s"] = now_s

    def find(self, wanted: Alert, since_s: float) -> dict[str, Any] | None:
        """The alert with these labels that fired after a moment."""
        return next(
            (
                row
                for row in self.history
                if wanted.items() <= row["labels"].items() and row["fired_s"] >= since_s
            ),
            None,
        )


def measure(directory: Path) -> list[dict[str, Any]]:
    port, admin_port = free_ports(2)
    nodes = nodes_with_pairs()
    nodes[1]["instances"][0]["tp"] = RANKS
    config = parse_config(
        {
            "proxy": {"workers": WORKERS, "port": port, "admin_port": admin_port},
            "cluster": {"nodes": nodes},
            "backup": {"mode": "both"},
        }
    )
    admin_ports = config.proxy.ports_of("admin_port")
    prometheus = Prometheus(directory, admin_ports)
    watch = Watch(prometheus)
    everything = ("p0", "d0", "p1", "d1", "agent-n0", "agent-n1")
    with Processes(config) as processes:
        processes.start(*everything)
        processes.wait_ready(*everything)
        processes.start_proxy()
        with prometheus.running(), watch.running():
            rows = Faults(processes, prometheus, watch, admin_ports).run()
            with suppress(TimeoutError):
                _until(lambda: not prometheus.firing(), "all alerts are clear", _CLEAR_S)
            time.sleep(2 * _LOOK_S)
    return [_of_times(**row) for row in rows]


def _of_times(
    fault: str, alert: Alert, at_s: float, found: dict[str, Any] | None
) -> dict[str, Any]:
    """None: it did not fire, or did not clear."""
    after_s = {
        name: None if found is None or found[name] is None else round(found[name] - at_s, 1)
        for name in ("fired_s", "cleared_s")
    }
    return {
        "fault": fault,
        "alert": alert,
        "fired_after_s": after_s["fired_s"],
        "cleared_after_s": after_s["cleared_s"],
    }


class Faults:
    """One after the other. Before each all is up again, as Prometheus sees it, and what it is to
    show does not fire: an alert that fires already would not fire again.
    """

    def __init__(
        self,
        processes: Processes,
        prometheus: Prometheus,
        watch: Watch,
        admin_ports: Sequence[int],
    ) -> None:
        self._processes = processes
        self._prometheus = prometheus
        self._watch = watch
        self._admin_ports = admin_ports
        self._rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        kill = self._processes.kill
        self._fault("kill of a decode instance", lambda: kill("d0"), [_died("d0")])
        self._again("d0")
        self._fault("kill of a prefill instance", lambda: kill("p0"), [_died("p0")])
        self._again("p0")
        agent = {"alertname": "KvrsAgentDied", "agent": "agent-n0"}
        self._fault("kill of an agent", lambda: kill("agent-n0"), [agent])
        self._again("agent-n0")
        rank = {"alertname": "KvrsRankDied", "worker": "p1"}
        self._fault("kill of a rank", self._kill_rank, [rank])
        pid = self._processes.pid("d1")
        silent = _died("d1") | {"cause": "silent"}
        self._fault("stop of a decode instance", lambda: os.kill(pid, signal.SIGSTOP), [silent])
        os.kill(pid, signal.SIGCONT)
        worker = self._state(1)["proxies"][0]["pid"]
        at = f"127.0.0.1:{self._admin_ports[1]}"
        restarted = {"alertname": "KvrsProxyRestarted", "instance": at}
        self._fault(
            "kill of a worker of the proxy", lambda: os.kill(worker, signal.SIGKILL), [restarted]
        )
        self._node()
        kill_proxy = [{"alertname": "KvrsProxyDown"}]
        self._fault("kill of the proxy", lambda: kill("proxy"), kill_proxy)
        started = [{"alertname": "KvrsProxyRestarted"}]
        self._carry_out("start of the proxy", self._processes.start_proxy, started)
        return self._rows

    def _kill_rank(self) -> None:
        (row,) = (row for row in self._state()["instances"] if row["id"] == "p1")
        os.kill(row["ranks"][-1]["pid"], signal.SIGKILL)

    def _node(self) -> None:
        """A node dies with all its processes, and the other decode instance too."""

        def kill_node() -> None:
            for name in ("p1", "d1", "agent-n1", "d0"):
                self._processes.kill(name)

        wanted = [
            _died("p1"),
            _died("d1") | {"cause": "connection_lost"},
            {"alertname": "KvrsAgentDied", "agent": "agent-n1"},
            {"alertname": "KvrsRoleDown", "role": "decode"},
        ]
        lasting = [
            {"alertname": "KvrsWorkerDown", "worker": "d1"},
            {"alertname": "KvrsAgentDown", "agent": "agent-n1"},
        ]
        at_s = self._fault("kill of a node, and of the last decode instance", kill_node, wanted)
        self._again("d0")
        self._expect("node still dead after 2 minutes", at_s, lasting)
        self._again("p1", "d1", "agent-n1")

    def _fault(self, what: str, carry_out: Callable[[], None], wanted: list[Alert]) -> float:
        _until(self._prometheus.sees_all_up, f"all is up before the {what}")
        _until(lambda: not self._fires(wanted), f"no {wanted} before the {what}")
        return self._carry_out(what, carry_out, wanted)

    def _fires(self, wanted: list[Alert]) -> bool:
        firing = self._prometheus.firing()
        return any(alert.items() <= labels.items() for alert in wanted for labels in firing)

    def _carry_out(self, what: str, carry_out: Callable[[], None], wanted: list[Alert]) -> float:
        at_s = time.monotonic()
        carry_out()
        self._expect(what, at_s, wanted)
        return at_s

    def _expect(self, what: str, at_s: float, wanted: list[Alert]) -> None:
        for alert in wanted:
            with suppress(TimeoutError):  # It is in the table, and is missed.
                _until(partial(self._has_fired, alert, at_s), f"{alert} fires")
            found = self._watch.find(alert, at_s)
            self._rows.append({"fault": what, "alert": alert, "at_s": at_s, "found": found})

    def _has_fired(self, alert: Alert, at_s: float) -> bool:
        return self._watch.find(alert, at_s) is not None

    def _again(self, *names: str) -> None:
        self._processes.start(*names)
        self._processes.wait_ready(*names)

    def _state(self, worker: int = 0) -> Any:
        url = f"http://127.0.0.1:{self._admin_ports[worker]}/kvrs/v1/state"
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)


def _died(worker: str) -> Alert:
    return {"alertname": "KvrsWorkerDied", "worker": worker}


def _until(holds: Callable[[], bool], what: str, most_s: float = _MOST_WAIT_S) -> None:
    give_up_s = time.monotonic() + most_s
    while not holds():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"not within {most_s:.0f} s: {what}")
        time.sleep(_LOOK_S)


def is_met(row: dict[str, Any]) -> bool:
    """True if it fired in time and cleared. An alert that waits has its wait on top, a process that
    is stopped the silence that tells it from a busy one.
    """
    waits_s = 0.0
    if row["alert"]["alertname"] in ("KvrsWorkerDown", "KvrsAgentDown"):
        waits_s = 120.0
    if row["alert"].get("cause") == "silent":
        waits_s = 5.0
    if row["fired_after_s"] is None or row["cleared_after_s"] is None:
        return False
    return bool(row["fired_after_s"] <= waits_s + (MOST_SCRAPES + 1) * SCRAPE_S)


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = [f"scraped and evaluated every {SCRAPE_S} s; seconds since the fault"]
    for row in rows:
        labels = " ".join(value for key, value in row["alert"].items() if key != "alertname")
        alert = f"{row['alert']['alertname']} {labels}".strip()
        lines.append(
            f"{row['fault']:48} {alert:38} fired {_shown(row['fired_after_s'])}  "
            f"cleared {_shown(row['cleared_after_s'])}" + ("" if is_met(row) else ": MISSED")
        )
    return "\n".join(lines)


def _shown(after_s: float | None) -> str:
    return f"{'never':>6}" if after_s is None else f"{after_s:6.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("no prometheus command")
        return 2
    # What else the machine does makes an alert late, never early.
    record = Record(timed=False)
    with tempfile.TemporaryDirectory(prefix="kvrs-alerts-") as directory:
        rows = measure(Path(directory))
    print(as_text(rows))
    record.keep(options.out, "alerts", {"rows": rows}, as_text(rows))
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
