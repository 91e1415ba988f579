"""The supervision of a node on a machine of a Ray cluster, without Ray."""

import os
import pickle
import secrets
import signal

import pytest

from kvrs.config.file import ENV_NAME, parse_config
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import ExitReport
from kvrs_lab.cluster.remote import NodeSupervisor, mark_of
from kvrs_testkit.free_ports import free_ports
from tests.cluster.launches import until

pytestmark = pytest.mark.process


def test_a_machine_with_another_secret_starts_nothing_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its directory goes too, as after any other end."""
    monkeypatch.setenv(ENV_NAME, secrets.token_hex(32))
    nodes = [{"id": "n0", "instances": [{"id": "b0", "role": "both", "port": 1, "page_port": 2}]}]
    config = parse_config({"cluster": {"nodes": nodes}})
    node = NodeSupervisor(NodeId("n0"))
    path = node._run.path

    fault = node.begin(config, 0, "the mark of another secret")
    node.stop()

    assert fault == "the secret there is another one; allowed: the same at all machines"
    assert node.status() == {}
    assert not path.exists()


@pytest.mark.network
def test_the_end_of_a_process_is_told_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: str
) -> None:
    """The launcher waits for it at another machine, and tells the proxies."""
    secret = secrets.token_hex(32)
    monkeypatch.setenv(ENV_NAME, secret)
    port, page_port = free_ports(2)
    instance = {"id": "b0", "role": "both", "port": port, "page_port": page_port}
    nodes = [{"id": "n0", "instances": [instance]}]
    cluster = {"model": tiny_llama, "nodes": nodes, "engine": {"pages": 128}}
    config = parse_config({"cluster": cluster})
    # Ray sends it to the machine.
    config = pickle.loads(pickle.dumps(config))
    node = NodeSupervisor(NodeId("n0"))
    try:
        assert node.begin(config, 3, mark_of(secret.encode())) is None
        until(lambda: node.status()[InstanceId("b0")].has_served)
        served = node._supervised[InstanceId("b0")]._process
        assert served is not None

        os.kill(served.pid, signal.SIGKILL)
        first = node.next_exit()
    finally:
        node.stop()

    assert first == (InstanceId("b0"), ExitReport(4, "SIGKILL", is_external=True))
    assert node.next_exit() is None
