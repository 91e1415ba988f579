"""Rows without a checksum when their engine dies, and the CPU time that checksums take.

    python -m experiments.vllm_rows.checksums [--deaths N] [--bytes-per-s B]

A process writes rows at a steady rate into memory that a real agent has, and is killed at a random
moment. The agent's log says how many of its rows had no checksum. Rows are written again and again,
as in a full tier.
"""

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.vllm_rows.ring import TieredVllms
from kvrs.transfer.store.directory import row_directory
from kvrs_testkit.row_agent import until
from kvrs_testkit.row_engine import RowEngine, key_of
from kvrs_testkit.vllm_rows import row_config

ROWS, ROW_BYTES = 512, 2 << 20
SECONDS = (4.0, 7.0)  # Of writing before a death.
IDLE_S = 5.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_DIED = re.compile(r"engine died .*row_count=(\d+) rows_without_checksum=(\d+)")


def write(directory: str, secret: str, agent: str, bytes_per_s: float) -> None:
    """Write rows for ever, and print the number of rows written."""
    engine = RowEngine(directory, bytes.fromhex(secret), bytes(32), ROWS, ROW_BYTES, agent=agent)
    engine.link.start()
    data = memoryview(os.urandom(ROW_BYTES))
    began_s = time.monotonic()
    for number in range(sys.maxsize):
        row = number % ROWS
        engine.ledger.writing(row)
        os.pwrite(engine.memory, data, row * ROW_BYTES)
        engine.ledger.holds(row, key_of(number))
        print(number + 1, flush=True)
        time.sleep(max(0.0, began_s + (number + 1) * ROW_BYTES / bytes_per_s - time.monotonic()))


class Death:
    """A node's agent, and the writer of its rows."""

    def __init__(self, servers: TieredVllms, bytes_per_s: float, draw: random.Random) -> None:
        self._servers, self._bytes_per_s, self._draw = servers, bytes_per_s, draw
        (self._node,) = servers.config.cluster.nodes
        self._agent = str(self._node.agent_id)

    def measure(self) -> dict[str, Any]:
        """Return how many rows had no checksum at a death, and the agent's CPU time per GB."""
        servers, agent = self._servers, self._agent
        servers.start(agent)
        servers.wait_ready(agent)
        pid = servers.pid(agent)
        time.sleep(1.0)
        idle_s = self._cpu_s(pid, IDLE_S) / IDLE_S
        directory = row_directory(servers.config.backup.directory, servers.secret, self._node.id)
        orders = [str(directory), servers.secret.hex(), agent, str(self._bytes_per_s)]
        writer = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--write", *orders],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        try:
            until(lambda: "serving an engine's rows" in self._said())
            writer.stdout.readline()
            lasts_s, began_s = self._draw.uniform(*SECONDS), time.monotonic()
            used_s = self._cpu_s(pid, lasts_s)
            took_s = time.monotonic() - began_s
        finally:
            writer.send_signal(signal.SIGKILL)
            written = int(writer.stdout.read().rpartition("\n")[0].rpartition("\n")[2])
            writer.wait()
        until(lambda: _DIED.search(self._said()) is not None)
        found = _DIED.search(self._said())
        assert found is not None
        servers.kill(agent)
        written_gb = written * ROW_BYTES / 1e9
        return {
            "rows": int(found[1]),
            "without_checksum": int(found[2]),
            "written_gb": written_gb,
            "bytes_per_s": written_gb * 1e9 / took_s,
            "idle_cpu": idle_s,
            "cpu": used_s / took_s,
            "cpu_s_per_gb": (used_s - idle_s * took_s) / written_gb,
        }

    def _said(self) -> str:
        return self._servers._log(self._agent).read_text(errors="replace")

    @staticmethod
    def _cpu_s(pid: int, seconds: float) -> float:
        """Return the CPU time that a process takes within these seconds."""

        def taken() -> float:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) * _TICK_S

        before = taken()
        time.sleep(seconds)
        return taken() - before


def as_text(deaths: Sequence[Mapping[str, Any]], bytes_per_s: float) -> str:
    def of(name: str) -> list[float]:
        return sorted(each[name] for each in deaths)

    without, cpu = of("without_checksum"), of("cpu_s_per_gb")
    return "\n".join(
        [
            f"{len(deaths)} deaths, rows of {ROW_BYTES >> 20} MiB at {bytes_per_s / 1e6:.0f} MB/s "
            f"(asked), {statistics.median(of('bytes_per_s')) / 1e6:.0f} MB/s (median, written)",
            f"rows without a checksum at the death: median {statistics.median(without):.0f}, "
            f"most {without[-1]:.0f}, of {deaths[0]['rows']}",
            f"CPU seconds of the agent per GB: median {statistics.median(cpu):.2f}, most "
            f"{cpu[-1]:.2f}; CPU of the agent: median {statistics.median(of('cpu')):.1%} of a core",
        ]
    )


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--bytes-per-s", type=float, default=200e6)
    parser.add_argument("--write", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        directory, secret, agent, bytes_per_s = options.write
        write(directory, secret, agent, float(bytes_per_s))
        return 1
    record = Record(options.seed)
    draw = random.Random(options.seed)
    with TemporaryDirectory() as directory:
        config = row_config(Path(directory), {"n0": ["d0"]})
        with TieredVllms(config, sys.executable) as servers:
            death = Death(servers, options.bytes_per_s, draw)
            deaths = [death.measure() for _ in range(options.deaths)]
    text = as_text(deaths, options.bytes_per_s) + "\n"
    print(text)
    record.keep(options.out, "checksums", {"deaths": deaths}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
