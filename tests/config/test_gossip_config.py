from typing import Any

import pytest

from kvrs.config.across_sections import gossip_seeds
from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs.ids import NodeId
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_lab.cluster.processes import Kind, processes_of

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

    assert gossip_seeds(config.cluster, config.proxy, NodeId("n0")) == {"n1": "127.0.0.1:7001"}
    assert gossip_seeds(config.cluster, config.proxy, NodeId("proxy-0")) == {
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
            {"proxy": {"gossip_host": "0.0.0.0"}},
            "gossip: the host of 'proxy-0' is '0.0.0.0'; allowed: an address or a name at which "
            "the other members reach it (proxy.gossip_host; of an agent host, beside bind)",
        ),
        (
            {"proxy": {"gossip_host": "::1"}},
            "gossip: the host of 'n1' is '127.0.0.1', and the host of 'proxy-0' is '::1'; allowed: "
            "IPv4 or IPv6, the same for all",
        ),
        (
            {
                "cluster": {
                    "nodes": [
                        {
                            "id": "n0",
                            "instances": [{"id": "b0", "role": "both"}],
                            "agent": {"bind": "::", "gossip_port": 7000},
                        }
                    ]
                }
            },
            "gossip: 'n0' is at '127.0.0.1' and bound at '::'; allowed: both IPv4, or both IPv6",
        ),
        (
            {"proxy": {"gossip_host": "10.0.0.1"}},
            "gossip: the host of 'n1' is '127.0.0.1', and the host of 'proxy-0' is '10.0.0.1'; "
            "allowed: addresses at which the members reach each other (gossip_host)",
        ),
        ({"proxy": {"gossip_port": 8000}}, "port 127.0.0.1:8000 is used 2 times; allowed: once"),
    ],
)
def test_members_have_names_and_addresses_that_the_others_reach(
    changes: dict[str, Any], fault: str
) -> None:
    """Only with gossip: other configurations need no change."""
    with pytest.raises(ConfigError) as caught:
        parse_config({"gossip": {"enabled": True}} | changes)
    parse_config(changes)

    assert caught.value.faults == [fault]


def test_members_may_be_named_and_listen_elsewhere() -> None:
    """A pod is reached by its name in a headless service, and binds every address it has."""
    agent = {"host": "n0.agents", "bind": "0.0.0.0", "gossip_port": 7000}
    nodes = [{"id": "n0", "instances": [{"id": "b0", "role": "both"}], "agent": agent}]
    proxy = {"gossip_host": "kvrs-0.peers", "gossip_port": 7001}

    config = parse_config(ON | {"cluster": {"nodes": nodes}, "proxy": proxy})

    (node,) = config.cluster.nodes
    assert node.agent.bound(node.agent.host) == "0.0.0.0"
    seeds = [gossip_seeds(config.cluster, config.proxy, NodeId(me)) for me in ("n0", "proxy-0")]
    assert seeds == [{"proxy-0": "kvrs-0.peers:7001"}, {"n0": "n0.agents:7000"}]
