"""`kvrs lab up` with `models`: real instances of two models behind one proxy, one of which dies."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from tests.cluster.launches import END_S, Launch, ask, is_running, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]


BACKUP = {"mode": "local", "capacity_bytes": 8 << 20}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Two tiny models with different weights, each at one instance of both roles, with an agent
    and gossip.
    """
    directory = tmp_path_factory.mktemp("models")
    entries = [
        {
            "name": name,
            "cluster": {
                "engine": {"seed": seed},
                "nodes": [{"id": f"n{seed}", "instances": [{"id": f"b{seed}", "role": "both"}]}],
            },
        }
        for seed, name in enumerate(("one", "org/two"))
    ]
    config = directory / "config.yaml"
    document = {"gossip": {"enabled": True}, "backup": BACKUP, "models": entries}
    config.write_text(yaml.safe_dump(document))
    launch = Launch(directory, "--config", str(config), forked=True)
    try:
        launch.wait_for_output("Ctrl-C ends it")
        yield launch
    finally:
        launch.process.terminate()
        launch.process.wait(END_S)


def admin_urls(launch: Launch) -> dict[str, str]:
    """By model."""
    return dict(zip(("one", "org/two"), (admin for _, admin in launch.all_urls), strict=True))


async def stream(
    url: str, http: aiohttp.ClientSession, model: str, tokens: int, begun: asyncio.Event
) -> str:
    """The text of an answer; `begun` is set after some of it."""
    asked = {"model": model, "prompt": "Tell me", "max_tokens": tokens, "temperature": 0}
    text = ""
    async with http.post(
        f"{url}/v1/completions", json=asked | {"stream": True, "ignore_eos": True}
    ) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data: "))
                text += event["choices"][0]["text"]
                if len(text) > 20:
                    begun.set()
    return text


async def test_a_death_in_one_model_leaves_both_exact(started: Launch) -> None:
    """The streams of its model wait for the instance to be back; those of the other one do not
    hear of it.
    """
    (url, _), admins = started.urls, admin_urls(started)
    async with aiohttp.ClientSession() as http:
        quiet = {name: await stream(url, http, name, 200, asyncio.Event()) for name in admins}
        assert len(set(quiet.values())) == 2
        begun = {name: asyncio.Event() for name in admins}
        running = {
            name: asyncio.create_task(stream(url, http, name, 200, begun[name])) for name in admins
        }
        for event in begun.values():
            await event.wait()
        state = await asyncio.to_thread(ask, "GET", f"{admins['org/two']}/kvrs/v1/state")
        (instance,) = state["instances"]
        os.kill(instance["pid"], signal.SIGKILL)

        for name, task in running.items():
            assert await task == quiet[name]
    states = {name: ask("GET", f"{each}/kvrs/v1/state") for name, each in admins.items()}
    assert [len(state["recoveries"]) for state in states.values()] == [0, 1]
    assert [state["instances"][0]["id"] for state in states.values()] == ["b0", "b1"]


def test_agents_and_members_are_those_of_their_model(started: Launch) -> None:
    """Each model's proxy is a member among its own agents, which hold pages of one model."""

    def members() -> list[set[tuple[str, str]]] | None:
        found = [ask("GET", f"{each}/kvrs/v1/state") for each in admin_urls(started).values()]
        agents = [[(row["id"], row["health"]) for row in state["agents"]] for state in found]
        assert agents == [[("agent-n0", "up")], [("agent-n1", "up")]]
        now = [{(row["id"], row["status"]) for row in state["members"]} for state in found]
        return now if all(len(each) > 1 for each in now) else None

    assert until(members) == [
        {("n0", "alive"), ("proxy-0-one", "alive")},
        {("n1", "alive"), ("proxy-0-org-two", "alive")},
    ]


def test_all_processes_are_restarted_and_end(started: Launch) -> None:
    """The proxy once, and the instances of every model."""

    def pids() -> list[int]:
        states = [ask("GET", f"{each}/kvrs/v1/state") for each in admin_urls(started).values()]
        kinds = ("instances", "agents", "proxies")
        return [row["pid"] for state in states for kind in kinds for row in state[kind]]

    former = pids()
    os.kill(started.process.pid, signal.SIGUSR1)
    started.wait_for_output("all processes were restarted")
    assert started.output.count("proxy-0 is up again") == 1
    later = pids()
    assert not {*former} & {*later}
    assert later[2] == later[5]  # One process of the proxy.

    started.process.terminate()
    assert started.process.wait(END_S) == 0
    until(lambda: not any(map(is_running, later)))
    directories = [line.split()[3] for line in started.output.splitlines() if "logs are in" in line]
    assert len(directories) == 2
    until(lambda: not any(Path(each).exists() for each in directories))
