"""A proxy is restarted, as long as that makes sense."""

import errno
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrs.config.file import Config
from kvrs.config.proxy import ProxySettings
from kvrs.net.admin import AdminError
from kvrs_lab.cluster import proxies
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.cluster.loopback_ray import LoopbackRay
from kvrs_lab.cluster.processes import LaunchError
from kvrs_lab.cluster.proxies import ProxyProcess
from kvrs_lab.cluster.run_directory import RunDirectory
from kvrs_testkit.free_ports import free_ports
from tests.cluster.launches import until

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]

SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
END_S = 60.0
TRIES = len(proxies.PAUSES_S)  # Until one that does not take a request has a fault.


def test_each_worker_of_a_proxy_has_an_admin_port() -> None:
    """News of exits go to all of them."""
    settings = ProxySettings(workers=3, admin_port=9001)

    found = ProxyProcess(settings, lambda: subprocess.Popen(["false"]), str).admins

    assert [each.url for each in found] == [
        f"http://127.0.0.1:{port}" for port in (9001, 9011, 9021)
    ]


class Spawned:
    """Starts a tiny proxy, or from some start on one that ends at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (self.port,) = free_ports(1)
        self.starts = 0
        self.good_starts = 1_000_000
        self.kept = ProxyProcess(
            ProxySettings(port=1, admin_port=self.port), self, lambda: "the last words"
        )

    def __call__(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        script = SERVE if self.starts <= self.good_starts else "raise SystemExit(3)"
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", script, str(self.port)], stdout=log, stderr=log
            )

    def requests(self) -> int:
        return (self.directory / "log").read_text().count("GET /healthz")

    def until_fault(self) -> str:
        return until(lambda: self.kept.status.fault, END_S)

    def until_served(self, former: int | None = None) -> int:
        deadline_s = time.monotonic() + END_S
        while not self.kept.status.has_served or self.kept.pid in (None, former):
            assert time.monotonic() < deadline_s
            assert self.kept.status.fault is None
            time.sleep(0.01)
        assert self.kept.pid is not None
        return self.kept.pid


@pytest.fixture
def spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawned]:
    monkeypatch.setattr(proxies, "PAUSES_S", (*[0.001] * (TRIES - 1), 5.0))
    one = Spawned(tmp_path)
    yield one
    one.kept.stop()
    one.kept.wait(END_S)


def test_a_killed_proxy_is_restarted(spawned: Spawned) -> None:
    """Any number of times: a kill is no sign of a fault of the proxy."""
    spawned.kept.start()
    former = spawned.until_served()

    for _ in range(TRIES + 1):
        until(lambda: spawned.requests() >= spawned.starts, END_S)
        assert spawned.kept.signal(signal.SIGKILL) == former
        former = spawned.until_served(former)

    assert spawned.starts == TRIES + 2


def test_a_proxy_that_never_served_is_not_tried_again(spawned: Spawned) -> None:
    """Its mistake would be the same the next time."""
    spawned.good_starts = 0

    spawned.kept.start()

    assert spawned.until_fault() == "proxy-0 ended with status 3\nthe last words"
    assert spawned.starts == 1


def test_one_that_ends_again_and_again_before_it_serves_is_given_up(spawned: Spawned) -> None:
    """With a pause before each try, and a reason in the end."""
    spawned.good_starts = 1
    spawned.kept.start()
    spawned.until_served()

    spawned.kept.signal(signal.SIGKILL)

    often = f"{TRIES} times before it took a request"
    assert spawned.until_fault() == f"proxy-0 ended with status 3, {often}\nthe last words"
    assert spawned.starts == 1 + TRIES


def test_a_stopped_proxy_has_no_successor(spawned: Spawned) -> None:
    """Otherwise a cluster could not end."""
    spawned.kept.start()
    spawned.until_served()

    spawned.kept.stop()
    spawned.kept.wait(END_S)
    spawned.kept._thread.join(END_S)

    assert spawned.starts == 1
    assert not spawned.kept._thread.is_alive()


def test_a_proxy_whose_process_cannot_be_created_is_reported(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have no process to spare; the failure must be reported and the proxy still be
    watched.
    """

    def refuse() -> subprocess.Popen[bytes]:
        raise BlockingIOError(errno.EAGAIN, "no process to spare")

    monkeypatch.setattr(spawned.kept, "_spawn", refuse)

    spawned.kept.start()

    assert "no process to spare" in spawned.until_fault()


def test_a_failing_proxy_is_restarted_from_time_to_time_while_others_serve(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that does not come back must not end the other proxies."""
    monkeypatch.setattr(proxies, "PAUSES_S", (*[0.001] * (TRIES - 1), 0.01))
    spawned.good_starts = 1
    spawned.kept.start()
    former = spawned.until_served()
    cluster, others = Cluster.__new__(Cluster), ProxyProcess(ProxySettings(), spawned, lambda: "")
    cluster.proxies = [spawned.kept, others]
    cluster._ray = LoopbackRay(Config(), RunDirectory())
    others.status.served = 1

    spawned.kept.signal(signal.SIGKILL)
    fault = spawned.until_fault()
    cluster.check()
    others.status.fault = "it ended"
    with pytest.raises(LaunchError):
        cluster.check()
    spawned.good_starts = 1_000_000
    until(lambda: spawned.kept.status.fault is None, END_S)

    assert "before it took a request" in fault
    assert spawned.kept.pid != former
    cluster.check()


@pytest.mark.parametrize(
    "broken",
    [b"HTTP", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"HTTP/1.1 200 OK\r\n\r\n{"],
)
def test_a_truncated_state_is_an_error(spawned: Spawned, broken: bytes) -> None:
    """A proxy killed while it answers truncates its state: the caller has to repeat its request."""
    cluster = Cluster.__new__(Cluster)
    cluster.proxies = [spawned.kept]
    with socket.create_server(("127.0.0.1", spawned.port)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(broken)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(AdminError, match="state"):
            cluster.state(0)
