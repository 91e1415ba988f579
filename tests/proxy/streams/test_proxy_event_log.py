"""The event log of a running proxy, when a second proxy is started by mistake."""

import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvrs.config.file import Config, parse_config
from kvrs.errors import ConfigError
from kvrs.proxy.server import Proxy
from kvrs_testkit.scripted import SECRET
from tests.proxy.conftest import ProxyClusterBuilder

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


def config_of(log: Path, port: int = 0, admin_port: int = 0) -> Config:
    proxy = {"port": port, "admin_port": admin_port, "event_log": str(log)}
    instance = {"id": "p0", "role": "both", "port": 1}
    return parse_config(
        {"proxy": proxy, "cluster": {"nodes": [{"id": "n0", "instances": [instance]}]}}
    )


@pytest.mark.parametrize("same_ports", [False, True], ids=["other-ports", "same-ports"])
async def test_a_second_proxy_neither_moves_nor_deletes_the_live_event_log(
    build: ProxyClusterBuilder, tmp_path: Path, same_ports: bool
) -> None:
    """The first mistake moved the log to `.1`, the second deleted it, while it was written."""
    log = tmp_path / "events"
    system = await build(pairs=1, proxy={"event_log": str(log)})
    inode = log.stat().st_ino
    ports = (system.proxy.port, system.proxy.admin_port) if same_ports else (0, 0)

    for _ in range(2):
        second = Proxy(config_of(log, *ports), SECRET)
        with pytest.raises(ConfigError) as refused:
            await second.start()

    expected = "is already in use" if same_ports else f"{log} is written by another proxy that runs"
    assert expected in str(refused.value)
    assert log.stat().st_ino == inode
    assert not os.path.exists(f"{log}.1.gz")
    size = log.stat().st_size
    await system.complete(**REQUEST)
    await system.proxy.close()
    assert log.stat().st_size > size


async def test_the_log_of_a_proxy_that_ended_stays_where_a_port_is_taken(tmp_path: Path) -> None:
    """Ports are bound before a file is touched."""
    log = tmp_path / "events"
    log.write_text("of the proxy before\n")
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    with pytest.raises(ConfigError, match="already in use"):
        await Proxy(config_of(log, port=runner.addresses[0][1]), SECRET).start()

    await runner.cleanup()
    assert [path.name for path in tmp_path.iterdir()] == ["events"]
    assert log.read_text() == "of the proxy before\n"


async def test_a_log_is_free_again_when_its_proxy_has_ended(tmp_path: Path) -> None:
    """A restart continues in a new file, and keeps the one before it."""
    log = tmp_path / "events"

    for _ in range(2):
        proxy = Proxy(config_of(log), SECRET)
        await proxy.start()
        await proxy.close()

    assert log.exists()
    assert os.path.exists(f"{log}.1.gz")
