"""Limits of a configuration with backend distserve."""

from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.errors import ConfigError


def faults_of(cluster: dict[str, Any], **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config({"cluster": {"backend": "distserve"} | cluster} | sections)
    return caught.value.faults


def test_a_node_is_one_server_with_both_stages() -> None:
    """Two decode instances on a node would be one process with one port."""
    p, d, b = (
        {"id": "p", "role": "prefill"},
        {"id": "d", "role": "decode"},
        {"id": "b", "role": "both"},
    )

    faults = faults_of(
        {
            "nodes": [
                {"id": "n0", "instances": [p, d, d | {"id": "e"}]},
                {"id": "n1", "instances": [b]},
                {"id": "n2", "instances": [d | {"id": "f"}]},
            ]
        }
    )

    allowed = "allowed with backend 'distserve': one prefill and one decode, which are one server"
    assert faults == [
        f"cluster.nodes: node 'n0' has instances of roles decode, decode, prefill; {allowed}",
        f"cluster.nodes: node 'n1' has instances of roles both; {allowed}",
    ]


def test_a_gpu_keeps_no_pace() -> None:
    """Only the runtime without a GPU can wait for the end of a step."""
    name = "opt-13b-a100-distserve-tp1"

    faults = faults_of({"engine": {"pace": name, "device": "cuda"}}, profiles={"prefill": name})

    assert [fault.split(":")[0] for fault in faults] == ["cluster.engine.pace"]
    parse_config({"cluster": {"backend": "distserve", "engine": {"pace": name}}})


def test_the_demos_nodes_will_do() -> None:
    """So `kvrs lab up --backend distserve` needs no file."""
    assert parse_config({"cluster": {"backend": "distserve"}}).cluster.backend == "distserve"
