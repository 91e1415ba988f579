"""The main job as a user runs it: real processes, a real SIGKILL, the unmodified `openai` and
`anthropic` clients, and nothing left behind.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest

from kvrs_lab.cluster.guard import members
from kvrs_testkit.forked import starts_forked
from kvrs_testkit.free_ports import free_ports
from tests.cluster.launches import is_running

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("systems")]

KVRS = [sys.executable, "-m", "kvrs"]
START_S = 180.0
END_S = 90.0


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
    """The first true value of `condition`; errors of a server that is not there yet count as
    false.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def nursery_of(up: "UpCluster") -> int:
    """The process that has forked all instances, with the same command and parent."""
    instances = [row["pid"] for row in up.state()["instances"]]
    process = psutil.Process(instances[0])
    (nursery,) = (
        each
        for each in process.parent().children()
        if each.pid not in instances and each.cmdline()[:-1] == process.cmdline()[:-1]
    )
    return int(nursery.pid)


class UpCluster:
    """`kvrs lab up` in a process of its own, with the run directory that its processes share."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self.port, self.admin_port = free_ports(2)
        ports = ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        self.log = tmp_path / "up.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*KVRS, "lab", "up", *ports, *arguments], stdout=log, stderr=log
            )

    def wait(self) -> None:
        wait_until(
            lambda: self.process.poll() is not None or b"kvrs is up" in self.log.read_bytes(),
            "kvrs lab up reports that it is up",
        )
        assert self.process.poll() is None, self.log.read_text()
        (run_directory,) = re.findall(r"logs are in (\S+)", self.log.read_text())
        self.run_directory = Path(run_directory)

    def state(self) -> Any:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.admin_port}/kvrs/v1/state", timeout=120
        ) as answer:
            return json.load(answer)

    def instance(self, name: str) -> Any:
        return next(row for row in self.state()["instances"] if row["id"] == name)

    def successor(self, row: Any) -> Any:
        """The row of the instance once a later process of it serves."""
        return wait_until(
            lambda: (
                (now := self.instance(row["id"]))["health"] == "up"
                and now["pid"] != row["pid"]
                and now
            ),
            f"{row['id']} is up again",
        )

    def assert_nothing_left(self, pids: set[int]) -> None:
        wait_until(lambda: not self.run_directory.exists(), "the run directory is gone", END_S)
        assert not list(members(self.run_directory))
        assert not {pid for pid in pids if is_running(pid)}


@pytest.fixture
def up(tmp_path: Path, tiny_llama: str) -> Iterator[UpCluster]:
    cluster = UpCluster(tmp_path, "--model", tiny_llama)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.process.send_signal(signal.SIGINT)
        cluster.process.wait(END_S)


def abandoned_memory() -> set[str]:
    """Names in /dev/shm that no process maps: other programs on the machine map their own."""
    names = {str(path) for path in Path("/dev/shm").iterdir()}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            names -= {each.path for each in process.memory_maps()}
    return names


def test_demo_survives_two_kills_and_proves_it(tmp_path: Path) -> None:
    """One command starts everything, kills an instance and a node under load, compares every token
    with a clean run, and says why each option was chosen.
    """
    before = abandoned_memory()

    done = subprocess.run(
        [*KVRS, "lab", "demo", "--requests", "40", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["streams"], report["completed"], report["errors"]) == (40, 40, 0)
    assert (report["tokens_lost"], report["tokens_repeated"], report["tokens_different"]) == (
        0,
        0,
        0,
    )
    assert sum(report["recoveries"].values()) >= 8
    assert report["faults"][0]["inflight"] >= 8
    assert all(fault["notice_s"] > 0 for fault in report["faults"])
    assert [fault["whom"] for fault in report["faults"]] == ["d0", "n1"]
    assert {line.split(": ")[0] for line in report["choices"]} == {"kill d0", "kill n1"}
    assert report["machine"]["pace"]["decodes"] > 0
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    # A program beside this test may have made memory that it is about to map.
    wait_until(lambda: abandoned_memory() <= before, "no shared memory is left", END_S)


def test_up_serves_the_openai_client_through_a_kill_and_ends_clean(up: UpCluster) -> None:
    """A killed instance leaves `up` at once, the nursery forks its successor with a higher epoch,
    and the client sees every token once. Without the nursery it returns as well.
    """
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{up.port}/v1", api_key="unused", max_retries=0
    )
    model = client.models.list().data[0].id
    ask: dict[str, Any] = {
        "model": model,
        "prompt": "ka lo mi ren sta",
        "max_tokens": 1000,  # So many that the stream runs when it is looked for.
        "temperature": 0.8,
        "seed": 7,
    }
    expected = client.completions.create(**ask)

    text, victim = "", None
    for chunk in client.completions.create(**ask, stream=True):
        text += chunk.choices[0].text
        if victim is None and len(text) > 40:
            (stream,) = up.state()["streams"]
            victim = up.instance(stream["decode"])
            nursery = nursery_of(up)
            os.kill(victim["pid"], signal.SIGKILL)

    assert victim is not None
    assert text == expected.choices[0].text
    assert [recovery["outcome"] for recovery in up.state()["recoveries"]] == ["resumed"]
    back = up.successor(victim)
    assert back["epoch"] > victim["epoch"]
    assert nursery_of(up) == nursery
    os.kill(nursery, signal.SIGKILL)
    os.kill(back["pid"], signal.SIGKILL)
    up.successor(back)
    assert nursery_of(up) != nursery
    assert up.state()["proxies"][0]["url"].endswith(f":{up.port}")
    # The preset best: every node keeps checkpoints.
    assert [row["health"] for row in up.state()["agents"]] == ["up", "up"]

    pids = {row["pid"] for row in up.state()["instances"]} | {up.state()["proxies"][0]["pid"]}
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(END_S) == 0
    up.assert_nothing_left(pids)


def test_up_serves_the_anthropic_client_through_a_kill(up: UpCluster) -> None:
    """A message is the same with a killed instance, and its events are whole."""
    client = anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{up.port}", api_key="unused", max_retries=0
    )
    ask: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "ka lo mi ren sta"}],
        "max_tokens": 1000,  # So many that the stream runs when it is looked for.
        "extra_body": {"temperature": 0.8, "seed": 7, "ignore_eos": True},
    }
    expected = client.messages.create(**ask)

    victim = None
    with client.messages.stream(**ask) as stream:
        for text in stream.text_stream:
            if victim is None and text:
                (row,) = up.state()["streams"]
                victim = up.instance(row["decode"])
                os.kill(victim["pid"], signal.SIGKILL)
        message = stream.get_final_message()

    assert victim is not None
    assert message.content[0].text == expected.content[0].text  # type: ignore[union-attr]
    assert message.stop_reason == expected.stop_reason
    assert message.usage.output_tokens == expected.usage.output_tokens
    assert [recovery["outcome"] for recovery in up.state()["recoveries"]] == ["resumed"]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            "proxy: {port: 99999}",
            r"proxy\.port: got 99999; input should be less than or equal to 65535",
        ),
        ("policy: {nmae: rom}", r"policy\.nmae: unknown key; allowed: .*name"),
        ("proxy: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_starts_nothing(tmp_path: Path, document: str, expected: str) -> None:
    """Every command that reads a configuration refuses it with status 2 and names what is wrong."""
    path = tmp_path / "kvrs.yaml"
    path.write_text(document)

    for command in (
        ["config", "check", str(path)],
        ["lab", "up", "--config", str(path)],
        ["proxy", "--config", str(path)],
    ):
        with starts_forked():
            done = subprocess.run(
                [*KVRS, *command], capture_output=True, text=True, check=False, timeout=120
            )

        assert done.returncode == 2
        assert re.search(expected, done.stderr), done.stderr


def test_a_port_in_use_is_named_and_nothing_starts(tmp_path: Path) -> None:
    """The launcher looks at every port before it starts the first process."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = subprocess.run(
            [*KVRS, "lab", "up", "--port", str(port)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )

    assert done.returncode == 2
    assert f"proxy.port: 127.0.0.1:{port} is in use" in done.stderr
    assert not list(tmp_path.glob("kvrs-*"))
