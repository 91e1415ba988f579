"""The keeper of a node on a machine of a Ray cluster, without Ray."""

import os
import secrets
import signal
from pathlib import Path

import pytest

from kvrs.cluster.exits import Exit
from kvrs.cluster.node_keeper import NodeKeeper, mark_of
from kvrs.config.file import ENV_NAME, dump_config, parse_config
from kvrs.ids import InstanceId, NodeId
from kvrs_testkit.free_ports import free_ports
from tests.cluster.launches import until

pytestmark = pytest.mark.process


def test_a_machine_with_another_secret_starts_nothing_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its directory goes too, as after any other end."""
    monkeypatch.setenv(ENV_NAME, secrets.token_hex(32))
    nodes = [{"id": "n0", "instances": [{"id": "b0", "role": "both", "port": 1, "page_port": 2}]}]
    document = dump_config(parse_config({"cluster": {"nodes": nodes}}))
    keeper = NodeKeeper(NodeId("n0"))
    path = keeper._run.path

    fault = keeper.start(document, 0, "the mark of another secret")
    keeper.stop()

    assert fault == "the secret there is another one; allowed: the same at all machines"
    assert keeper.status() == {}
    assert not path.exists()


@pytest.mark.network
def test_the_end_of_a_process_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher waits for it at another machine, and tells the proxies."""
    secret = secrets.token_hex(32)
    monkeypatch.setenv(ENV_NAME, secret)
    port, page_port = free_ports(2)
    instance = {"id": "b0", "role": "both", "port": port, "page_port": page_port}
    nodes = [{"id": "n0", "instances": [instance]}]
    document = dump_config(parse_config({"cluster": {"nodes": nodes, "engine": {"pages": 128}}}))
    keeper = NodeKeeper(NodeId("n0"))
    try:
        assert keeper.start(document, 3, mark_of(secret.encode())) is None
        until(lambda: keeper.status()[InstanceId("b0")].has_served)
        ((nursery, _),) = keeper._keepers._nurseries
        assert nursery._process is not None
        (served,) = _children(nursery._process.pid)

        os.kill(served, signal.SIGKILL)
        first = keeper.next_exit()
    finally:
        keeper.stop()

    assert first == Exit(InstanceId("b0"), 4, "SIGKILL", is_external=True)
    assert keeper.next_exit() is None


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = entry.joinpath("stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found
