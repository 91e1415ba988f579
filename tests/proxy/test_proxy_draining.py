"""Instances and proxies that are told to end: what they have goes on elsewhere first."""

import asyncio
import signal

import pytest

from kvrs.config import Config
from kvrs.proxy import server, watchdog
from kvrs.proxy.mirror.keys import Asking
from kvrs.proxy.mirror.records import Record
from tests.proxy.conftest import HouseBuilder
from tests.proxy.house import House
from tests.proxy.street import open_street
from tests.proxy.test_proxy_deaths import all_exact, held_open, release


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that wait at a gate are not to be taken for silent ones."""
    monkeypatch.setattr(watchdog, "SHORTEST_SILENCE_S", 60.0)


async def test_streams_leave_an_instance_that_drains(build: HouseBuilder) -> None:
    """While it still runs: it is up, and is neither fenced nor blamed."""
    house = await build()
    asked = await held_open(house, count=4)

    house.instances["d0"].draining = True
    await house.until(lambda: _all_on(house, "d1"))
    release(house)

    assert await all_exact(asked)
    state = await house.state()
    assert {row["cause"] for row in state["recoveries"]} == {"moved: its instance is about to end"}
    assert (await house.health())["d0"] == "up"
    assert "POST /kvrs/v1/fence" not in house.instances["d0"].calls


async def test_the_only_one_of_its_kind_keeps_its_streams_until_another_one_comes(build: HouseBuilder) -> None:
    """It says so again and again, for that."""
    house = await build()
    await house.instances["d1"].kill()
    await house.until_health(d1="down")
    asked = await held_open(house, count=2)

    house.instances["d0"].draining = True
    await house.until(lambda: _drains(house, "d0"))
    alone = [row["decode"] for row in (await house.state())["streams"]]
    await house.instances["d1"].restart()
    await house.until(lambda: _all_on(house, "d1"))
    release(house)

    assert alone == ["d0", "d0"]
    assert await all_exact(asked)
    assert {row["cause"] for row in (await house.state())["recoveries"]} == {"moved: its instance is about to end"}


async def test_a_proxy_without_a_peer_does_not_hand_its_streams_to_nobody() -> None:
    """A stream with a key that cannot be resumed anywhere may run to its end like any other."""
    async with open_street(2, proxy={"drain_s": 30.0}) as street:
        gate = street.house.script.gate = asyncio.Event()
        street.house.script.gate_at = 3
        await street.kill(1)
        mirror = street.proxy(0)._mirror
        assert mirror is not None
        async with asyncio.timeout(10):
            while mirror.peers.live:
                await asyncio.sleep(0.005)
        reader = street.reader()
        reading = asyncio.create_task(reader.read(0))
        async with asyncio.timeout(10):
            while len(reader.events) < 3:
                await asyncio.sleep(0.005)

        draining = asyncio.create_task(street.proxy(0).drain())
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(reading, draining)

    assert reader.done
    assert reader.errors == []


async def _all_on(house: House, name: str) -> bool:
    return {row["decode"] for row in (await house.state())["streams"]} == {name}


async def _drains(house: House, name: str) -> bool:
    rows = (await house.state())["instances"]
    return any(row["id"] == name and row["load"]["draining"] for row in rows)


async def test_a_stream_that_ends_as_it_is_moved_is_forgotten_by_everybody(build: HouseBuilder) -> None:
    """Its last token and its move come at once, and the policy asks for an attempt of a stream that is over."""
    house = await build(policy={"recovery": {"gather_s": 0.0}})
    asked = await held_open(house)
    driver = house.proxy._driver
    assert driver is not None
    (live,) = driver.streams.values()
    live.journal.finish_reason, live.journal.usage_sent = "length", True

    assert live.instance is not None
    house.instances[live.instance].draining = True
    await asyncio.gather(*asked)

    assert sum(driver.policy.snapshot()["streams"].values()) == 0


async def test_a_stream_that_was_being_looked_for_when_its_proxy_was_told_to_end_does_not_begin_there() -> None:
    """All that lived there has been handed over by then, and this one would be cut off."""
    async with open_street(2) as street:
        mirror, api = street.mirror(0), street.proxy(0)._api
        assert api is not None
        find = mirror.find

        async def told_meanwhile(asking: Asking) -> Record | None:
            api.draining = True
            return await find(asking)

        mirror.find = told_meanwhile  # type: ignore[method-assign]
        reader = street.reader()

        assert await reader.read(0) == 503
        await reader.read_all(1)

    assert reader.errors == ["shutting_down"]


async def test_a_bug_while_a_proxy_drains_does_not_end_like_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks at its exit status has to know."""
    closed: list[bool] = []

    class Buggy:
        port = admin_port = 0

        def __init__(self, *_: object) -> None: ...

        async def start(self) -> None:
            signal.raise_signal(signal.SIGTERM)

        async def run(self) -> None:
            await asyncio.Event().wait()

        async def drain(self) -> None:
            raise ZeroDivisionError

        async def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(server, "Proxy", Buggy)

    with pytest.raises(ZeroDivisionError):
        await server.serve(Config(), b"")

    assert closed == [True]
