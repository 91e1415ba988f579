"""Ports are chosen once for a whole run."""

import socket
from pathlib import Path

import pytest

from kvrs.cluster.ports import FIRST_PORT, LAST_PORT, resolve_ports
from kvrs.cluster.starts import next_start
from kvrs.config import parse_config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId


def test_every_open_port_is_chosen_and_none_twice() -> None:
    """Chosen below the range of outgoing connections, so that nobody takes the port of an instance while it is down."""
    config = resolve_ports(parse_config({"proxy": {"port": 0, "admin_port": 0}}))

    instances = [instance for _, instance in config.cluster.instances()]
    ports = [config.proxy.port, config.proxy.admin_port]
    ports += [port for instance in instances for port in (instance.port, instance.page_port)]
    assert len(set(ports)) == 10
    assert all(FIRST_PORT <= port < LAST_PORT for port in ports)


def test_ports_in_use_are_named_all_at_once() -> None:
    """A user who asked for taken ports hears of all of them before anything starts."""
    with socket.socket() as one, socket.socket() as two:
        for taken in (one, two):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
        asked = {"port": one.getsockname()[1], "admin_port": two.getsockname()[1]}

        with pytest.raises(ConfigError) as caught:
            resolve_ports(parse_config({"proxy": asked}))

    assert caught.value.faults == [
        f"proxy.{key}: 127.0.0.1:{port} is in use; allowed: a free port, or 0 for any" for key, port in asked.items()
    ]


def test_an_epoch_rises_with_every_start(tmp_path: Path) -> None:
    """Whatever the clock does: the count is kept in the run directory."""
    assert [next_start(tmp_path, InstanceId("d0")) for _ in range(3)] == [1, 2, 3]
