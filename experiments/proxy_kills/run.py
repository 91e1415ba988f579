"""Streams under a series of proxy kills at random moments, compared token by token with the same
requests undisturbed.

python -m experiments.proxy_kills.run [--kills 100] [--proxies 2] [--mirror async] [--mix]
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from experiments.record import Record
from kvrs.cluster.launcher import Cluster
from kvrs.config.file import Config, parse_config
from kvrs.demo import PACE
from kvrs.ids import InstanceId
from kvrs_testkit.resuming import BARS, Clients, Load, Way, bodies, is_exact, quiet_run, verdict

RESULTS = Path(__file__).parent / "results"
REQUESTS = 48
TOKENS = 320
# Of ten clients seven continue and three replay.
WAYS = [Way.REPLAY if number % 10 in (2, 5, 8) else Way.CONTINUE for number in range(20)]
PAUSE_S = (0.0, 2.0)
DECODE = (InstanceId("d0"), InstanceId("d1"))


def settings(mirror: str, seed: int) -> Config:
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0, "mirror": mirror},
            "cluster": {"engine": {"seed": seed, "pace": PACE}},
            "gossip": {"enabled": True},
        }
    )


async def kill_all(cluster: Cluster, kills: int, mix: bool, rng: random.Random) -> dict[str, Any]:
    """Kill at random times, each some time after the last killed proxy is back; return how many
    streams each proxy had.
    """
    hit: list[int] = []
    instances = 0
    for _ in range(kills):
        await asyncio.to_thread(cluster.wait_all_up)
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        number = rng.randrange(len(cluster.proxies))
        hit.append(len((await asyncio.to_thread(cluster.state, number))["streams"]))
        if mix:
            instances += 1
            await asyncio.to_thread(cluster.kill, rng.choice(DECODE))
        cluster.proxies[number].signal(signal.SIGKILL)
    await asyncio.to_thread(cluster.wait_all_up)
    return {
        "kills": len(hit),
        "instance_kills": instances,
        "kills_without_a_stream": hit.count(0),
        "streams_hit": sum(hit),
    }


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    asked = bodies(REQUESTS, TOKENS, arguments.seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = Clients(session, lambda: cluster.urls, asked)
        quiet = await quiet_run(clients, REQUESTS)
        load = Load(clients, WAYS, REQUESTS, arguments.seed)
        loading = asyncio.create_task(load.run())
        await asyncio.sleep(2.0)
        started_s = time.monotonic()
        killed = await kill_all(
            cluster, arguments.kills, arguments.mix, random.Random(arguments.seed)
        )
        took_s = time.monotonic() - started_s
        load.stop()
        await loading
        states = [
            await asyncio.to_thread(cluster.state, number) for number in range(len(cluster.proxies))
        ]
    left = {"streams": sum(len(state["streams"]) for state in states)}
    return (
        killed
        | verdict(load.found, quiet)
        | {"left_at_the_end": left, "kills_took_s": round(took_s, 1)}
    )


def as_text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['proxies']} proxies, mirror {result['mirror']}: {result['kills']} "
        f"kills in {result['kills_took_s']:.0f} s"
        + (
            f", with each a decode instance ({result['instance_kills']})"
            if result["instance_kills"]
            else ""
        ),
        f"streams of the killed proxies {result['streams_hit']} (kills without a stream: "
        f"{result['kills_without_a_stream']})",
        f"streams {result['streams']} {result['by_way']}, {result['tokens']} tokens; "
        f"{result['streams_that_broke']} broke off, "
        f"{result['breaks']} times in all, one of them {result['most_breaks_of_a_stream']} times",
        ", ".join(f"{bar} {result[bar]}" for bar in BARS),
        f"longest gap of a stream that broke and continued, in s: {result['longest_gap_s']}",
        f"what clients were told meanwhile: {result['refusals']}",
    ]
    lines += [f"{count} x {failure}" for failure, count in result["failures"].items()]
    return "\n".join([*lines, "PASSED" if result["passed"] else "FAILED"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--proxies", type=int, default=2, choices=range(2, 9), metavar="2..8")
    parser.add_argument("--mirror", default="async", choices=["async", "sync"])
    parser.add_argument(
        "--mix",
        action="store_true",
        help="with each proxy, kill a decode instance in the same moment",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record = Record(arguments.seed)
    with Cluster(settings(arguments.mirror, arguments.seed), print, arguments.proxies) as cluster:
        measured = uvloop.run(measure(cluster, arguments))
        if not is_exact(measured):
            cluster.keep_logs(arguments.out / "logs")
    result = {key: getattr(arguments, key) for key in ("proxies", "mirror", "mix")} | measured
    result["passed"] = (
        is_exact(result)
        and result["streams_that_broke"] > 0
        and not result["left_at_the_end"]["streams"]
    )
    name = f"{arguments.proxies}_{arguments.mirror}" + ("_mix" if arguments.mix else "")
    print(as_text(result), end="")
    record.keep(arguments.out, name, result, as_text(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
