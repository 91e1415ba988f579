"""`kvrs lab up --backend distserve`: two real servers behind the proxy, and deaths of several kinds
in the middle of a stream.
"""

import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.distserve import HOME_ENV
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.victims import closing_process, open_processes
from tests.cluster.launches import Launch

pytestmark = [
    pytest.mark.distserve,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

# Only ends what hangs: each of the servers loads torch three times.
PATIENCE_S = 400.0
PROMPT = [(11 * i) % 500 + 4 for i in range(50)]
TOKENS = 400


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    if HOME_ENV not in os.environ:
        pytest.skip(f"{HOME_ENV} is not set; it names a checkout of DistServe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        launch = Launch(tmp_path_factory.mktemp("up"), "--backend", "distserve")
    yield launch
    launch.process.kill()
    launch.process.wait()


@pytest.fixture(scope="module")
def undisturbed(up: Launch) -> list[int]:
    up.wait_for_output("kvrs is up", PATIENCE_S)
    return [token for event in stream(up) for token in ids_of(event)]


def stream(up: Launch) -> Iterator[Any]:
    body = {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(f"{up.urls[0]}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def ids_of(event: Any) -> list[int]:
    assert "error" not in event, event
    return [token for choice in event["choices"] for token in choice["token_ids"]]


def state(up: Launch) -> Any:
    with urllib.request.urlopen(f"{up.urls[1]}/kvrs/v1/state", timeout=10) as answer:
        return json.load(answer)


def wait_all_up(up: Launch) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not all(row["health"] == "up" for row in state(up)["instances"]):
        assert time.monotonic() < give_up_s, state(up)["instances"]
        time.sleep(0.1)


@pytest.mark.parametrize("victim", ["decode stage", "prefill stage", "node"])
def test_a_stream_survives_the_death(up: Launch, undisturbed: list[int], victim: str) -> None:
    """Token by token as undisturbed; and all processes restart by themselves."""
    wait_all_up(up)
    events = stream(up)
    got = [token for _ in range(40) for token in ids_of(next(events))]
    (only,) = state(up)["streams"]
    instances = rows_of(state(up))
    decode = instances[only["decode"]]
    prefill = next(
        each
        for each in instances.values()
        if each["node"] == decode["node"] and each["role"] == "prefill"
    )
    victims = {"decode stage": [decode], "prefill stage": [prefill], "node": [prefill, decode]}[
        victim
    ]
    handles = [
        handle for row in victims for handle in open_processes(row, server_too=victim == "node")
    ]

    for handle in handles:
        # Both rows of a node name its server.
        with contextlib.suppress(ProcessLookupError), closing_process(handle):
            signal.pidfd_send_signal(handle, signal.SIGKILL)

    got += [token for event in events for token in ids_of(event)]
    assert got == undisturbed
    recovered = [entry for entry in state(up)["recoveries"] if entry["stream"] == only["id"]]
    assert bool(recovered) == (victim != "prefill stage")
    wait_all_up(up)
    assert all(rows_of(state(up))[row["id"]]["epoch"] > row["epoch"] for row in victims)


def test_it_ends_clean_by_signal(up: Launch, undisturbed: list[int]) -> None:
    """The last test of the module: servers, their workers and Ray are gone with it."""
    up.signal_group(signal.SIGTERM)

    assert up.process.wait(PATIENCE_S) == 0
    assert up.output.endswith("ending\n"), up.output
    up.assert_nothing_left()


def test_a_wrong_flag_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    """The reason is the server's own message, and there is no retry."""
    if HOME_ENV not in os.environ:
        pytest.skip(f"{HOME_ENV} is not set; it names a checkout of DistServe")
    config = tmp_path / "config.yaml"
    config.write_text("cluster: {backend: distserve, distserve: {flags: [--wrong-flag]}}\n")
    failing = Launch(tmp_path, "--config", str(config))

    assert failing.process.wait(PATIENCE_S) == 2

    assert "DistServe on node n" in failing.output
    assert "unrecognized arguments: --wrong-flag" in failing.output
    assert "Traceback" not in failing.output
    failing.assert_nothing_left()
