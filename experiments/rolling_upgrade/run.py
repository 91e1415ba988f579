"""Streams under load while every process of a cluster is restarted, one at a time: none may fail,
none may differ.

python -m experiments.rolling_upgrade.run [--proxies 2] [--rounds 1]
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from experiments.record import Record
from kvrs.cluster.fault_injection import rows_of
from kvrs.cluster.launcher import Cluster
from kvrs.cluster.upkeep import RollingRestart
from kvrs.config.file import Config, parse_config
from kvrs.demo import BACKUP_BYTES, PACE
from kvrs_testkit.processes import nodes_with_pairs
from kvrs_testkit.resuming import BARS, Clients, Load, Way, bodies, is_exact, quiet_run, verdict

RESULTS = Path(__file__).parent / "results"
REQUESTS = 48
TOKENS = 320
WAYS = [Way.CONTINUE, Way.PLAIN, Way.REPLAY, Way.PLAIN] * 4


def settings(seed: int) -> Config:
    # Decode instances first: their streams would have ended by themselves while the prefill
    # instance of their node drained.
    nodes = [node | {"instances": node["instances"][::-1]} for node in nodes_with_pairs()]
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"engine": {"seed": seed, "pace": PACE}, "nodes": nodes},
            "backup": {"mode": "both", "capacity_bytes": BACKUP_BYTES},
            "gossip": {"enabled": True},
        }
    )


def pids(cluster: Cluster) -> dict[str, int]:
    found = {proxy.settings.id: proxy.pid or 0 for proxy in cluster.proxies}
    return found | {str(name): int(row["pid"]) for name, row in rows_of(cluster.state()).items()}


class ProgressLog:
    """The restart's progress lines, with the time and the number of streams so far."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._began_s = time.monotonic()
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(
            f"{time.monotonic() - self._began_s:6.1f} s, {len(self._load.found):4} streams: {line}"
        )
        print(self.lines[-1], flush=True)


async def measure(cluster: Cluster, rounds: int, seed: int) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)
    before = pids(cluster)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = Clients(session, lambda: cluster.urls, bodies(REQUESTS, TOKENS, seed))
        quiet = await quiet_run(clients, REQUESTS)
        load = Load(clients, WAYS, REQUESTS, seed)
        loading = asyncio.create_task(load.run())
        await asyncio.sleep(3.0)
        progress_log = ProgressLog(load)
        for _ in range(rounds):
            await asyncio.to_thread(RollingRestart(cluster, progress_log.say, lambda: True).run)
        load.stop()
        await loading
    states = [cluster.state(number) for number in range(len(cluster.proxies))]
    recoveries = [row for state in states for row in state["recoveries"]]
    after = pids(cluster)
    return {
        "processes": len(before),
        "restarted": sum(after[name] != pid for name, pid in before.items()),
        # Of those that happened since the proxies were restarted, which came first.
        "recoveries": dict(Counter(row["cause"] for row in recoveries)),
        "recovered_by": dict(Counter(f"{row['option']}: {row['outcome']}" for row in recoveries)),
        "progress_log": progress_log.lines,
    } | verdict(load.found, quiet)


def as_text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['processes']} processes, {result['restarted']} restarted, "
        f"{result['rounds']} round(s)",
        *result["progress_log"],
        f"streams {result['streams']} {result['by_way']}, {result['tokens']} tokens; "
        f"{result['streams_that_broke']} broke off "
        "and went on elsewhere",
        ", ".join(f"{bar} {result[bar]}" for bar in BARS),
        f"what clients were told meanwhile: {result['refusals']}",
        f"recoveries by cause: {result['recoveries']}",
        f"recoveries by option: {result['recovered_by']}",
    ]
    lines += [f"{count} x {failure}" for failure, count in result["failures"].items()]
    return "\n".join([*lines, "PASSED" if result["passed"] else "FAILED"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--proxies", type=int, default=2, choices=range(2, 9), metavar="2..8")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record = Record(arguments.seed)
    with Cluster(settings(arguments.seed), print, arguments.proxies) as cluster:
        measured = uvloop.run(measure(cluster, arguments.rounds, arguments.seed))
    result = {key: getattr(arguments, key) for key in ("proxies", "rounds")} | measured
    result["passed"] = is_exact(result) and result["restarted"] == result["processes"]
    print(as_text(result), end="")
    record.keep(arguments.out, "rolling_upgrade", result, as_text(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
