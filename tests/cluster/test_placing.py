"""Nodes of a configuration on machines of Ray."""

from typing import Any

import pytest

from kvrs.config.file import Config, parse_config
from kvrs.ids import NodeId
from kvrs_lab.cluster.placing import Machine, faults_of_ray, faults_without_ray, moved, place

A, B = (Machine(f"id-{n}", f"10.0.0.{n}", {"big": 1.0}) for n in (1, 2))
A0, B0, C0 = NodeId("a"), NodeId("b"), NodeId("c")


def config(*nodes: dict[str, Any], **sections: Any) -> Config:
    made = []
    for number, node in enumerate(nodes):
        host = {"host": node["host"]} if "host" in node else {}
        ports = {"port": 8100 + number, "page_port": 8200 + number}
        instance = {"id": f"i{number}", "role": "both", **ports, **host}
        made.append(
            {"id": "abc"[number], "instances": [instance], "agent": host}
            | {key: value for key, value in node.items() if key == "ray"}
        )
    return parse_config({"cluster": {"nodes": made}} | sections)


BIG = {"ray": "big"}


def test_a_node_lies_at_its_address_or_where_its_resource_is_left() -> None:
    nodes = config({"host": "10.0.0.2"}, BIG, BIG).cluster.nodes

    assert place(nodes, [A, B], {}) == {A0: B, B0: A, C0: B}
    assert place(nodes, [A], {}) == {B0: A}
    assert place(nodes, [A], {B0: A}) == {}


def test_a_node_whose_machine_died_goes_where_it_may() -> None:
    """One by address waits for its machine, which has another id then."""
    nodes = config({"host": "10.0.0.2"}, BIG).cluster.nodes
    again = Machine("id-3", B.address, {})

    assert place(nodes, [A], {B0: A}) == {}
    assert place(nodes, [A], {}) == {B0: A}
    assert place(nodes, [A, again], {B0: A}) == {A0: again}


def test_all_ports_of_a_node_are_at_its_machine() -> None:
    found = moved(config({"host": "10.0.0.2"}, BIG), {A0: B, B0: A}).cluster.nodes

    assert [(node.instances[0].host, node.agent.host) for node in found] == [
        (B.address, B.address),
        (A.address, A.address),
    ]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (config(BIG, cluster={"engine": {"device": "cuda"}}), "'embedded' on 'cpu'"),
        (config(BIG, gossip={"enabled": True}), "agent of node a: port is 0"),
        (parse_config({}), "instance p0: page_port is 0"),
    ],
    ids=["device", "ports of agents", "ports of instances"],
)
def test_what_cannot_run_there_is_said_before_anything_starts(made: Config, says: str) -> None:
    assert says in "\n".join(faults_of_ray(made))


def test_a_resource_of_ray_needs_ray() -> None:
    """The node would be looked for at its default address."""
    assert "allowed: with --ray" in "\n".join(faults_without_ray(config(BIG)))
    assert [*faults_without_ray(config({}))] == []
