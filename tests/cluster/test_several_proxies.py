"""`kvrs lab up --proxies 2`: any proxy serves, and killed processes restart."""

import asyncio
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from experiments.two_pairs import PACE
from kvrs_lab.cluster.guard import members
from kvrs_testkit.resuming import Clients, Had, Way, bodies, is_exact, quiet_run, verdict
from tests.cluster.launches import END_S, Launch, is_running, until

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]

REQUESTS = 6
TOKENS = 240  # Some seconds: all streams flow at a time.


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, tiny_llama: str) -> Iterator[Launch]:
    """One cluster for all tests of this file that leave it whole: a dozen processes take long to
    start.
    """
    directory = tmp_path_factory.mktemp("several")
    config = directory / "config.yaml"
    nodes = [{"id": f"n{n}", "instances": [{"id": f"b{n}", "role": "both"}]} for n in range(2)]
    document = {
        "proxy": {"event_log": str(directory / "events.jsonl")},
        "cluster": {"model": tiny_llama, "engine": {"pace": PACE}, "nodes": nodes},
    }
    config.write_text(yaml.safe_dump(document))
    launch = Launch(directory, "--config", str(config), "--proxies", "2", forked=True)
    try:
        launch.wait_for_output("Ctrl-C ends it")
        yield launch
    finally:
        launch.process.terminate()
        launch.process.wait(END_S)


def state_of(admin_url: str) -> Any:
    with urllib.request.urlopen(f"{admin_url}/kvrs/v1/state", timeout=END_S) as answer:
        return json.load(answer)


def pids(launch: Launch) -> dict[str, int]:
    """Process ids of all, from the state of a proxy that is up."""
    found: dict[str, int] = {}
    for _, admin_url in launch.all_urls:
        state = state_of(admin_url)
        found |= {
            row["id"]: row["pid"]
            for key in ("instances", "agents", "proxies")
            for row in state[key]
        }
    return found


@asynccontextmanager
async def clients_of(launch: Launch) -> AsyncIterator[tuple[Clients, list[Had]]]:
    """Clients, and the expected answer of each request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        clients = Clients(
            session, lambda: [url for url, _ in launch.all_urls], bodies(REQUESTS, TOKENS, seed=1)
        )
        yield clients, await quiet_run(clients, REQUESTS)


async def test_a_killed_proxy_is_back_and_its_streams_went_on(started: Launch) -> None:
    """At the same port, another process; clients lost no token and got none twice, whichever way
    they asked.
    """
    url, admin_url = started.all_urls[0]
    former = pids(started)["proxy-0"]
    async with clients_of(started) as (clients, quiet):
        ways = [Way.CONTINUE, Way.REPLAY] * (REQUESTS // 2)
        reading = [
            asyncio.create_task(clients.read(n, way, f"killed-{n}", proxy=0))
            for n, way in enumerate(ways)
        ]
        async with asyncio.timeout(END_S):
            while (
                sum(
                    row["output_tokens"] > 10
                    for row in (await asyncio.to_thread(state_of, admin_url))["streams"]
                )
                < REQUESTS
            ):
                await asyncio.sleep(0.02)

        os.kill(former, signal.SIGKILL)
        found = await asyncio.gather(*reading)

    assert is_exact(verdict(found, quiet)), verdict(found, quiet)
    assert all(had.breaks for had in found)
    assert until_answers(url) == "ok\n"
    now = pids(started)["proxy-0"]
    assert now != former
    started.wait_for_output(f"proxy-0 ended and was restarted, as process {now}")


def until_answers(url: str) -> str:
    deadline_s = time.monotonic() + END_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=END_S) as answer:
                return str(answer.read().decode())
        except OSError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@pytest.mark.nightly
def test_each_proxy_writes_its_own_event_log(
    started: Launch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two logs in one file could not be read."""
    directory = started.directory

    assert sorted(path.name for path in directory.glob("events*.jsonl")) == [
        "events-proxy-0.jsonl",
        "events-proxy-1.jsonl",
    ]


@pytest.mark.nightly
def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path, tiny_llama: str) -> None:
    """Nor of the proxies that it would bring back: not one of their processes."""
    options = ("--model", tiny_llama, "--nodes", "1", "--proxies", "3")
    launch = Launch(tmp_path, *options, forked=True)
    launch.wait_for_output("Ctrl-C ends it")
    directory, started = launch.run_directory, pids(launch)

    launch.process.kill()
    launch.process.wait()

    until(lambda: not directory.exists() and not list(members(directory)))
    assert {name[0] for name in started} == {"p", "d", "a"}
    assert not [name for name, pid in started.items() if is_running(pid)]
    for url, _ in launch.all_urls:
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/healthz", timeout=1)


@pytest.mark.nightly
def test_a_port_of_the_second_proxy_that_is_in_use_is_named(tmp_path: Path) -> None:
    """The second proxy's ports are checked like those of the first, before anything starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        launch = Launch(tmp_path, "--proxies", "2", "--port", str(port - 10), forked=True)

        assert launch.process.wait(END_S) == 2
    assert f"proxy-1: port: 127.0.0.1:{port} is in use" in launch.output
    assert "logs are in" not in launch.output
