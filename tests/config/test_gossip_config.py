from typing import Any

import pytest

from kvrs.cluster.ports import resolve_ports
from kvrs.cluster.processes import Kind, processes_of
from kvrs.config.file import gossip_seeds, parse_config
from kvrs.errors import ConfigError
from kvrs.ids import NodeId

ON: dict[str, Any] = {"gossip": {"enabled": True}, "proxy": {"port": 0, "admin_port": 0}}


@pytest.mark.network
def test_with_gossip_every_node_has_an_agent_and_every_member_a_port() -> None:
    """Also without checkpoints; without gossip everything is as before."""
    off, on = (resolve_ports(parse_config(document)) for document in (ON | {"gossip": {}}, ON))

    agents = [process.name for process in processes_of(on) if process.kind is Kind.AGENT]
    ports = [on.proxy.gossip_port, *(node.agent.gossip_port for node in on.cluster.nodes)]
    assert agents == ["agent-n0", "agent-n1"]
    assert all(ports)
    assert len(set(ports)) == 3
    assert [process for process in processes_of(off) if process.kind is Kind.AGENT] == []
    assert [off.proxy.gossip_port, *(node.agent.gossip_port for node in off.cluster.nodes)] == [
        0,
        0,
        0,
    ]


def test_every_member_of_the_file_is_a_seed_for_the_others() -> None:
    """Except members with an unknown port: they contact the others."""
    nodes = [
        {
            "id": f"n{number}",
            "instances": [{"id": f"b{number}", "role": "both"}],
            "agent": {"gossip_port": port},
        }
        for number, port in enumerate((7000, 7001))
    ]
    config = parse_config(ON | {"cluster": {"nodes": nodes}})

    assert gossip_seeds(config, NodeId("n0")) == {"n1": "127.0.0.1:7001"}
    assert gossip_seeds(config, NodeId("proxy-0")) == {
        "n0": "127.0.0.1:7000",
        "n1": "127.0.0.1:7001",
    }


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"proxy": {"id": "n0"}},
            "proxy.id: 'n0' is the id of a node too; allowed with gossip: a name of its own",
        ),
        (
            {"proxy": {"gossip_host": "localhost"}},
            "gossip: the host of 'proxy-0' is 'localhost'; allowed: a numeric address",
        ),
        (
            {"proxy": {"gossip_host": "0.0.0.0"}},
            "gossip: the host of 'proxy-0' is '0.0.0.0'; allowed: an address at which the other "
            "members reach it",
        ),
        (
            {"proxy": {"gossip_host": "10.0.0.1"}},
            "gossip: the host of 'n1' is '127.0.0.1', and the host of 'proxy-0' is '10.0.0.1'; "
            "allowed: addresses at which the members reach each other (gossip_host)",
        ),
        ({"proxy": {"gossip_port": 8000}}, "port 127.0.0.1:8000 is used 2 times; allowed: once"),
    ],
)
def test_members_have_names_and_numeric_addresses_of_their_own(
    changes: dict[str, Any], fault: str
) -> None:
    """Only with gossip: other configurations need no change."""
    with pytest.raises(ConfigError) as caught:
        parse_config({"gossip": {"enabled": True}} | changes)
    parse_config(changes)

    assert caught.value.faults == [fault]
