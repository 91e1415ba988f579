"""Settings of a proxy with several workers, and what each worker has of them."""

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.config.across_sections import gossip_members
from kvrs.config.file import parse_config
from kvrs.config.origin import WorkerPlan, with_proxy, worker_config
from kvrs.errors import ConfigError
from kvrs.proxy.process.workers import check_shared_ports


def faults_of(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_config(document)
    return error.value.faults


@pytest.mark.parametrize(
    ("workers", "fault"),
    [
        (0, "proxy.workers: got 0; input should be greater than or equal to 1 {RANGE}"),
        (-2, "proxy.workers: got -2; input should be greater than or equal to 1 {RANGE}"),
        (17, "proxy.workers: got 17; input should be less than or equal to 16 {RANGE}"),
        (1.5, "proxy.workers: got 1.5; input should be a valid integer {RANGE}"),
        ("2", "proxy.workers: got '2'; input should be a valid integer {RANGE} (without quotes)"),
        (True, "proxy.workers: got True; input should be a valid integer {RANGE}"),
    ],
)
def test_a_number_of_workers_is_a_small_integer(workers: Any, fault: str) -> None:
    """A fault names the value and what is allowed."""
    whole = fault.replace("{RANGE}", "(allowed: at least 1, at most 16)")

    assert faults_of({"proxy": {"workers": workers}}) == [whole]


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        ({"proxy": {"max_streams": 3}}, "proxy.max_streams: got 3 with proxy.workers: 4"),
        ({"proxy": {"mirror_bytes": 3 << 20}}, "proxy.mirror_bytes: got 3145728 with"),
        ({"proxy": {"body_budget_bytes": 32 << 20}}, "proxy.body_budget_bytes: got 33554432 with"),
        ({"proxy": {"admin_port": 65506}}, "proxy.admin_port: got 65506 with proxy.workers: 4"),
        ({"proxy": {"peer_port": 65533}}, "proxy.peer_port: got 65533 with proxy.workers: 4"),
        ({"proxy": {"gossip_port": 65533}}, "proxy.gossip_port: got 65533 with proxy.workers: 4"),
        ({"proxy": {"id": "p" * 63}}, f"proxy.id: got '{'p' * 63}' with proxy.workers: 4"),
        ({"policy": {"slots_max": 3}}, "policy.slots_max: got 3 with proxy.workers: 4, and no"),
        ({"proxy": {"peer_port": 7997}}, "port 127.0.0.1:8000 is used 2 times; allowed: once"),
        ({"proxy": {"peer_port": 8009}}, "port 127.0.0.1:8011 is used 2 times; allowed: once"),
        (
            {"proxy": {"peers": [{"id": "proxy-0.3", "peer_port": 9000}]}},
            "proxy.peers: id 'proxy-0.3' is used 2 times; allowed: once, proxy.id included",
        ),
        (
            {
                "proxy": {
                    "peers": [
                        {"id": name, "peer_port": port, "workers": 15}
                        for name, port in (("a", 9100), ("b", 9200))
                    ]
                }
            },
            "proxy.peers: 33 other processes with proxy.workers: 4; allowed: at most 32",
        ),
        (
            {"proxy": {"peers": [{"id": "a", "peer_port": 65535, "workers": 2}]}},
            "proxy.peers.0: got a section; workers: 2 need ids of at most 64",
        ),
    ],
)
def test_what_cannot_be_divided_is_a_fault(sections: dict[str, Any], fault: str) -> None:
    """Each worker needs a part of every limit, and ports of its own that are free."""
    document = {**sections, "proxy": {"workers": 4} | sections.get("proxy", {})}

    (found,) = faults_of(document)

    assert found.startswith(fault)


def test_slots_need_no_share_where_agents_arbitrate() -> None:
    """Then the agent of the target's node grants them."""
    document = {
        "proxy": {"workers": 4},
        "policy": {"slots_max": 3},
        "gossip": {"enabled": True},
    }

    config = parse_config(document)

    assert worker_config(config, WorkerPlan(0, 8000, 8001, [1, 2, 3, 4])).policy.slots_max == 3


def test_workers_are_proxies_and_peers_of_each_other() -> None:
    """Limits are divided among them; they share the clients' port."""
    config = parse_config(
        {
            "proxy": {
                "workers": 2,
                "peers": [{"id": "other", "host": "10.0.0.2", "peer_port": 9000, "workers": 2}],
                "peer_host": "10.0.0.1",
                "max_streams": 101,
                "gossip_port": 7000,
                "event_log": "/logs/events.jsonl",
            },
            "policy": {"slots_max": 9},
        }
    )

    worker = worker_config(config, WorkerPlan(1, 8000, 8011, [9000, 9001]))

    assert (worker.proxy.id, worker.proxy.port, worker.proxy.workers) == ("proxy-0.1", 8000, 1)
    assert [(peer.id, peer.host, peer.peer_port) for peer in worker.proxy.peers] == [
        ("proxy-0.0", "10.0.0.1", 9000),
        ("other.0", "10.0.0.2", 9000),
        ("other.1", "10.0.0.2", 9001),
    ]
    assert (worker.proxy.peer_port, worker.proxy.gossip_port) == (9001, 7001)
    assert worker.proxy.admin_port == 8011
    assert (worker.proxy.max_streams, worker.policy.slots_max) == (50, 4)
    assert worker.proxy.event_log == "/logs/events.1.jsonl"
    assert parse_config(worker.model_dump(mode="json")) == worker


def test_every_worker_is_a_gossip_member() -> None:
    """Agents reach each of them at a port of its own."""
    config = parse_config({"proxy": {"workers": 2, "gossip_port": 7000}})

    assert [*gossip_members(config.cluster, config.proxy)][-2:] == [
        ("proxy-0.0", "127.0.0.1", 7000),
        ("proxy-0.1", "127.0.0.1", 7001),
    ]


def test_a_number_of_the_command_line_is_checked_with_the_file() -> None:
    """A file that is valid for one worker may not be for several."""
    config = parse_config({"proxy": {"max_streams": 1}})

    with pytest.raises(ConfigError, match=r"proxy.max_streams: got 1 with proxy.workers: 2"):
        with_proxy(config, {"workers": 2})


def test_several_workers_need_a_system_with_shared_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`kvrs config check` says so before anything starts."""
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    file = tmp_path / "kvrs.yaml"
    file.write_text("proxy: {workers: 2}\n")

    result = CliRunner().invoke(app, ["config", "check", str(file)])

    assert isinstance(result.exception, ConfigError)
    assert result.exception.faults == [
        f"{file}:1: proxy.workers: got 2, and this system has no SO_REUSEPORT, by which they share "
        "a port; allowed: 1"
    ]
    check_shared_ports(parse_config({"proxy": {"workers": 1}}))
