"""Two proxies have every record, whoever was killed: of living streams, of those whose clients are away, and of finished ones."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvrs.protocol.mirror import BatchAnswer, Update
from kvrs.proxy.mirror import mirroring
from kvrs.proxy.mirror.peers import ProxyPeer
from tests.proxy.scripted_model import expected_ids, text_of
from tests.proxy.street import Street, open_street
from tests.proxy.test_proxy_kills import text_in

WANTED = "".join(map(text_of, expected_ids([1, 2, 3], 8)))


@pytest.fixture
async def street3() -> AsyncIterator[Street]:
    async with open_street(3) as street:
        yield street


async def until_copied(street: Street, key: str = "k", copies: int = 2) -> None:
    async with asyncio.timeout(10):
        while sum(key in street.book(n).records for n, each in enumerate(street.proxies) if each is not None) < copies:
            await asyncio.sleep(0.005)


async def test_the_last_copy_of_a_stream_that_waits_for_its_client_is_copied_on(street3: Street) -> None:
    """Its owner is killed, then whoever mirrored it, before the client asks again."""
    gate = street3.house.script.gate = asyncio.Event()
    street3.house.script.gate_at = 4
    reader = street3.reader()
    await reader.read(0, tokens=4)
    mirror = street3.book(0).records["k"].other
    assert mirror is not None
    await street3.kill(0)
    await until_copied(street3)

    await street3.kill(int(mirror[-1]))
    gate.set()
    await reader.read_all(3 - int(mirror[-1]))

    assert (text_in(reader), reader.errors) == (WANTED, [])


async def test_a_finished_answer_is_had_again_after_any_kills_one_by_one(street3: Street) -> None:
    """Whoever has it passes it on before the next one dies; no engine is asked again."""
    whole = street3.reader()
    await whole.read(0)
    asked = sum(len(one.bodies) for one in street3.house.instances.values())
    for number in (0, 1, 2, 0, 2, 1):
        await until_copied(street3)
        await street3.kill(number)
        await street3.start(number)
    await until_copied(street3)

    again = street3.reader()
    await again.read(1)

    assert (again.events, again.done) == (whole.events, True)
    assert sum(len(one.bodies) for one in street3.house.instances.values()) == asked


async def test_of_two_the_one_that_is_back_gets_what_the_other_has() -> None:
    """With its announcement: nobody has to ask or to write for it."""
    async with open_street(2) as street:
        gate = street.house.script.gate = asyncio.Event()
        street.house.script.gate_at = 4
        reader, done = street.reader(), street.reader("done", max_tokens=2)
        await done.read(0)
        await reader.read(0, tokens=4)
        await street.kill(0)
        await street.start(0)
        for key in ("k", "done"):
            await until_copied(street, key)

        await street.kill(1)
        gate.set()
        await reader.read_all(0)
        again = street.reader("done", max_tokens=2)
        await again.read(0)

    assert (text_in(reader), again.events) == (WANTED, done.events)


@pytest.mark.parametrize("mirror", ["async", "sync"])
async def test_the_owner_of_a_silent_stream_hears_that_its_mirror_is_another_process(
    mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was gone for a moment only, and the stream has nothing to say: the new process announces itself."""
    # Nobody looks.
    monkeypatch.setattr(ProxyPeer, "listen", lambda *_: asyncio.sleep(60))
    monkeypatch.setattr(mirroring, "_TOUCH_S", 60.0)
    async with open_street(2, proxy={"mirror": mirror}) as street:
        gate = street.house.script.gate = asyncio.Event()
        street.house.script.gate_at = 4
        reader = street.reader()
        reading = asyncio.create_task(reader.read(0))
        while len(reader.events) < 4:
            await asyncio.sleep(0.005)
        await street.kill(1)
        await street.start(1)
        await until_copied(street)

        await street.kill(0)
        await reading
        gate.set()
        await reader.read_all(1)

    assert (text_in(reader), reader.errors) == (WANTED, [])


async def test_a_proxy_that_is_going_leaves_nothing_that_only_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the next one in a rolling restart, and the one before it is just back."""
    mirror = ProxyPeer.mirror

    async def mirror_slowly(self: ProxyPeer, updates: list[Update]) -> BatchAnswer:
        await asyncio.sleep(0.3)
        return await mirror(self, updates)

    async with open_street(2) as street:
        whole = street.reader()
        await whole.read(0)
        await street.kill(1)
        monkeypatch.setattr(ProxyPeer, "mirror", mirror_slowly)
        await street.start(1)
        await street.proxy(0).drain()
        await street.kill(0)

        again = street.reader()
        await again.read(1)

    assert again.events == whole.events
