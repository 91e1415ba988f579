"""Proxies tell each other to which instances they have sent prompts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvrs.ids import InstanceId
from kvrs.net.proving import UnprovenError
from kvrs.protocol.mirror import MAX_HASH_BYTES, MAX_SENT, SentPrompt
from kvrs.protocol.secrets import Scope, ScopedKey, scoped_key
from kvrs.proxy.mirror.peers import PATH
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group
from kvrs_testkit.ports import client_of
from kvrs_testkit.scripted import SECRET

P0 = InstanceId("p0")
HASHES = bytes(range(64))
GOOD = SentPrompt(P0, 1, 2048, 8192, HASHES)


def blocks_known(group: MultiProxyCluster, proxy: int) -> int:
    """Return how many pairs of a block and an instance a proxy knows of."""
    return len(group.proxy(proxy).parts.driver.control.policy.state.view.prefixes)


@asynccontextmanager
async def proxies_before_large_caches(count: int) -> AsyncIterator[MultiProxyCluster]:
    async with open_proxy_group(count) as group:
        for instance in group.system.instances.values():
            instance.free_pages = 100_000
        controls = [group.proxy(number).parts.driver.control for number in range(count)]
        loads = [each.load for control in controls for each in control.instances.present()]
        await group.until(
            lambda: all(
                each.load is not None and each.load.free_pages == 100_000
                for control in controls
                for each in control.instances.present()
            )
        )
        assert len(loads) == count * len(group.system.instances)
        yield group


async def test_a_prompt_that_one_proxy_has_sent_is_known_to_all() -> None:
    """Its four blocks, at one instance."""
    async with proxies_before_large_caches(3) as group:
        await group.reader(prompt="All the world's a stage. " * 200).read(0)

        await group.until(lambda: all(blocks_known(group, number) == 4 for number in range(3)))


async def post(group: MultiProxyCluster, key: ScopedKey, sender: str, prompts: list[Any]) -> int:
    """Send a batch to proxy 0; return the status of its answer."""
    url = f"http://127.0.0.1:{group.configs[0].proxy.peer_port}"
    body = msgspec.msgpack.encode({"sender": sender, "updates": [], "sent": prompts})
    async with client_of(url, key) as client, client.post(PATH, data=body) as response:
        return response.status


async def test_only_whole_messages_of_peers_count() -> None:
    """Any other message is refused, and nothing of it noted."""
    async with proxies_before_large_caches(2) as group:
        key = scoped_key(SECRET, Scope.PROXY, "proxy-0")
        refused = [
            await post(group, key, "proxy-1", [GOOD, bad])
            for bad in (
                ["p0", 1, 2048, 8192, HASHES[:-1]],
                ["p0", 1, 0, 8192, HASHES],
                ["p0", 1, 2048, 0, HASHES],
                ["p0", 1, 2048, 8192, b""],
                ["p0", 1, 2048, 8192, bytes(MAX_HASH_BYTES + 8)],
                ["p0", 1, 2048, 1 << 62, HASHES],
                "p0",
            )
        ]
        refused.append(await post(group, key, "proxy-1", [GOOD] * (MAX_SENT + 1)))
        refused.append(await post(group, key, "proxy-9", [GOOD]))
        other = scoped_key(b"another secret" * 4, Scope.PROXY, "proxy-0")
        with pytest.raises(UnprovenError):
            await post(group, other, "proxy-1", [GOOD])
        before = blocks_known(group, 0)
        taken = await post(group, key, "proxy-1", [GOOD])
        after = blocks_known(group, 0)

    assert refused == [400] * 9
    assert (before, taken, after) == (0, 200, 8)
