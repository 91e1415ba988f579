"""`proxy.numbered_peers`: one file for all proxies of a set."""

from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.config.proxy import NumberedPeersSettings
from kvrs.errors import ConfigError

SECTION = {"id": "kvrs-*", "host": "kvrs-*.kvrs-peers", "peer_port": 8002, "most": 3}
PROXY = {"id": "kvrs-1", "peer_host": "0.0.0.0", "peer_port": 8002}


def parsed(proxy: dict[str, Any], **section: Any) -> NumberedPeersSettings:
    document = {"proxy": PROXY | proxy | {"numbered_peers": SECTION | section}}
    numbered = parse_config(document).proxy.numbered_peers
    assert numbered is not None
    return numbered


def test_each_proxy_has_all_others_as_possible_peers() -> None:
    """Also each of its workers, which are no peers of their own proxy by this section."""
    numbered = parsed({})

    others = numbered.others("kvrs-1")

    assert [(peer.id, peer.host, peer.peer_port) for peer in others] == [
        ("kvrs-0", "kvrs-0.kvrs-peers", 8002),
        ("kvrs-2", "kvrs-2.kvrs-peers", 8002),
    ]
    assert numbered.others("kvrs-1.0") == others


@pytest.mark.parametrize(
    ("proxy", "section", "said"),
    [
        ({"id": "kvrs-3"}, {}, "proxy.id: got 'kvrs-3'.*allowed: kvrs-0 to kvrs-2"),
        ({"id": "other"}, {}, "proxy.id: got 'other'"),
        ({"peer_port": 8003}, {}, "numbered_peers.peer_port: got 8002.*8003 here"),
        ({"workers": 2}, {}, "numbered_peers.workers: got 1.*2 here"),
        ({"peer_host": "127.0.0.1"}, {}, "proxy.peer_host: got '127.0.0.1'"),
        ({}, {"id": "kvrs"}, r"id: got 'kvrs'; allowed: a name with one \*"),
        ({}, {"host": "a-*.b-*"}, r"host: got 'a-\*.b-\*'"),
        ({}, {"id": "kvrs *"}, "id"),
        ({}, {"most": 12, "workers": 3}, "most: got 12 with workers: 3; allowed: 33 processes"),
    ],
)
def test_what_cannot_be_is_named(proxy: dict[str, Any], section: dict[str, Any], said: str) -> None:
    """With the value, and what is allowed."""
    with pytest.raises(ConfigError, match=said):
        parsed(proxy, **section)
