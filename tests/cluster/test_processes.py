"""The processes of a configuration, and which of them a fault hits."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrs.config.cluster import demo_nodes
from kvrs.config.distserve import HOME_ENV, check_home
from kvrs.config.file import Config, parse_config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs_lab.cluster import supervised
from kvrs_lab.cluster.processes import LaunchError, gpus_of, processes_of
from kvrs_lab.cluster.supervised import ProcessStatus, wait_ready
from kvrs_lab.cluster.victims import FaultError, open_processes

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]


def distserve(**document: Any) -> Config:
    cluster = {"backend": "distserve", "distserve": {"flags": document.pop("flags", [])}}
    return parse_config({"cluster": cluster | document.pop("cluster", {})} | document)


def test_a_node_of_distserve_is_one_server() -> None:
    """Both instances are in it; agents are the same with every backend."""
    config = distserve(backup={"mode": "both"})

    assert [(process.name, process.label) for process in processes_of(config)] == [
        ("server-n0", "DistServe on node n0"),
        ("server-n1", "DistServe on node n1"),
        ("agent-n0", "agent-n0"),
        ("agent-n1", "agent-n1"),
    ]


def test_the_embedded_engine_has_a_process_for_each_instance() -> None:
    """And asks Ray for no GPU of its own."""
    config = parse_config({})

    assert [process.name for process in processes_of(config)] == ["p0", "d0", "p1", "d1"]
    assert gpus_of(config) is None


def test_there_are_as_many_logical_gpus_as_workers() -> None:
    """By DistServe's own flags, which count for every node."""
    flags = [
        "--decoding-tensor-parallel-size",
        "2",
        "--context-pipeline-parallel-size=3",
        "--block-size",
        "32",
    ]

    assert gpus_of(distserve()) == 2 * (1 + 1)
    assert gpus_of(distserve(flags=flags)) == 2 * (3 + 2)
    assert gpus_of(distserve(cluster={"engine": {"device": "cuda"}})) is None
    with pytest.raises(
        ConfigError, match=r"cluster\.distserve\.flags: argument --decoding-tensor-parallel-size"
    ):
        gpus_of(distserve(flags=["--decoding-tensor-parallel-size", "two"]))


def test_a_checkout_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{HOME_ENV}: not set; allowed: a checkout"):
        check_home(distserve(), {})
    with pytest.raises(ConfigError, match=rf"^{HOME_ENV}: {tmp_path} has no"):
        check_home(distserve(), {HOME_ENV: str(tmp_path)})

    check_home(parse_config({}), {})
    (tmp_path / "distserve").mkdir()
    (tmp_path / "distserve" / "llm.py").touch()
    check_home(distserve(), {HOME_ENV: str(tmp_path)})


@pytest.fixture
def row() -> Iterator[dict[str, Any]]:
    """An instance as the state lists it, that is this process; without workers yet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield {"id": "d0", "role": "decode", "url": url, "pid": os.getpid(), "worker_pids": []}


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes with the name that Ray gives its workers."""
    started = [
        subprocess.Popen(["ray::PageWorker", "60"], executable="/bin/sleep") for _ in range(3)
    ]
    yield started
    for process in started:
        process.kill()
        process.wait()


def hit(handles: list[int]) -> None:
    for handle in handles:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def test_an_instance_with_workers_loses_them_and_not_its_server(
    row: dict[str, Any], workers: list[subprocess.Popen[bytes]]
) -> None:
    """The server is the other stage's, too."""
    row["worker_pids"] = [process.pid for process in workers]

    hit(open_processes(row))

    assert [process.wait(60) for process in workers] == [-signal.SIGKILL] * 3


def test_only_so_many_workers_are_hit(
    row: dict[str, Any], workers: list[subprocess.Popen[bytes]]
) -> None:
    """The death of one rank is enough to end a stage."""
    row["worker_pids"] = [process.pid for process in workers]

    hit(open_processes(row, workers=1))

    assert workers[0].wait(60) == -signal.SIGKILL
    assert [process.poll() for process in workers[1:]] == [None, None]
    with pytest.raises(FaultError, match="has 3 worker processes"):
        open_processes(row, workers=4)


def test_a_whole_node_loses_the_server_too(
    row: dict[str, Any], workers: list[subprocess.Popen[bytes]]
) -> None:
    """Its handle comes beside those of the workers."""
    row["worker_pids"] = [workers[0].pid]

    handles = open_processes(row, server_too=True)

    assert len(handles) == 2
    for handle in handles:
        os.close(handle)


def test_a_process_that_is_no_worker_of_ray_is_not_hit(row: dict[str, Any]) -> None:
    """It may be another process by now. No handle stays open."""
    row["worker_pids"] = [os.getppid()]
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(FaultError, match="no worker of Ray"):
        open_processes(row)

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_start_that_takes_too_long_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Now and then while it lasts, and at its end with the setting."""
    now_s, said = 0.0, list[str]()

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(supervised, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    nodes = [node.model_dump(mode="json") for node in demo_nodes(1)]
    config = parse_config({"cluster": {"nodes": nodes}})
    processes = {
        one.name: msgspec.structs.replace(one, start_timeout_s=25.0) for one in processes_of(config)
    }

    def status() -> dict[InstanceId, ProcessStatus]:
        return {name: ProcessStatus(1, served=int(name == "p0")) for name in processes}

    with pytest.raises(LaunchError) as raised:
        wait_ready(processes, status, lambda name: f"log of {name}", said.append)

    assert str(raised.value) == ("instance d0 did not start within 25 s\nlog of d0")
    waiting = [f"waiting for instance d0: {passed} s of 25 s" for passed in (10, 20)]
    assert said == ["instance p0 is up", *waiting]
