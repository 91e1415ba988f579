"""Proxies are killed at any moment and restarted, and clients resume their streams."""

import asyncio
import signal
from pathlib import Path
from random import Random

import msgspec
import pytest

from kvrs.proxy.server import Proxy
from kvrs_testkit.multi_proxy_cluster import (
    MultiProxyCluster,
    Reader,
    open_proxy_group,
    record_key,
)
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.proxy_process import process_of
from kvrs_testkit.scripted_model import expected_ids, text_of

pytestmark = [pytest.mark.process, pytest.mark.network]

TOKENS = 40


def text_in(reader: Reader) -> str:
    choices = [msgspec.json.decode(event)["choices"] for event in reader.events]
    return "".join(each[0]["text"] for each in choices if each)


def _has_two_copies(group: MultiProxyCluster, reader: Reader) -> bool:
    """True if two proxies have the stream, or none has anything of it."""
    books = [proxy.parts.mirror.book for proxy in group.proxies if proxy is not None]
    key = record_key(reader.key)
    found = [book.records[key] for book in books if key in book.records]
    latest = max((record.owner_epoch for record in found), default=-1)
    living = [
        mirrored for proxy in group.proxies if (mirrored := _is_mirrored(proxy, reader)) is not None
    ]
    return (
        reader.last is None
        if not found
        else all(living) and sum(each.owner_epoch == latest for each in found) > 1
    )


def _is_mirrored(proxy: Proxy | None, reader: Reader) -> bool | None:
    """True if the mirror of this proxy's stream has its header. None: it does not run here."""
    if proxy is None or (keyed := proxy.parts.mirror.streams.get(record_key(reader.key))) is None:
        return None
    return keyed.outbox.mirror is not None and keyed.outbox.acked is not None


async def _kill_repeatedly(
    group: MultiProxyCluster, readers: list[Reader], random: Random, kills: int
) -> None:
    """Kill and restart random proxies, each time after all streams have two copies."""
    for left in reversed(range(kills)):
        number = random.randrange(len(group.proxies))
        async with asyncio.timeout(WITHIN_S):
            # Two simultaneous deaths would be more than two copies survive.
            while not all(_has_two_copies(group, reader) for reader in readers):
                await asyncio.sleep(0.001)
            # The last kill hits the owner of a stream.
            while not left and not (
                there := [
                    n for n, each in enumerate(group.proxies) if _is_mirrored(each, readers[3])
                ]
            ):
                await asyncio.sleep(0.001)
        number = number if left else there[0]
        await group.kill(number)
        group.system.script.tokens_per_event = random.choice((1, 1, 2, 3))
        await asyncio.sleep(random.uniform(0.0, 0.05))
        await group.start(number)
        await asyncio.sleep(random.uniform(0.0, 0.1))


@pytest.mark.parametrize(
    ("seed", "count", "mirror"),
    [(1, 2, "async"), (2, 3, "async"), (3, 3, "sync"), (4, 2, "sync"), (5, 4, "async")],
)
async def test_no_token_is_lost_repeated_or_different(
    seed: int, count: int, mirror: str, model: str
) -> None:
    """After any kills every client gets its whole stream, and can have it replayed."""
    random = Random(seed)
    async with open_proxy_group(count, proxy={"mirror": mirror}, model=model) as group:
        # Keeps the streams open until all kills are done, also on a slow machine.
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at, group.system.script.pause_s = TOKENS - 5, 0.005
        readers = [
            group.reader(f"k{n}", prompt=[n, n + 1, seed], max_tokens=2 + n % 4 * 13)
            for n in range(12)
        ]
        reading = [
            asyncio.create_task(reader.read_all(n + n // 4)) for n, reader in enumerate(readers)
        ]

        await _kill_repeatedly(group, readers, random, kills=6)
        gate.set()
        await asyncio.gather(*reading)
        again = [group.reader(reader.key, **reader.fields) for reader in readers]
        await asyncio.gather(*(each.read_all(random.randrange(count)) for each in again))

    for n, reader in enumerate(readers):
        wanted = "".join(map(text_of, expected_ids([n, n + 1, seed], 2 + n % 4 * 13)))
        assert (text_in(reader), text_in(again[n])) == (wanted, wanted), reader
    assert sum(len(reader.statuses) for reader in readers) > len(readers), "no stream was resumed"


async def test_a_stream_survives_sigkill_of_a_proxy_process(tmp_path: Path) -> None:
    """The other proxy runs in the test."""
    async with open_proxy_group(2) as group:
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 4
        proxy = group.proxy(0)
        group.proxies[0] = None
        await proxy.close()
        async with process_of(group.config_file(0, tmp_path)) as (started, _):
            await group.know_each_other()
            mirror = group.mirror(1)
            async with asyncio.timeout(WITHIN_S):
                while not mirror.peers.live:
                    await asyncio.sleep(0.01)
            reader = group.reader()
            reading = asyncio.create_task(reader.read(0))
            async with asyncio.timeout(WITHIN_S):
                while len(reader.events) < 4 or reader.last is None:
                    await asyncio.sleep(0.01)

            started.send_signal(signal.SIGKILL)
            await reading
            gate.set()
            await reader.read_all(1)

    assert text_in(reader) == "".join(map(text_of, expected_ids([1, 2, 3], 8)))
