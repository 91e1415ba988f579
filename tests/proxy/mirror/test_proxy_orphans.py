"""Two proxies have every record after any kill: of running streams, of those without a client, and
of finished ones.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvrs.protocol.mirror import BatchAnswer, SentPrompt, Update
from kvrs.proxy.mirror import replication
from kvrs.proxy.mirror.peers import ProxyPeer
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group, record_key
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.proxy.mirror.test_proxy_kills import text_in

WANTED = "".join(map(text_of, expected_ids([1, 2, 3], 8)))


@pytest.fixture
async def group3() -> AsyncIterator[MultiProxyCluster]:
    async with open_proxy_group(3) as group:
        yield group


async def until_copied(group: MultiProxyCluster, key: str = "k", copies: int = 2) -> None:
    async with asyncio.timeout(WITHIN_S):
        while (
            sum(
                record_key(key) in group.book(n).records
                for n, each in enumerate(group.proxies)
                if each is not None
            )
            < copies
        ):
            await asyncio.sleep(0.005)


async def test_the_only_copy_of_a_stream_without_a_client_is_copied_on(
    group3: MultiProxyCluster,
) -> None:
    """Its owner is killed, then its mirror, before the client resumes."""
    gate = group3.system.script.gate = asyncio.Event()
    group3.system.script.gate_at = 4
    reader = group3.reader()
    await reader.read(0, tokens=4)
    mirror = group3.book(0).records[record_key("k")].peer
    assert mirror is not None
    await group3.kill(0)
    await until_copied(group3)

    await group3.kill(int(mirror[-1]))
    gate.set()
    await reader.read_all(3 - int(mirror[-1]))

    assert (text_in(reader), reader.errors) == (WANTED, [])


async def test_a_finished_answer_is_replayed_after_any_kills_one_by_one(
    group3: MultiProxyCluster,
) -> None:
    """Its record is copied on before the next kill; no engine gets a request."""
    whole = group3.reader()
    await whole.read(0)
    asked = sum(len(one.bodies) for one in group3.system.instances.values())
    for number in (0, 1, 2, 0, 2, 1):
        await until_copied(group3)
        await group3.kill(number)
        await group3.start(number)
    await until_copied(group3)

    again = group3.reader()
    await again.read(1)

    assert (again.events, again.done) == (whole.events, True)
    assert sum(len(one.bodies) for one in group3.system.instances.values()) == asked


async def test_of_two_proxies_a_restarted_one_gets_the_records_of_the_other() -> None:
    """On its hello, without any request or event."""
    async with open_proxy_group(2) as group:
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 4
        reader, done = group.reader(), group.reader("done", max_tokens=2)
        await done.read(0)
        await reader.read(0, tokens=4)
        await group.kill(0)
        await group.start(0)
        for key in ("k", "done"):
            await until_copied(group, key)

        await group.kill(1)
        gate.set()
        await reader.read_all(0)
        again = group.reader("done", max_tokens=2)
        await again.read(0)

    assert (text_in(reader), again.events) == (WANTED, done.events)


@pytest.mark.parametrize("mirror", ["async", "sync"])
async def test_the_owner_of_a_silent_stream_notices_a_restart_of_its_mirror(
    mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a short interruption and without any event: the new process announces itself."""
    # No watch, and no heartbeat.
    monkeypatch.setattr(ProxyPeer, "listen", lambda *_: asyncio.sleep(60))
    monkeypatch.setattr(replication, "_HEARTBEAT_S", 60.0)
    async with open_proxy_group(2, proxy={"mirror": mirror}) as group:
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 4
        reader = group.reader()
        reading = asyncio.create_task(reader.read(0))
        while len(reader.events) < 4:
            await asyncio.sleep(0.005)
        await group.kill(1)
        await group.start(1)
        await until_copied(group)

        await group.kill(0)
        await reading
        gate.set()
        await reader.read_all(1)

    assert (text_in(reader), reader.errors) == (WANTED, [])


async def test_a_draining_proxy_leaves_no_record_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the next one in a rolling restart, and the one before has just returned."""
    mirror = ProxyPeer.mirror

    async def mirror_slowly(
        self: ProxyPeer, updates: list[Update], sent: list[SentPrompt]
    ) -> BatchAnswer:
        await asyncio.sleep(0.3)
        return await mirror(self, updates, sent)

    async with open_proxy_group(2) as group:
        whole = group.reader()
        await whole.read(0)
        await group.kill(1)
        monkeypatch.setattr(ProxyPeer, "mirror", mirror_slowly)
        await group.start(1)
        await group.proxy(0).drain()
        await group.kill(0)

        again = group.reader()
        await again.read(1)

    assert again.events == whole.events
