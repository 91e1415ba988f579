"""Files for servers of vLLM: which agents they allow, and what of earlier versions is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.cluster import Backend
from kvrs.config.document import parse_yaml
from kvrs.config.exposure import needs_secret
from kvrs.config.file import parse_config
from kvrs.config.schema import first_file
from kvrs.errors import ConfigError
from kvrs_testkit.vllm_cluster import document

ROOT = Path(__file__).parents[2]
PORTS = {"p0": 1001, "d0": 1002, "d1": 1003}


def faults(settings: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(settings)
    return caught.value.faults


def test_rows_for_other_nodes_need_a_port_of_agents() -> None:
    """Those of the own node need none."""
    settings = document("/m", PORTS, backup={"mode": "remote"})
    (fault,) = faults(settings)

    assert fault.startswith("backup.mode: got 'remote' with backend 'vllm', where no agent has")
    assert fault.endswith("allowed: 'off', 'local', or a row_port of agents")
    settings["cluster"]["nodes"][0]["agent"]["row_port"] = 1021
    assert parse_config(settings).agents_run
    assert parse_config(document("/m", PORTS, backup={"mode": "local"})).agents_run


def test_decode_instances_of_vllm_need_no_prefill_instance() -> None:
    """They compute prompts themselves."""
    alone = {name: port for name, port in PORTS.items() if name != "p0"}

    assert parse_config(document("/m", alone))
    assert faults(document("/m", {"p0": 1001})) == [
        "cluster.nodes: node 'n1' has no instances; allowed: at least one, or a stage of another "
        "node's (stage_hosts)",
        "cluster.nodes: no instance of role 'decode'; allowed: at least one",
    ]


def test_agents_and_services_exclude_each_other() -> None:
    """The nodes of addresses have no agents."""
    settings = document("/m", PORTS, backup={"mode": "local"})
    settings["cluster"]["services"] = [{"id": "s", "host": "h", "port": 1, "role": "decode"}]

    (fault,) = faults(settings)

    assert fault.startswith("cluster.services: got 1 with backup.mode")


def test_the_first_file_for_vllm_has_nothing_that_is_off() -> None:
    """No agent, no key without a value, no secret; it starts as it is once the addresses fit."""
    text = first_file(Backend.VLLM)

    config = parse_config(parse_yaml(text))

    words = {*re.findall(r"\w+", re.sub("#.*", "", text))}
    assert not {"agent", "null", "profiles", "backup"} & words
    assert "SECRET" not in text
    assert not needs_secret(config)


def test_the_file_of_the_guide_has_agents() -> None:
    """It is whole, and needs a secret."""
    page = (ROOT / "docs/guide/vllm-tier.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(backup: \{mode: remote.*?)```", page, re.DOTALL)

    config = parse_config(parse_yaml(text))

    assert [config.cluster.row_holder(each.id) for each in config.cluster.nodes] == [
        *reversed(config.cluster.nodes)
    ]
    assert config.agents_run
    assert needs_secret(config)
