"""Proxies are killed at any moment, and brought back; clients resume."""

import asyncio
import signal
from pathlib import Path
from random import Random

import msgspec
import pytest

from tests.proxy.scripted_model import expected_ids, text_of
from tests.proxy.street import Reader, Street, open_street
from tests.proxy.test_proxy_process import process_of

TOKENS = 40


def text_in(reader: Reader) -> str:
    choices = [msgspec.json.decode(event)["choices"] for event in reader.events]
    return "".join(each[0]["text"] for each in choices if each)


def _is_safe(street: Street, reader: Reader) -> bool:
    """Whether two proxies have its stream."""
    mirrors = [proxy._mirror for proxy in street.proxies if proxy is not None]
    living = [mirror._streams[reader.key].outbox for mirror in mirrors if mirror is not None and reader.key in mirror._streams]
    return reader.done or any(outbox.mirror is not None and outbox.acked >= 0 for outbox in living)


async def _kill_now_and_then(street: Street, readers: list[Reader], random: Random, kills: int) -> None:
    for _ in range(kills):
        # Two deaths at a time are more than one mirror survives.
        async with asyncio.timeout(20):
            while not all(_is_safe(street, reader) for reader in readers):
                await asyncio.sleep(0.005)
        await asyncio.sleep(random.uniform(0.01, 0.12))
        number = random.randrange(len(street.proxies))
        await street.kill(number)
        await asyncio.sleep(random.uniform(0.0, 0.05))
        await street.start(number)
        await street.know_each_other()


@pytest.mark.parametrize(("seed", "count", "mirror"), [(1, 2, "async")])
async def test_no_token_is_lost_repeated_or_different(seed: int, count: int, mirror: str) -> None:
    """Whatever proxy dies whenever, every client has its stream in the end."""
    random = Random(seed)
    async with open_street(count, proxy={"mirror": mirror}) as street:
        # On a slow machine the kills must not come when all is over.
        gate = street.house.script.gate = asyncio.Event()
        street.house.script.gate_at, street.house.script.pause_s = TOKENS - 5, 0.005
        readers = [street.reader(f"k{n}", prompt=[n, n + 1, seed], max_tokens=TOKENS) for n in range(12)]
        reading = [asyncio.create_task(reader.read_all(n % count)) for n, reader in enumerate(readers)]

        await _kill_now_and_then(street, readers, random, kills=6)
        gate.set()
        await asyncio.gather(*reading)

    for n, reader in enumerate(readers):
        assert text_in(reader) == "".join(map(text_of, expected_ids([n, n + 1, seed], TOKENS)))
    assert sum(len(reader.statuses) for reader in readers) > len(readers), "somebody had to resume"


async def test_a_process_that_is_killed_is_survived(tmp_path: Path) -> None:
    """SIGKILL of a real one; the other one is here."""
    async with open_street(2) as street:
        gate = street.house.script.gate = asyncio.Event()
        street.house.script.gate_at = 4
        proxy = street.proxy(0)
        street.proxies[0] = None
        await proxy.close()
        config = tmp_path / "kvrs.yaml"
        document = street.configs[0].model_dump(mode="json")
        instances = [one for node in document["cluster"]["nodes"] for one in node["instances"]]
        for page_port, one in enumerate(instances, 1):
            one["page_port"] = page_port
        config.write_bytes(msgspec.json.encode(document))
        async with process_of(config) as (started, _):
            await street.know_each_other()
            mirror = street.proxy(1)._mirror
            assert mirror is not None
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
