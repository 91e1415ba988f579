"""Proxies that are told to end at the same moment."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, Reader, open_proxy_group
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.proxy_process import process_of, until_logged
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.proxy.mirror.test_proxy_kills import text_in

pytestmark = [pytest.mark.process, pytest.mark.network]

WANTED = "".join(map(text_of, expected_ids([1, 2, 3], 8)))
STREAMS = 12


@asynccontextmanager
async def with_processes(
    count: int, numbers: Sequence[int], directory: Path
) -> AsyncIterator[tuple[MultiProxyCluster, list[asyncio.subprocess.Process]]]:
    """A group in which the proxies of these numbers are processes; streams stop at token 4."""
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(
            open_proxy_group(count, proxy={"drain_s": WITHIN_S})
        )
        group.system.script.gate, group.system.script.gate_at = asyncio.Event(), 4
        running = []
        for number in numbers:
            proxy, group.proxies[number] = group.proxy(number), None
            await proxy.close()
        for number in numbers:
            started = process_of(group.config_file(number, directory))
            running.append((await stack.enter_async_context(started))[0])
        yield group, running


async def begun(readers: Sequence[Reader]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while any(len(reader.events) < 4 for reader in readers):
            await asyncio.sleep(0.01)


async def until_leaving(running: Sequence[asyncio.subprocess.Process]) -> None:
    """End them at once, until each admits no new stream and knows of the other one."""
    for process in running:
        process.send_signal(signal.SIGTERM)
    ended = (until_logged(process, b"draining", b"proxy leaves") for process in running)
    await asyncio.gather(*ended)


async def test_a_third_proxy_takes_what_only_two_that_end_together_have(tmp_path: Path) -> None:
    """No stream is handed from one to the other; both are gone before the streams go on."""
    async with with_processes(3, (0, 1), tmp_path) as (group, running):
        third = group.mirror(2)
        async with asyncio.timeout(WITHIN_S):
            while len(third.peers.live) < 2:
                await asyncio.sleep(0.01)
        readers = [group.reader(f"k{n}") for n in range(STREAMS)]
        left = [group.reader(f"left-{n}") for n in range(STREAMS)]
        await asyncio.gather(*(reader.read(n % 2, tokens=4) for n, reader in enumerate(left)))
        reading = [asyncio.create_task(each.read_all(n % 2)) for n, each in enumerate(readers)]
        await begun(readers)

        await until_leaving(running)
        async with asyncio.timeout(WITHIN_S):
            assert [await process.wait() for process in running] == [0, 0]
        gate = group.system.script.gate
        assert gate is not None
        gate.set()
        await asyncio.gather(*reading, *(reader.read_all(2) for reader in left))

    assert [text_in(reader) for reader in (*readers, *left)] == [WANTED] * 2 * STREAMS
    assert {code for reader in readers for code in reader.errors} >= {"handed_over"}


async def test_two_of_two_that_end_together_finish_their_streams(tmp_path: Path) -> None:
    """Within `proxy.drain_s`; that of a client that lost its connection is resumed at either."""
    async with with_processes(2, (0, 1), tmp_path) as (group, running):
        cut, readers = group.reader("cut"), [group.reader(f"k{n}") for n in range(STREAMS)]
        reading = [asyncio.create_task(each.read(n % 2)) for n, each in enumerate(readers)]
        await asyncio.gather(begun(readers), cut.read(0, tokens=4))

        await until_leaving(running)
        refused, resuming = group.reader("new"), asyncio.create_task(cut.read(1))
        await refused.read(0)
        await asyncio.sleep(1.0)  # They would have handed over what there was to be handed over.
        gate = group.system.script.gate
        assert gate is not None
        gate.set()
        await asyncio.gather(*reading, resuming)
        async with asyncio.timeout(WITHIN_S):
            assert [await process.wait() for process in running] == [0, 0]

    assert [text_in(reader) for reader in (cut, *readers)] == [WANTED] * (STREAMS + 1)
    assert [reader.statuses for reader in (cut, *readers)] == [[200, 200], *[[200]] * STREAMS]
    assert refused.errors == ["shutting_down"]


@pytest.mark.parametrize(
    "late_s",
    [
        pytest.param(0.65, id="while it is asked"),
        pytest.param(1.6, id="after it was asked in vain"),
    ],
)
async def test_one_that_reads_its_signal_late_is_handed_no_stream(
    tmp_path: Path, late_s: float
) -> None:
    """It is told to end at the same moment, and does not run while the other one looks around."""
    async with with_processes(2, (0, 1), tmp_path) as (group, running):
        readers = [group.reader(f"k{n}") for n in range(STREAMS)]
        reading = [asyncio.create_task(each.read(n % 2)) for n, each in enumerate(readers)]
        await begun(readers)

        running[1].send_signal(signal.SIGSTOP)
        for process in running:
            process.send_signal(signal.SIGTERM)
        await asyncio.sleep(late_s)
        running[1].send_signal(signal.SIGCONT)
        await until_logged(running[0], b"proxy leaves")
        await asyncio.sleep(1.0)  # They would have handed over what there was to be handed over.
        gate = group.system.script.gate
        assert gate is not None
        gate.set()
        await asyncio.gather(*reading)

    assert [text_in(reader) for reader in readers] == [WANTED] * STREAMS
    assert [reader.statuses for reader in readers] == [[200]] * STREAMS


async def test_streams_outlast_two_of_two_that_end_one_after_the_other(tmp_path: Path) -> None:
    """The second one has all of them when it is told to end, and the first one is back then."""
    (tmp_path / "again").mkdir()
    async with with_processes(2, (0, 1), tmp_path) as (group, (first, second)):
        readers = [group.reader(f"k{n}") for n in range(STREAMS)]
        left = [group.reader(f"left-{n}") for n in range(STREAMS)]
        await asyncio.gather(*(reader.read(n % 2, tokens=4) for n, reader in enumerate(left)))
        reading = [asyncio.create_task(each.read_all(n % 2)) for n, each in enumerate(readers)]
        await begun(readers)

        first.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WITHIN_S):
            assert await first.wait() == 0
        second.send_signal(signal.SIGTERM)
        await until_logged(second, b"draining")
        async with process_of(group.config_file(0, tmp_path / "again")):
            async with asyncio.timeout(WITHIN_S):
                assert await second.wait() == 0
            gate = group.system.script.gate
            assert gate is not None
            gate.set()
            await asyncio.gather(*reading, *(reader.read_all(0) for reader in left))

    assert [text_in(reader) for reader in (*readers, *left)] == [WANTED] * 2 * STREAMS


async def test_a_client_that_is_away_finds_two_of_two_that_end(tmp_path: Path) -> None:
    """No stream runs there any more, and both would have ended."""
    async with with_processes(2, (0, 1), tmp_path) as (group, running):
        left = [group.reader(f"left-{n}") for n in range(STREAMS)]
        await asyncio.gather(*(reader.read(n % 2, tokens=4) for n, reader in enumerate(left)))
        await until_leaving(running)
        await asyncio.sleep(1.5)
        gate = group.system.script.gate
        assert gate is not None
        gate.set()
        await asyncio.gather(*(reader.read_all(n % 2) for n, reader in enumerate(left)))
        async with asyncio.timeout(WITHIN_S):
            assert [await process.wait() for process in running] == [0, 0]

    assert [text_in(reader) for reader in left] == [WANTED] * STREAMS
