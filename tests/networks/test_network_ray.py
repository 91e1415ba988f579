"""`kvrs lab up --ray`: the nodes of a file on the machines of a Ray cluster, which share no
files.
"""

import json
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.networks.ray_on_hosts import RayOnHosts

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("networks"),
    pytest.mark.nightly,
]

WAIT_S = 240.0
PACE = "opt-13b-a100-vllm-tp1"  # About 20 ms per token: the stream lasts until the machine dies.
ASKED = {
    "prompt": [(11 * at * at + 5) % 500 + 2 for at in range(60)],
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def machines(possible: None, tmp_path: Path) -> Iterator[RayOnHosts]:
    if shutil.which("nsenter") is None:
        pytest.skip("not installed: nsenter")
    with RayOnHosts(
        tmp_path / "hosts", {"n0": "{}", "n1": '{"decoders": 1}', "n2": '{"decoders": 2}'}
    ) as running:
        yield running


def document(machines: RayOnHosts) -> dict[str, Any]:
    """Prefill at an address; decode on any machine with room, d0 on n1 and d1 on n2 at first."""
    addresses = machines.network.addresses

    def node(name: str, role: str, number: int, **at: Any) -> dict[str, Any]:
        ports = {"port": 8100 + number, "page_port": 8200 + number}
        host = {} if "ray" in at else {"host": addresses["n0"]}
        agent = {"port": 8300 + number, "page_port": 8400 + number, **host}
        instance = {"id": name, "role": role, **ports, **host}
        return {"id": f"of-{name}", "instances": [instance], "agent": agent, **at}

    return {
        "proxy": {
            "host": addresses["n0"],
            "allow_anonymous": True,
            "admin_host": addresses["n0"],
            "port": 8000,
            "admin_port": 8001,
        },
        "cluster": {
            "nodes": [
                node("p0", "prefill", 0),
                node("d0", "decode", 1, ray="decoders"),
                node("d1", "decode", 2, ray="decoders"),
            ],
            "engine": {"pages": 256, "max_model_len": 1024, "pace": PACE},
        },
        "backup": {"mode": "remote", "capacity_bytes": 1 << 24},
        "security": {"secret_file": "/tmp/secret", "admin_token_file": "/tmp/token"},
    }


def listening(machines: RayOnHosts, host: str) -> set[str]:
    """Addresses at which processes of kvrs listen there."""
    found = set()
    for pid in machines.pids(host):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"kvrs_lab.cluster.hosted" not in command:
            continue
        # Of the process's own network.
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        inodes = {
            match[1]
            for link in Path(f"/proc/{pid}/fd").iterdir()
            if (match := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink())))
        }
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                number = bytes.fromhex(fields[1].partition(":")[0])[::-1]
                found.add(".".join(map(str, number)))
    return found


class Up:
    """`kvrs lab up --ray` on n0; each machine has the secret in a file of its own."""

    def __init__(self, machines: RayOnHosts, directory: Path) -> None:
        self._machines = machines
        self._log = directory / "up.log"
        self._token, self.secret = secrets.token_hex(32), secrets.token_hex(32)
        for host in machines.network.names:
            for name, content in (("secret", self.secret), ("token", self._token)):
                path = machines.files(host) / name
                path.write_text(content)
                path.chmod(0o600)
        own = machines.files("n0") / "cluster.yaml"
        own.write_text(yaml.safe_dump(document(machines)))
        command = ["kvrs", "lab", "up", "--config", "/tmp/cluster.yaml", "--ray", machines.address]
        self.process = machines.spawn("n0", self._log, [sys.executable, "-m", *command])

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until(self, holds: Callable[[], Any]) -> Any:
        give_up_s = time.monotonic() + WAIT_S
        while not (found := holds()):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < give_up_s, self.output
            time.sleep(0.1)
        return found

    def ask(self, port: int, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if port == 8001:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        url = f"http://{self._machines.network.addresses['n0']}:{port}{path}"
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.load(answer)

    def complete(self) -> str:
        return str(self.ask(8000, "/v1/completions", ASKED)["choices"][0]["text"])

    def state(self) -> Any:
        return self.ask(8001, "/kvrs/v1/state")

    def row(self, name: str) -> Any:
        return next(each for each in self.state()["instances"] if each["id"] == name)

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(WAIT_S)


def test_the_nodes_of_a_machine_that_dies_come_back_on_another_one(
    machines: RayOnHosts, tmp_path: Path
) -> None:
    """Its stream goes on at once elsewhere with every token, and its instance serves again under
    its id. Everything listens at the address of its machine, and nothing is left on one at the end.
    """
    addresses = machines.network.addresses
    up = Up(machines, tmp_path)

    def is_decoded_by_d0() -> bool:
        return any(
            stream["decode"] == "d0" and stream["output_tokens"] > 5
            for stream in up.state()["streams"]
        )

    try:
        up.until(lambda: "kvrs is up" in up.output)
        before = {name: up.row(name) for name in ("p0", "d0", "d1")}
        heard = {host: listening(machines, host) for host in ("n1", "n2")}
        expected = up.complete()
        with ThreadPoolExecutor(2) as clients:
            asked = [clients.submit(up.complete) for _ in range(2)]
            up.until(is_decoded_by_d0)
            machines.kill("n1")
            got = [each.result() for each in asked]
        recoveries = up.state()["recoveries"]
        up.until(lambda: address_of(up.row("d0")) == addresses["n2"])
        up.until(lambda: up.row("d0")["health"] == "up")
        after, again = up.row("d0"), up.complete()
    finally:
        status = up.end()

    at = {name: address_of(row) for name, row in before.items()}
    assert at == {"p0": addresses["n0"], "d0": addresses["n1"], "d1": addresses["n2"]}
    assert heard == {host: {addresses[host]} for host in ("n1", "n2")}
    assert got == [expected, expected]
    assert {(each["from"], each["to"], each["outcome"]) for each in recoveries} == {
        ("d0", "d1", "resumed")
    }
    assert after["epoch"] > before["d0"]["epoch"]
    assert again == expected
    assert status == 0, up.output
    assert [*machines.files("n2").glob("kvrs-*")] == []
    assert listening(machines, "n2") == set()


def address_of(row: Any) -> str:
    return str(row["url"]).rpartition(":")[0].removeprefix("http://")


def test_without_a_secret_on_the_machines_nothing_starts(tmp_path: Path) -> None:
    """None travels through Ray, so none is made."""
    config = tmp_path / "cluster.yaml"
    node = {
        "id": "n0",
        "instances": [{"id": "b0", "role": "both", "port": 8100, "page_port": 8200}],
    }
    config.write_text(yaml.safe_dump({"cluster": {"nodes": [node]}}))

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvrs",
            "lab",
            "up",
            "--config",
            str(config),
            "--ray",
            "127.0.0.1:1",
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )

    assert done.returncode == 2
    assert "KVRS_SECRET" in done.stderr
