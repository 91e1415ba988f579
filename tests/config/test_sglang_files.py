"""Files for servers of SGLang: which agents they allow."""

from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs_testkit.sglang_cluster import document

PORTS = {"p0": 1001, "d0": 1002, "d1": 1003}


@pytest.mark.parametrize("mode", ["remote", "both", "peer"])
def test_no_second_copies_are_made_of_pages(mode: str) -> None:
    """Agents copy what running streams need, and HiCache does not know which pages those are."""
    with pytest.raises(ConfigError) as caught:
        parse_config(document("/m", PORTS, backup={"mode": mode}))
    assert f"backup.mode: got {mode!r}; allowed with backend 'sglang': 'off', 'local'" in (
        caught.value.faults
    )


def test_agents_hold_pages_for_their_node_and_by_a_port_for_others() -> None:
    settings: dict[str, Any] = document("/m", PORTS, backup={"mode": "local"})
    assert parse_config(settings).agents_run
    settings["cluster"]["nodes"][0]["agent"]["row_port"] = 1021
    assert parse_config(settings).cluster.nodes[0].agent.row_port == 1021
