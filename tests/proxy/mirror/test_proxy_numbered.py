"""Proxies that come and go by their names in DNS: `proxy.numbered_peers`."""

import asyncio
import socket

import pytest

from kvrs.config.file import config_digest
from kvrs.proxy.fleet import peer_names
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group

pytestmark = pytest.mark.network


async def test_a_stream_goes_on_through_proxies_that_come_and_go_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One more takes part when it has a name, and one that is gone with its name is no peer any
    more; no file is edited, and the stream is resumed at the one that came last.
    """
    names = {"127.0.1.10", "127.0.1.11", "127.0.1.12"}

    async def lookup(host: str) -> frozenset[str]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return frozenset({host})

    monkeypatch.setattr(peer_names, "all_addresses", lookup)
    monkeypatch.setattr(peer_names, "LOOK_UP_S", 0.05)
    async with open_proxy_group(3, numbered=True) as group:
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 3
        await group.kill(2)
        names.discard("127.0.1.12")
        await group.until(lambda: _peers(group, 0) == {"proxy-1"})
        reader = group.reader()
        reading = asyncio.create_task(reader.read(0))
        await group.until(lambda: len(reader.events) == 3 and group.mirror_of_stream() == "proxy-1")

        names.add("127.0.1.12")
        await group.start(2)
        await group.until(lambda: group.mirror(0).peers.live_ids == {"proxy-1", "proxy-2"})
        await group.kill(1)
        names.discard("127.0.1.11")
        await group.until(
            lambda: _peers(group, 0) == {"proxy-2"} and group.mirror_of_stream() == "proxy-2"
        )
        await group.until(lambda: not group.mirror(0).uncopied)
        shown = group.proxy(0).reloads.describe()
        await group.kill(0)
        await reading
        gate.set()
        await reader.read_all(2)

    assert reader.done
    assert (reader.errors, len(reader.statuses)) == ([], 2)
    assert shown["source_digest"] == config_digest(group.configs[0])
    assert shown["config_digest"] != shown["source_digest"]


async def test_a_peer_that_is_up_stays_while_its_name_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DNS that fails or forgets takes no proxy from the others."""
    answers: list[OSError] = [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        TimeoutError(),
    ]
    async with open_proxy_group(2, numbered=True) as group:
        for answer in answers:

            async def lookup(host: str, answer: OSError = answer) -> frozenset[str]:
                raise answer

            monkeypatch.setattr(peer_names, "all_addresses", lookup)
            await group.proxy(0).parts.peer_names.look_up()

            assert group.mirror(0).peers.live_ids == {"proxy-1"}


async def test_a_reload_keeps_the_peers_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says nothing of which of them are there. They were looked up at the start."""
    monkeypatch.setattr(peer_names, "LOOK_UP_S", 3600.0)
    async with open_proxy_group(2, numbered=True) as group:
        result = await group.proxy(0).reload()

        assert result.applied == []
        assert group.mirror(0).peers.live_ids == {"proxy-1"}


def _peers(group: MultiProxyCluster, number: int) -> set[str]:
    return set(group.mirror(number).peers.known)
