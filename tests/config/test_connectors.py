"""Ports of the kvrs connectors in vLLM: what they allow, and where they are refused."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.cluster import Backend
from kvrs.config.exposure import needs_secret
from kvrs.config.file import parse_config
from kvrs.config.first_file import first_file
from kvrs.config.settings import parse_yaml
from kvrs.config.source import merged
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs_testkit.vllm_cluster import document

ROOT = Path(__file__).parents[2]
PORTS = {"p0": 1001, "d0": 1002, "d1": 1003}
CONNECTORS = {"d0": 1012, "d1": 1013}
BACKUP: dict[str, Any] = {"backup": {"mode": "remote"}}


def faults(settings: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(settings)
    return caught.value.faults


def test_checkpoints_need_one_connector() -> None:
    """Rows of vLLM's own tier, on the own node, need none."""
    assert parse_config(document("/m", PORTS, {"d0": 1012}, **BACKUP)).agents_run

    (fault,) = faults(document("/m", PORTS, **BACKUP))

    assert fault.startswith("backup.mode: got 'remote' with backend 'vllm', of which no instance")
    assert fault.endswith("allowed: 'off', 'local', or a connector_port, or a row_port of agents")
    assert parse_config(document("/m", PORTS, backup={"mode": "local"})).agents_run


def test_only_vllm_has_connectors() -> None:
    node = {"id": "n0", "instances": [{"id": "a", "role": "both", "connector_port": 1}]}

    assert faults({"cluster": {"nodes": [node]}}) == [
        "cluster.nodes: instance 'a' has a connector_port; allowed with backend 'embedded': null"
    ]


@pytest.mark.parametrize("connectors", [CONNECTORS, {}])
def test_decode_instances_of_vllm_need_no_prefill_instance(connectors: dict[str, int]) -> None:
    """They compute prompts themselves, with a connector or without."""
    alone = {name: port for name, port in PORTS.items() if name != "p0"}

    assert parse_config(document("/m", alone, connectors))
    assert faults(document("/m", {"p0": 1001}, connectors)) == [
        "cluster.nodes: node 'n1' has no instances; allowed: at least one, or a stage of another "
        "node's (stage_hosts)",
        "cluster.nodes: no instance of role 'decode'; allowed: at least one",
    ]


def test_a_connector_needs_the_model_in_the_file() -> None:
    """Its pages have the size that the proxy expects; without one a vLLM may name the model."""
    without = document("/m", PORTS)
    del without["cluster"]["model"]
    assert parse_config(without).cluster.model is None

    with_one = document("/m", PORTS, {"d0": 1012})
    del with_one["cluster"]["model"]
    (fault,) = faults(with_one)
    assert fault.startswith("cluster.model: missing, with a connector_port at d0; allowed:")


def test_the_port_of_a_connector_is_its_own() -> None:
    (fault,) = faults(document("/m", PORTS, {"d0": PORTS["d1"]}))

    assert fault == "port 127.0.0.1:1003 is used 2 times; allowed: once"


def test_checkpoints_and_services_exclude_each_other() -> None:
    """The nodes of addresses have no agents."""
    settings = document("/m", PORTS, CONNECTORS, **BACKUP)
    settings["cluster"]["services"] = [{"id": "s", "host": "h", "port": 1, "role": "decode"}]

    (fault,) = faults(settings)

    assert fault.startswith("cluster.services: got 1 with backup.mode")


def test_the_protocol_is_spoken_at_the_connector() -> None:
    """Agents fence and watch there; the port of vLLM gets requests alone."""
    config = parse_config(document("/m", PORTS, CONNECTORS))

    _, d0 = config.cluster.find(InstanceId("d0"))

    assert (config.url_of(d0), d0.url) == ("http://127.0.0.1:1012", "http://127.0.0.1:1002")


def test_the_first_file_for_vllm_has_nothing_that_is_off() -> None:
    """No agent, no key without a value, no secret; it starts as it is once the addresses fit."""
    text = first_file(Backend.VLLM)

    config = parse_config(parse_yaml(text))

    words = {*re.findall(r"\w+", re.sub("#.*", "", text))}
    assert not {"agent", "null", "connector_port", "profiles", "backup"} & words
    assert "SECRET" not in text
    assert not needs_secret(config)


def test_lines_of_the_guide_give_the_first_file_its_agents() -> None:
    """Laid over it, as the page says; then a secret is needed."""
    page = (ROOT / "docs/guide/vllm.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"    backup: \{mode: remote.*(?:\n    .*)+", page)
    above = parse_yaml(textwrap.dedent(lines))
    document = parse_yaml(first_file(Backend.VLLM))
    for node, more in zip(document["cluster"]["nodes"], above["cluster"].pop("nodes"), strict=True):
        assert node["id"] == more["id"]
        node |= more

    config = parse_config(merged(document, above))

    assert [config.cluster.row_holder(each.id) for each in config.cluster.nodes] == [
        *reversed(config.cluster.nodes)
    ]
    assert config.agents_run
    assert needs_secret(config)
