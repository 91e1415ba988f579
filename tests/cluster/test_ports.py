"""Ports are chosen once for a whole run."""

import re
import socket
import subprocess
import sys
from typing import Any

import pytest

from kvrs.config.cluster import demo_nodes
from kvrs.config.file import parse_config
from kvrs.config.proxy import ADMIN_PORT_STEP
from kvrs.errors import ConfigError
from kvrs_lab.cluster import ports
from kvrs_lab.cluster.ports import (
    FIRST_PORT,
    LAST_PORT,
    resolve_all,
    resolve_ports,
    several_proxies,
)
from kvrs_testkit.free_ports import free_ports

pytestmark = [pytest.mark.network, pytest.mark.xdist_group("clusters")]


def test_every_open_port_is_chosen_and_none_twice() -> None:
    """Chosen below the range of outgoing connections, so that the port of an instance stays free
    while it is down.
    """
    config = resolve_ports(parse_config({"proxy": {"port": 0, "admin_port": 0}}))

    instances = [instance for _, instance in config.cluster.instances()]
    chosen = [config.proxy.port, config.proxy.admin_port]
    chosen += [port for instance in instances for port in (instance.port, instance.page_port)]
    assert len(set(chosen)) == 10
    assert all(FIRST_PORT <= port < LAST_PORT for port in chosen)


def test_no_port_is_chosen_twice_however_few_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would allow it before the first listens. A given port is not chosen for another
    process.
    """
    (given,) = free_ports(1)
    monkeypatch.setattr(ports, "FIRST_PORT", given - 7)
    monkeypatch.setattr(ports, "LAST_PORT", given + 33)
    asked = parse_config({"proxy": {"port": 0, "admin_port": given}})

    for _ in range(20):
        config = resolve_ports(asked)
        chosen = [config.proxy.port, config.proxy.admin_port]
        chosen += [
            port
            for _, instance in config.cluster.instances()
            for port in (instance.port, instance.page_port)
        ]
        assert len(set(chosen)) == 10


@pytest.mark.process
def test_clusters_that_start_side_by_side_choose_different_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A port that another process has chosen stays its own before anything listens there."""
    monkeypatch.setattr(ports, "LAST_PORT", FIRST_PORT + 60)
    choose = (
        "import sys\n"
        "from kvrs_lab.cluster import ports\n"
        "from kvrs.config.file import parse_config\n"
        f"ports.LAST_PORT = {FIRST_PORT + 60}\n"
        "proxy = {'port': 0, 'admin_port': 0}\n"
        "config = ports.resolve_ports(parse_config({'proxy': proxy}))\n"
        "chosen = [config.proxy.port, config.proxy.admin_port]\n"
        "chosen += [p for _, i in config.cluster.instances() for p in (i.port, i.page_port)]\n"
        "print(*chosen, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", choose], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        config = resolve_ports(parse_config({"proxy": {"port": 0, "admin_port": 0}}))
        mine = {config.proxy.port, config.proxy.admin_port}
        for _, instance in config.cluster.instances():
            mine |= {instance.port, instance.page_port}
        other.communicate()

    assert len(theirs) == len(mine) == 10
    assert not theirs & mine


def test_agents_have_ports_where_they_run() -> None:
    """With checkpoints off there is no agent, so a used port of an agent does not matter."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        nodes: list[Any] = [node.model_dump(mode="json") for node in demo_nodes(2)]
        nodes[1]["agent"]["page_port"] = port
        asked = {"proxy": {"port": 0, "admin_port": 0}, "cluster": {"nodes": nodes}}

        off = resolve_ports(parse_config(asked))
        with pytest.raises(ConfigError) as caught:
            resolve_ports(parse_config(asked | {"backup": {"mode": "local"}}))

    on = resolve_ports(parse_config(asked | {"backup": {"mode": "local"}}))
    assert [(node.agent.port, node.agent.page_port) for node in off.cluster.nodes] == [
        (0, 0),
        (0, port),
    ]
    assert caught.value.faults == [
        f"agent of node n1: page_port: 127.0.0.1:{port} is in use; allowed: a free port, "
        f"or 0 for any"
    ]
    assert (
        len(
            {
                number
                for node in on.cluster.nodes
                for number in (node.agent.port, node.agent.page_port)
            }
            - {0}
        )
        == 4
    )


def test_an_address_of_another_machine_is_named() -> None:
    """No port is free there, however long one looks."""
    nodes: list[Any] = [node.model_dump(mode="json") for node in demo_nodes(1)]
    nodes[0]["instances"][0]["host"] = "192.0.2.1"

    with pytest.raises(ConfigError, match=r"instance p0: port: 192\.0\.2\.1:0 is Cannot assign"):
        resolve_ports(
            parse_config({"proxy": {"port": 0, "admin_port": 0}, "cluster": {"nodes": nodes}})
        )


def test_ports_in_use_are_named_all_at_once() -> None:
    """All used ports are reported together, before anything starts."""
    with socket.socket() as one, socket.socket() as two:
        for taken in (one, two):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
        asked = {"port": one.getsockname()[1], "admin_port": two.getsockname()[1]}

        with pytest.raises(ConfigError) as caught:
            resolve_ports(parse_config({"proxy": asked}))

    assert caught.value.faults == [
        f"proxy.{key}: 127.0.0.1:{port} is in use; allowed: a free port, or 0 for any"
        for key, port in asked.items()
    ]


def test_several_proxies_have_ports_and_logs_of_their_own_and_know_each_other() -> None:
    """Ten apart where the file gives them, so that they can be told apart; any free ones where it
    does not.
    """
    first, *_ = free_ports(2 + 2 * ADMIN_PORT_STEP)
    asked = {"port": first, "admin_port": first + 1, "event_log": "logs/events.jsonl"}
    config = parse_config({"proxy": asked, "gossip": {"enabled": True}})

    found = [each.proxy for each in resolve_all(config, several_proxies(config.proxy, 3))]

    assert [proxy.id for proxy in found] == ["proxy-0", "proxy-1", "proxy-2"]
    assert [proxy.port - first for proxy in found] == [0, 10, 20]
    assert [proxy.admin_port - first for proxy in found] == [1, 11, 21]
    assert [proxy.event_log for proxy in found] == [
        f"logs/events-proxy-{n}.jsonl" for n in range(3)
    ]
    assert (
        len({port for proxy in found for port in (proxy.peer_port, proxy.gossip_port)} - {0}) == 6
    )
    for proxy in found:
        others = [(other.id, other.host, other.peer_port) for other in found if other is not proxy]
        assert [(peer.id, peer.host, peer.peer_port) for peer in proxy.peers] == others


@pytest.mark.parametrize(
    ("proxy", "node", "words"),
    [
        (
            {"peer_port": 21999, "peers": [{"id": "proxy-9", "peer_port": 21998}]},
            "n0",
            "--proxies: got 2 beside proxy.peers (proxy-9); allowed: one of them",
        ),
        (
            {"port": 65530},
            "n0",
            "proxy-1: port: got 65540; allowed: 0 to 65535, for each proxy or worker 10 above "
            "the one before it",
        ),
        (
            {"port": 21990, "admin_port": 22000},
            "n0",
            "proxy-1: port: 127.0.0.1:22000 is that of proxy-0: admin_port too; allowed: "
            "a port of its own",
        ),
        ({}, "proxy-1", "'proxy-1'"),
    ],
)
def test_proxies_that_cannot_be_are_refused(proxy: dict[str, Any], node: str, words: str) -> None:
    """With the value, and what is allowed."""
    document = {
        "proxy": {"admin_port": 0} | proxy,
        "cluster": {"nodes": [{"id": node, "instances": [{"id": "b", "role": "both"}]}]},
        "gossip": {"enabled": True},  # As with --proxies.
    }
    config = parse_config(document)

    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve_all(config, several_proxies(config.proxy, 2))


def test_one_proxy_is_as_in_the_file() -> None:
    """With its peers, which are started separately."""
    peers = [{"id": "other", "host": "127.0.0.1", "peer_port": 9}]
    config = parse_config(
        {"proxy": {"id": "mine", "port": 0, "admin_port": 0, "peers": peers, "event_log": "log"}}
    )

    (found,) = resolve_all(config, several_proxies(config.proxy, 1))

    assert (found.proxy.id, found.proxy.event_log, found.proxy.peer_port) == ("mine", "log", 0)
    assert found.proxy.peers == config.proxy.peers


def test_ports_are_chosen_on_ipv6_hosts_too() -> None:
    """The socket that tries a port is of the host's family."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback on this machine")
    instance = {"id": "b0", "role": "both", "host": "::1"}
    nodes = [{"id": "n0", "instances": [instance], "agent": {"host": "::1"}}]

    proxy = {"port": 0, "admin_port": 0}
    resolved = resolve_ports(parse_config({"proxy": proxy, "cluster": {"nodes": nodes}}))

    ((_, found),) = resolved.cluster.instances()
    assert found.port
    assert found.page_port
