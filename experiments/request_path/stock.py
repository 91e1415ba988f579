"""Start of a proxy for stock vLLM, `kvrs proxy` with two flags in a process of its own: the modules
of kvrs that it imports, and its CPU and memory when its admin port answers.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from kvrs_testkit.free_ports import free_ports

_UP_S, _LOOK_S = 30.0, 0.02
# Writes the files of all imported modules of kvrs at its end.
_PROGRAM = """
import atexit, json, sys

def write():
    files = {getattr(each, "__file__", None) for each in [*sys.modules.values()]}
    with open(sys.argv[0], "w") as file:
        json.dump(sorted(each for each in files if each and "/kvrs/" in each), file)

sys.argv[:1] = []
atexit.register(write)
from kvrs.__main__ import main
main()
"""


@dataclass(frozen=True, slots=True)
class Stock:
    """A started proxy: its modules of kvrs with their lines, its CPU in s, its memory in MB."""

    modules: dict[str, int]
    cpu_s: float
    rss_mb: float

    @property
    def lines(self) -> int:
        return sum(self.modules.values())


def started(tree: Path) -> Stock:
    """Start the proxy of a checkout in front of two ports at which nothing listens, and end it."""
    with tempfile.TemporaryDirectory(prefix="kvrs-stock-") as directory:
        written = Path(directory) / "modules.json"
        prefill, decode, port, admin_port = free_ports(4)
        words = [
            *("proxy", "--prefill", f"http://127.0.0.1:{prefill}"),
            *("--decode", f"http://127.0.0.1:{decode}"),
            *("--port", str(port), "--admin-port", str(admin_port)),
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(written), *words],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(admin_port, process)
            cpu_s, rss_mb = _cpu_s(process.pid), _rss_mb(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=_UP_S)
        files = map(Path, json.loads(written.read_text()))
        found = {
            str(file.relative_to(tree)): file.read_text().count("\n")
            for file in files
            if file.is_relative_to(tree / "kvrs")
        }
    return Stock(found, cpu_s, rss_mb)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _UP_S
    while time.monotonic() < until_s:
        connection = HTTPConnection("127.0.0.1", port, timeout=1.0)
        try:
            connection.request("GET", "/healthz")
            connection.getresponse().read()
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"the proxy ended with {process.returncode}") from None
            time.sleep(_LOOK_S)
        else:
            return
        finally:
            connection.close()
    raise TimeoutError(f"port {port} did not answer within {_UP_S:.0f} s")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(each for each in status.splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
