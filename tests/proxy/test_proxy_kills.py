"""Proxies are killed at any moment, and brought back; clients resume."""

import asyncio
import signal
from pathlib import Path
from random import Random

import msgspec
import pytest

from kvrs.proxy.server import Proxy
from tests.proxy.scripted_model import expected_ids, text_of
from tests.proxy.street import Reader, Street, open_street
from tests.proxy.test_proxy_process import process_of

TOKENS = 40


def text_in(reader: Reader) -> str:
    choices = [msgspec.json.decode(event)["choices"] for event in reader.events]
    return "".join(each[0]["text"] for each in choices if each)


def _is_safe(street: Street, reader: Reader) -> bool:
    """Whether two proxies have its stream, or nobody has anything of it."""
    books = [proxy._mirror.book for proxy in street.proxies if proxy is not None and proxy._mirror is not None]
    found = [book.records[reader.key] for book in books if reader.key in book.records]
    latest = max((record.owner_epoch for record in found), default=-1)
    living = [mirrored for proxy in street.proxies if (mirrored := _living(proxy, reader)) is not None]
    return reader.last is None if not found else all(living) and sum(each.owner_epoch == latest for each in found) > 1


def _living(proxy: Proxy | None, reader: Reader) -> bool | None:
    """Of a stream that lives there: whether its mirror knows of it."""
    if proxy is None or proxy._mirror is None or (keyed := proxy._mirror._streams.get(reader.key)) is None:
        return None
    return keyed.outbox.mirror is not None and keyed.outbox.acked >= 0


async def _kill_now_and_then(street: Street, readers: list[Reader], random: Random, kills: int) -> None:
    for left in reversed(range(kills)):
        number = random.randrange(len(street.proxies))
        async with asyncio.timeout(20):
            # Two deaths at a time are more than two copies survive.
            while not all(_is_safe(street, reader) for reader in readers):
                await asyncio.sleep(0.001)
            # The last one hits somebody for certain.
            while not left and not (there := [n for n, each in enumerate(street.proxies) if _living(each, readers[3])]):
                await asyncio.sleep(0.001)
        number = number if left else there[0]
        await street.kill(number)
        street.house.script.tokens_per_event = random.choice((1, 1, 2, 3))
        await asyncio.sleep(random.uniform(0.0, 0.05))
        await street.start(number)
        await asyncio.sleep(random.uniform(0.0, 0.1))


@pytest.mark.parametrize(
    ("seed", "count", "mirror"), [(1, 2, "async"), (2, 3, "async"), (3, 3, "sync"), (4, 2, "sync"), (5, 4, "async")]
)
async def test_no_token_is_lost_repeated_or_different(seed: int, count: int, mirror: str, model: str) -> None:
    """Whatever proxy dies whenever, every client has its stream in the end, and may have it again."""
    random = Random(seed)
    async with open_street(count, proxy={"mirror": mirror}, model=model) as street:
        # On a slow machine the kills must not come when all is over.
        gate = street.house.script.gate = asyncio.Event()
        street.house.script.gate_at, street.house.script.pause_s = TOKENS - 5, 0.005
        readers = [street.reader(f"k{n}", prompt=[n, n + 1, seed], max_tokens=2 + n % 4 * 13) for n in range(12)]
        reading = [asyncio.create_task(reader.read_all(n + n // 4)) for n, reader in enumerate(readers)]

        await _kill_now_and_then(street, readers, random, kills=6)
        gate.set()
        await asyncio.gather(*reading)
        again = [street.reader(reader.key, **reader.fields) for reader in readers]
        await asyncio.gather(*(each.read_all(random.randrange(count)) for each in again))

    for n, reader in enumerate(readers):
        wanted = "".join(map(text_of, expected_ids([n, n + 1, seed], 2 + n % 4 * 13)))
        assert (text_in(reader), text_in(again[n])) == (wanted, wanted), reader
    assert sum(len(reader.statuses) for reader in readers) > len(readers), "somebody had to resume"


async def test_a_process_that_is_killed_is_survived(tmp_path: Path) -> None:
    """SIGKILL of a real one; the other one is here."""
    async with open_street(2) as street:
        gate = street.house.script.gate = asyncio.Event()
        street.house.script.gate_at = 4
        proxy = street.proxy(0)
        street.proxies[0] = None
        await proxy.close()
        async with process_of(street.config_file(0, tmp_path)) as (started, _):
            await street.know_each_other()
            mirror = street.mirror(1)
            async with asyncio.timeout(10):
                while not mirror.peers.live:
                    await asyncio.sleep(0.01)
            reader = street.reader()
            reading = asyncio.create_task(reader.read(0))
            async with asyncio.timeout(10):
                while len(reader.events) < 4 or reader.last is None:
                    await asyncio.sleep(0.01)

            started.send_signal(signal.SIGKILL)
            await reading
            gate.set()
            await reader.read_all(1)

    assert text_in(reader) == "".join(map(text_of, expected_ids([1, 2, 3], 8)))
