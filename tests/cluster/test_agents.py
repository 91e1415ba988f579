"""Agents of a cluster: restarted with their checkpoints, and removed with the cluster."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.launches import END_S, Launch

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def started(tmp_path: Path, memory: Path, tiny_llama: str) -> Iterator[Launch]:
    """One node with checkpoints in its own agent; a stream has been there."""
    instances = [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode"}]
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "cluster": {
                    "model": tiny_llama,
                    "nodes": [{"id": "n0", "instances": instances}],
                },
                "backup": {"mode": "local", "directory": str(memory), "capacity_bytes": 1 << 23},
                # A draining process waits for the next renewal, with which pages are released.
                "transfer": {"lease_s": 6.0},
            }
        )
    )
    launch = Launch(tmp_path, "--config", str(config), forked=True)
    try:
        launch.wait_for_output("kvrs is up")
        complete(launch)
        wait_for(launch, lambda agent: bool(agent["held_bytes"]))
        yield launch
    finally:
        launch.process.kill()
        launch.process.wait()


def complete(launch: Launch) -> None:
    body = json.dumps(
        {
            "model": "tiny-llama",
            "prompt": list(range(10, 110)),
            "max_tokens": 40,
            "ignore_eos": True,
        }
    ).encode()
    url = f"{launch.urls[0]}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=END_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 40


def agent_of(launch: Launch) -> dict[str, Any]:
    with urllib.request.urlopen(f"{launch.urls[1]}/kvrs/v1/state", timeout=END_S) as answer:
        (agent,) = json.load(answer)["agents"]
    return dict(agent)


def wait_for(launch: Launch, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline_s = time.monotonic() + END_S
    while not wanted(agent := agent_of(launch)):
        assert time.monotonic() < deadline_s, agent
        time.sleep(0.05)
    return agent


def wait_until_gone(*directories: Path) -> None:
    deadline_s = time.monotonic() + END_S
    while left := [path for path in directories if path.exists()]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def test_a_killed_agent_restarts_with_its_checkpoints(started: Launch, memory: Path) -> None:
    """It has the same address and a higher epoch, and adopts its predecessor's pages; a clean
    end removes them.
    """
    before = wait_for(started, lambda agent: agent["checkpoints"] == 0)

    os.kill(before["pid"], signal.SIGKILL)

    after = wait_for(
        started,
        lambda agent: (
            agent["health"] == "up" and agent["pid"] != before["pid"] and agent["held_bytes"]
        ),
    )
    assert after["epoch"] > before["epoch"]
    assert (after["url"], after["held_bytes"]) == (before["url"], before["held_bytes"])
    started.signal_group(signal.SIGTERM)
    assert started.process.wait(END_S) == 0
    assert list(memory.iterdir()) == []


@pytest.mark.nightly
def test_a_launcher_that_is_killed_leaves_no_shared_memory(started: Launch, memory: Path) -> None:
    """Files outlive processes; the guard knows where they lie."""
    (store,) = memory.iterdir()
    assert list(store.rglob("slab"))

    started.process.kill()

    wait_until_gone(store, started.run_directory)
    assert list(memory.iterdir()) == []
