"""`backup.mode: peer` where it cannot be."""

import re
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.errors import ConfigError

TWO = [
    {"id": "n0", "instances": [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode"}]},
    {"id": "n1", "instances": [{"id": "d1", "role": "decode"}]},
]


def document(nodes: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    return {"backup": {"mode": "peer"}, "cluster": {"nodes": nodes}} | sections


def test_two_decode_instances_are_enough_and_no_agent_runs() -> None:
    config = parse_config(document(TWO))
    assert not config.agents_run
    assert config.backup.reserved_bytes == 0
    assert parse_config(document([TWO[0], TWO[1] | {"instances": [{"id": "b1", "role": "both"}]}]))


def test_agents_that_run_for_something_else_keep_no_checkpoints() -> None:
    config = parse_config(document(TWO, gossip={"enabled": True}))
    assert config.agents_run
    assert config.backup.reserved_bytes == 0


@pytest.mark.parametrize(
    ("nodes", "sections", "said"),
    [
        (TWO[:1], {}, "got 'peer' with one decode instance"),
        (TWO, {"state_plane": {"enabled": True}}, "got 'peer' with state_plane.enabled: true"),
        (
            [
                TWO[0],
                {"id": "n1", "instances": [{"id": "d1", "role": "decode", "pp": 2}]},
                {"id": "n2", "instances": []},
            ],
            {"hosts": True},
            "instance 'd1' has stage_hosts",
        ),
    ],
)
def test_what_peers_cannot_be_is_refused_by_name(
    nodes: list[dict[str, Any]], sections: dict[str, Any], said: str
) -> None:
    if sections == {"hosts": True}:
        host = {"node": "n2", "port": 9000}
        (instance,) = nodes[1]["instances"]
        nodes = [nodes[0], nodes[1] | {"instances": [instance | {"stage_hosts": [host]}]}, nodes[2]]
        sections = {}
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_config(document(nodes, **sections))


def test_other_engines_keep_nothing_for_each_other() -> None:
    cluster = {"nodes": TWO, "backend": "distserve", "model": "/m"}
    with pytest.raises(ConfigError, match="got 'peer' with backend 'distserve'"):
        parse_config({"backup": {"mode": "peer"}, "cluster": cluster})
