"""Honest look-ups at an agent's row port while others open connections and say nothing.

    python -m experiments.vllm_rows.flood [--rates N ...] [--look-ups N]

A real agent; a process opens silent connections at a steady rate, keeps the newest, and leaves the
older ones open until the agent ends them; another one looks up rows, each time over a connection of
its own, within the product's time limit. Both are of one user and one address. Rate 0: as fast as
one process can.
"""

import argparse
import asyncio
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.vllm_rows.ring import TieredVllms
from kvrs.protocol.rows import Space
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.connections import dial_tcp, dial_unix
from kvrs.transfer.rows.tags import RowTags
from kvrs.transfer.store.directory import row_directory
from kvrs_testkit.row_agent import look_up
from kvrs_testkit.vllm_rows import row_config

BAR = 0.99
LOOKUP_S = 0.3  # The product's own limit.
WAYS = ("socket", "tcp")
_OPEN = 3000  # Silent connections that the flooding process keeps open.
_COLUMNS = ("asked_per_s", "silent_per_s", "look_ups", "answered", "ended")


def flood(way: str, place: str, rate: float) -> None:
    """Open silent connections until stdin ends; then print how many, in how many seconds, and how
    many of them the agent has ended.
    """
    dial = partial(dial_unix, Path(place)) if way == "socket" else None
    kept: list[socket.socket] = []
    count = ended = 0
    began_s = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        with suppress(OSError):
            made = (
                dial(5.0)
                if dial is not None
                else socket.create_connection(("127.0.0.1", int(place)), 5.0)
            )
            kept.append(made)
            count += 1
        if len(kept) >= _OPEN:
            ended += sum(map(is_ended, kept[: _OPEN // 2]))
            for each in kept[: _OPEN // 2]:
                each.close()
            del kept[: _OPEN // 2]
        if rate:
            time.sleep(max(0.0, began_s + count / rate - time.monotonic()))
        if count == 1:
            print("flooding", flush=True)
    print(count, time.monotonic() - began_s, ended, flush=True)


def is_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except OSError as error:
        return not isinstance(error, BlockingIOError)


async def look_ups(client: RowClient, count: int) -> int:
    """Return how many of the look-ups were answered, each over a new connection."""
    answered = 0
    for _ in range(count):
        found: list[bool] = []
        client._silent_until_s = 0.0  # A look-up that fails keeps no other from being tried.

        def ask(stream: Any, found: list[bool] = found) -> None:
            found += look_up(stream, [b"k" * 36])

        await asyncio.to_thread(client._call, ask, time.monotonic() + LOOKUP_S)
        client.close()
        answered += bool(found)
    return answered


def run(way: str, rate: float, count: int) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        config = row_config(Path(directory), {"n0": ["d0"], "n1": ["d1"]})
        with TieredVllms(config, sys.executable) as servers:
            node = servers.config.cluster.nodes[0]
            agent = str(node.agent_id)
            servers.start(agent)
            servers.wait_ready(agent)
            inside = row_directory(servers.config.backup.directory, servers.secret, node.id)
            port = node.agent.row_port
            assert port is not None
            is_local = way == "socket"
            dial = partial(dial_unix, inside) if is_local else partial(dial_tcp, "127.0.0.1", port)
            key, tags = scoped_key(servers.secret, Scope.ROWS, agent), RowTags([servers.secret])
            client = RowClient(agent, dial, key, Space(bytes(32), 4096), tags, is_local=is_local)
            place = str(inside) if is_local else str(port)
            flooding = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, "--flood", way, place, str(rate)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert flooding.stdout is not None
                flooding.stdout.readline()
                time.sleep(1.0)
                answered = asyncio.run(look_ups(client, count))
            finally:
                said, _ = flooding.communicate()
    silent, took_s, ended = map(float, said.split())
    return {
        "way": way,
        "asked_per_s": rate,
        "silent_per_s": silent / took_s,
        "look_ups": count,
        "answered": answered,
        "ended": int(ended),
    }


def as_text(found: Sequence[Mapping[str, Any]], misses: Sequence[str]) -> str:
    width = max(map(len, _COLUMNS)) + 2
    lines = ["way     " + "".join(f"{name:>{width}}" for name in _COLUMNS)]
    lines += [
        f"{each['way']:<8}" + "".join(f"{each[name]:>{width},.0f}" for name in _COLUMNS)
        for each in found
    ]
    return "\n".join([*lines, "", *(f"MISSED: {each}" for each in misses)]) + "\n"


def missed(found: Sequence[Mapping[str, Any]]) -> list[str]:
    misses = []
    for each in found:
        if each["answered"] < BAR * each["look_ups"]:
            misses.append(f"{each['way']}: {each['answered']} of {each['look_ups']}; bar {BAR:.0%}")
        if each["silent_per_s"] < 0.97 * each["asked_per_s"]:
            misses.append(
                f"{each['way']}: {each['silent_per_s']:.0f} silent connections a second; bar "
                f"{each['asked_per_s']:.0f}"
            )
    return misses


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--rates", type=float, nargs="+", default=[1350.0, 0.0])
    parser.add_argument("--look-ups", type=int, default=1000)
    parser.add_argument("--flood", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        way, place, rate = options.flood
        flood(way, place, float(rate))
        return 0
    record = Record(options.seed, timed=False)
    found = [run(way, rate, options.look_ups) for rate in options.rates for way in WAYS]
    misses = missed(found)
    text = as_text(found, misses)
    print(text)
    record.keep(options.out, "flood", {"floods": found}, text)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
