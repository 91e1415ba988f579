"""The keeper of a node on a machine of a Ray cluster, without Ray."""

import secrets

import pytest

from kvrs.cluster.node_keeper import NodeKeeper
from kvrs.config.file import ENV_NAME, dump_config, parse_config
from kvrs.ids import NodeId

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
