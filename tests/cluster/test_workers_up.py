"""`kvrs lab up --proxies 2` with `proxy.workers: 2`: every worker is a peer of those of the other
proxy, and any of them serves.
"""

import asyncio
import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.proxy import ADMIN_PORT_STEP
from kvrs_testkit.resuming import Clients, Way, bodies, is_exact, quiet_run, verdict
from tests.cluster.launches import END_S, Launch

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

REQUESTS = 6
WORKERS = {"proxy-0.0", "proxy-0.1", "proxy-1.0", "proxy-1.1"}


def state_of(admin_url: str) -> Any:
    with urllib.request.urlopen(f"{admin_url}/kvrs/v1/state", timeout=END_S) as answer:
        return json.load(answer)


async def test_workers_of_several_proxies_are_one_cluster(
    tmp_path: Path, tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of a killed worker, and of a killed supervisor, go on without a lost token."""
    monkeypatch.setenv("KVRS_PROXY__WORKERS", "2")
    launch = Launch(tmp_path, "--model", tiny_llama, "--proxies", "2", forked=True)
    try:
        await asyncio.to_thread(launch.wait_for_output, "Ctrl-C ends it")
        admins = [workers_of(admin) for _, admin in launch.all_urls]
        pids = [await asyncio.to_thread(until_all_up, admin) for pair in admins for admin in pair]
        assert len({*pids}) == len(WORKERS)

        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            clients = Clients(
                session, lambda: [url for url, _ in launch.all_urls], bodies(REQUESTS, 120, seed=1)
            )
            quiet = await quiet_run(clients, REQUESTS)
            for turn, victim in enumerate((pids[0], supervisor_of(pids[1]))):
                ways = [Way.CONTINUE, Way.REPLAY] * (REQUESTS // 2)
                reading = [
                    asyncio.create_task(clients.read(n, way, f"k{turn}-{n}", proxy=0))
                    for n, way in enumerate(ways)
                ]
                await asyncio.sleep(0.3)
                os.kill(victim, signal.SIGKILL)
                found = await asyncio.gather(*reading)
                assert is_exact(verdict(found, quiet)), verdict(found, quiet)
                for admin in admins[0]:
                    await asyncio.to_thread(until_all_up, admin)
    finally:
        launch.process.terminate()
        launch.process.wait(END_S)
    launch.assert_nothing_left()


def workers_of(admin_url: str) -> tuple[str, str]:
    """The admin ports of both workers of a proxy."""
    host, _, port = admin_url.rpartition(":")
    return admin_url, f"{host}:{int(port) + ADMIN_PORT_STEP}"


def supervisor_of(pid: int) -> int:
    """The process that started a worker."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until_all_up(admin_url: str) -> int:
    """Wait until a worker and all its peers are up; its process id."""
    give_up_s = time.monotonic() + END_S
    while True:
        try:
            row: dict[str, Any] = state_of(admin_url)["proxies"][0]
            if {row["id"], *row["peers"]} == WORKERS and {*row["peers"].values()} == {"up"}:
                return int(row["pid"])
        except OSError:
            pass
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
