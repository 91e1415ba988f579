"""The Ray that a cluster starts for DistServe."""

import contextlib
import os
import signal
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import ray

from kvrs.config.file import Config
from kvrs_lab.cluster.guard import members, sweep
from kvrs_lab.cluster.loopback_ray import LoopbackRay
from kvrs_lab.cluster.processes import LaunchError
from kvrs_lab.cluster.run_directory import RunDirectory

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

END_S = 60.0
RUN = """
import time
from kvrs_lab.cluster.loopback_ray import LoopbackRay
from kvrs_lab.cluster.run_directory import RunDirectory
from kvrs_lab.cluster.processes import LaunchError
from kvrs.config.file import Config

run = RunDirectory()
ray_here = LoopbackRay(Config(), run)
print(run.path, flush=True)
print(ray_here.start(), flush=True)
try:
    while True:
        ray_here.check()
        time.sleep(0.05)
except LaunchError as error:
    print(error, flush=True)
ray_here.stop()
"""


def test_ray_listens_on_loopback_only_asks_for_its_token_and_its_death_is_seen() -> None:
    """Ray runs whatever a caller sends it, as the user of the cluster."""
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as run:
        address, listening, modes, tokens, said = _watched(run)

    assert ip_address(address.rpartition(":")[0]).is_loopback
    assert listening
    assert [each for each in listening if not ip_address(each[1]).is_loopback] == []
    assert modes == {"gcs_server": "token", "raylet": "token"}
    assert [len(token) for token in tokens] == [64]
    assert "Ray's raylet ended with status -9" in said
    assert run.returncode == 0


def test_a_ray_that_does_not_start_is_a_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray raises the base class of exceptions, with a paragraph."""

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because ...")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    with pytest.raises(LaunchError, match=r"^Ray did not start: The current .*_wait_time_s=120$"):
        LoopbackRay(Config(), cast(RunDirectory, SimpleNamespace(path=tmp_path))).start()


def _watched(
    run: subprocess.Popen[str],
) -> tuple[str, set[tuple[str, str]], dict[str, str | None], set[str], str]:
    """Its address, the sockets that listen, the servers' modes and tokens, and what is said when
    the raylet was killed.
    """
    assert run.stdout is not None
    directory = Path(run.stdout.readline().strip())
    try:
        address = run.stdout.readline().strip()
        processes = [psutil.Process(pid) for pid in members(directory)]
        servers = [each for each in processes if each.name() in ("gcs_server", "raylet")]

        listening = {
            (process.name(), connection.laddr.ip.removeprefix("::ffff:"))
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        modes = {each.name(): each.environ().get("RAY_AUTH_MODE") for each in servers}
        tokens = {each.environ().get("RAY_AUTH_TOKEN", "") for each in servers}
        (raylet,) = (each.pid for each in servers if each.name() == "raylet")
        os.kill(raylet, signal.SIGKILL)
        return address, listening, modes, tokens, run.stdout.readline()
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(END_S)
        run.kill()
        sweep(directory)
