"""`kvrs lab up --pipelines`: instances of one group, with a node for each stage."""

from pathlib import Path
from typing import Any

import pytest

from kvrs.config.cluster import Backend
from kvrs.config.document import parse_yaml
from kvrs.config.file import Config, dump_config, parse_config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs_lab.cli.running import _up_config
from kvrs_lab.cluster.ports import resolve_ports


def asked(
    pipelines: int,
    pp: int | None,
    *,
    config: Path | None = None,
    nodes: int | None = None,
    tp: int | None = None,
    proxies: int = 1,
    backend: Backend | None = None,
) -> Config:
    ports = {"port": 0, "admin_port": 0, "workers": None}
    degrees = {"tp": tp, "pp": pp}
    return _up_config(config, None, proxies, None, nodes, pipelines, ports, backend, degrees)


def test_each_stage_has_a_node_of_its_own() -> None:
    """The first stage's has the instance's process too; all instances are one group."""
    config = asked(2, 3)
    cluster = config.cluster

    places = {
        instance.id: (node.id, instance.stage_nodes(node.id))
        for node, instance in cluster.instances()
    }
    assert places == {"d0": ("n0", ["n0", "n1", "n2"]), "d1": ("n3", ["n3", "n4", "n5"])}
    assert [node.id for node in cluster.nodes] == [f"n{at}" for at in range(6)]
    assert [each.id for _, each in cluster.donors(InstanceId("d0"))] == ["d1"]
    assert {each.role for _, each in cluster.instances()} == {"both"}
    assert all(not each.own_stages for _, each in cluster.instances())
    assert (config.backup.mode, config.policy.handoff) == ("both", "auto"), "the preset best"


@pytest.mark.network
def test_its_configuration_can_be_written_and_has_a_port_for_each_host() -> None:
    config = resolve_ports(asked(2, 2))

    assert parse_config(parse_yaml(dump_config(config))) == config
    ports = [host.port for _, each in config.cluster.instances() for host in each.stage_hosts]
    assert len({*ports}) == 4
    assert all(ports)


def test_it_stands_beside_other_options() -> None:
    config = asked(3, 2, tp=2, proxies=2)

    assert {(each.tp, each.ranks) for _, each in config.cluster.instances()} == {(2, 4)}
    assert config.gossip.enabled
    assert [each.id for _, each in config.cluster.donors(InstanceId("d1"))] == ["d2", "d0"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pp": None}, "--pipelines: got 2 with --pp 1; allowed: with --pp 2 or more"),
        ({"pp": 1, "tp": 2}, "--pipelines: got 2 with --pp 1; allowed: with --pp 2 or more"),
        ({"pp": 40}, "--pipelines: got 2 with --pp 40, which are 80 nodes; allowed: at most 64"),
        ({"pp": 2, "nodes": 2}, "--pipelines: got 2 beside --nodes; allowed: one of them"),
        ({"pp": 2, "config": Path("f")}, "--pipelines: got 2 beside --config; allowed: one of"),
        ({"pp": 2, "backend": Backend.DISTSERVE}, "cluster.backend: got 'distserve', with group"),
    ],
)
def test_what_it_cannot_stand_beside_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(2, **given)
    assert any(fault.startswith(said) for fault in caught.value.faults), caught.value.faults


def test_nodes_beside_a_file_are_named_as_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--nodes: got 2 beside --config; allowed: one of them"):
        _up_config(tmp_path / "f", None, 1, None, 2, None, {}, None, {})
