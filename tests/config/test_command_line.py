"""The configuration of a proxy whose servers are options, and no file."""

from typing import Any

import pytest

from kvrs.config.backup import BackupMode
from kvrs.config.cluster import Backend
from kvrs.config.exposure import needs_secret
from kvrs.config.file import Config, parse_config
from kvrs.config.origin import CommandLine
from kvrs.config.proxy import Inexact
from kvrs.errors import ConfigError
from kvrs.protocol.instance import Role
from kvrs_testkit.vllm_cluster import document

PORTS = {"p0": 1001, "d0": 1002, "d1": 1003}


def line(prefill: list[str], decode: list[str], **options: Any) -> CommandLine:
    return CommandLine(prefill, decode, **options)


def faults(given: CommandLine) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        given.read({})
    return caught.value.faults


def test_urls_are_the_cluster_and_the_rest_is_default() -> None:
    """Servers of one host are on one node; ports for clients and operators are on loopback."""
    config = line(
        ["http://a:8100"], ["http://b:8200", "http://a:8201/", "http://[::1]"], model="org/name"
    ).read({})

    found = [
        (node.id, each.id, each.role, each.host, each.port)
        for node, each in config.cluster.instances()
    ]
    assert found == [
        ("n0", "p0", Role.PREFILL, "a", 8100),
        ("n0", "d1", Role.DECODE, "a", 8201),
        ("n1", "d0", Role.DECODE, "b", 8200),
        ("n2", "d2", Role.DECODE, "::1", 80),
    ]
    assert (config.cluster.backend, config.cluster.model) == (Backend.VLLM, "org/name")
    other = line([], ["http://a:1"], backend=Backend.SGLANG).read({})
    assert other.cluster.backend is Backend.SGLANG
    assert (config.backup.mode, config.proxy.inexact) == (BackupMode.OFF, Inexact.MARK)
    assert (config.proxy.host, config.proxy.admin_host) == ("127.0.0.1", "127.0.0.1")


def test_decode_servers_need_no_prefill_server() -> None:
    config = line([], ["http://127.0.0.1:8200", "http://127.0.0.1:8201"]).read({})

    assert config.cluster.roles == {Role.DECODE}


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8200",
        "https://a:8200",
        "http://a:8200/v1",
        "http://a:0",
        "http://a:65536",
        "http://key@a:8200",
        "http://a:8200?x",
        "http://",
        "",
    ],
)
def test_a_url_that_is_none_of_a_server_is_shown_with_what_is_allowed(url: str) -> None:
    (fault,) = faults(line([url], ["http://b:8200"]))

    assert fault == (
        f"--prefill: got {url!r}; allowed: http://HOST:PORT of a server, without TLS and "
        f"without a path"
    )


def test_all_faults_of_urls_are_shown_at_once() -> None:
    found = faults(line(["http://a:1", "x", "http://a:1/"], []))

    assert [fault.partition(";")[0] for fault in found] == [
        "--prefill: got 'x'",
        "--prefill: 'http://a:1/' is given twice",
        "--decode: missing",
    ]


def test_variables_and_options_of_the_proxy_lie_over_the_urls() -> None:
    given = line([], ["http://a:1"], proxy={"port": 9000, "host": None})

    config = given.read({"KVRS_PROXY__ADMIN_PORT": "9001", "KVRS_PROXY__PORT": "9002"})

    assert (config.proxy.port, config.proxy.admin_port) == (9000, 9001)
    with pytest.raises(ConfigError, match="environment variable KVRS_PROXY__PORT"):
        given.read({"KVRS_PROXY__PORT": "x"})


def of_vllm(**sections: Any) -> Config:
    return parse_config(document("/m", PORTS, **sections))


def test_a_secret_is_needed_where_another_process_has_to_know_it() -> None:
    """vLLM gets nothing that comes of it."""
    assert not needs_secret(of_vllm())
    assert not needs_secret(line([], ["http://a:1"]).read({}))

    peer = {"id": "other", "peer_port": 5}
    assert needs_secret(of_vllm(backup={"mode": "local"}))
    assert needs_secret(of_vllm(proxy={"peers": [peer]}))
    assert needs_secret(of_vllm(proxy={"peer_port": 4}))
    ports = {"host": "127.0.0.1", "port": 5, "page_port": 6, "gossip_port": 7}
    nodes = document("/m", PORTS)["cluster"]["nodes"]
    with_agents = [node | {"agent": ports | {"port": at}} for at, node in enumerate(nodes, 10)]
    gossip = of_vllm(cluster={"nodes": with_agents[:1]}, gossip={"enabled": True})
    assert needs_secret(gossip)
    assert needs_secret(Config())
