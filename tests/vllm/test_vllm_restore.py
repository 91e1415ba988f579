"""The kvrs connector in real vLLM: streams go on from the pages that an agent has, whatever is
wrong with these, and nothing is left of those that were aborted.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.ids import StreamId
from kvrs.protocol.instance import CheckpointTarget, KvrsParams, SourceRange
from kvrs_testkit.vllm_clients import Clients, clients
from kvrs_testkit.vllm_servers import (
    OLDEST_PYTHON_ENV,
    PAGE_TOKENS,
    PYTHON_ENV,
    VllmServers,
    connector_config,
)
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

PROMPT = list(range(5, 45))
TOKENS, CUT = 600, 300
LONG, LATE_CUT = 1400, 1000
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    """Two decode instances, d0 and d1, and an agent on the node of each. vLLM recomputes what fails
    in d0, and lets requests fail by it in d1.
    """
    config = connector_config(tmp_path_factory.mktemp("restore"))
    with VllmServers(config, os.environ[PYTHON_ENV]) as servers:
        servers.transfer["d0"] = {"kv_load_failure_policy": "recompute"}
        servers.transfer["d1"] = {"kv_load_failure_policy": "fail"}
        start(servers)
        yield servers


def start(servers: VllmServers) -> None:
    """One server after the other: each takes the memory of three interpreters with torch."""
    servers.start(*(str(node.agent_id) for node in servers.config.cluster.nodes))
    for name in servers.names:
        servers.start(name)
        servers.wait_ready(name)


Place = tuple[NodeSettings, InstanceSettings]


def places(servers: VllmServers) -> tuple[Place, Place]:
    first, second = servers.config.cluster.instances()
    return first, second


def to(node: NodeSettings, reserved_bytes: int = 8 << 20) -> list[CheckpointTarget]:
    return [CheckpointTarget(node.agent_id, reserved_bytes)]


def stream_of(name: str) -> StreamId:
    return StreamId(name.encode().hex().ljust(32, "0")[:32])


async def saved(
    client: Clients, place: Place, node: NodeSettings, name: str
) -> tuple[list[int], SourceRange]:
    """A stream of `CUT` tokens under a salt of its own, and what an agent has of it."""
    params = KvrsParams(stream_of(name), 1, len(PROMPT), checkpoints=to(node))
    ids = await client.generate(place[1], PROMPT, CUT, params, salt=name)
    source = await client.source(node, params.stream)
    assert source.pages * PAGE_TOKENS >= 0.9 * CUT
    return ids, source


async def restored(
    client: Clients,
    place: Place,
    name: str,
    cut: list[int],
    source: SourceRange,
    **more: object,
) -> tuple[list[int], int, int]:
    """The rest of a stream at another instance; how many pages it loaded, and found damaged."""
    before = await client.report(place[1])
    params = KvrsParams(stream_of(name), 2, len(PROMPT), sources=[source], **more)  # type: ignore[arg-type]
    rest = await client.generate(place[1], PROMPT + cut, TOKENS - len(cut), params, salt=name)
    after = await client.report(place[1])
    assert after.off_reason is None
    return (
        rest,
        after.pages_loaded - before.pages_loaded,
        after.pages_damaged - before.pages_damaged,
    )


def flip_a_bit(servers: VllmServers, page: bytes) -> None:
    """In every copy of this page that agents have, those of equal streams included."""
    found = 0
    for path in Path(servers.config.backup.directory).glob("**/segment-*"):
        content, start = path.read_bytes(), -1
        while (start := content.find(page, start + 1)) >= 0:
            found += 1
            with path.open("r+b") as file:
                file.seek(start + len(page) // 2)
                file.write(bytes([page[len(page) // 2] ^ 1]))
    assert found


@pytest.mark.parametrize("at", ["d0", "d1"])
async def test_pages_negated_under_right_checksums_change_the_tail(
    servers: VllmServers, at: str
) -> None:
    """Loaded pages are used: attention reads what the agent has."""
    first, second = places(servers)
    here, there = (second, first) if at == "d0" else (first, second)
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client:
        calm = await client.generate(there[1], PROMPT, TOKENS, salt=f"calm {at}")
        name = f"good {at}"
        cut, source = await saved(client, here, here[0], name)
        assert await restored(client, there, name, cut, source) == (calm[CUT:], source.pages, 0)

        name = f"bad {at}"
        cut, source = await saved(client, here, here[0], name)
        tags = await client.tags(here[1], PROMPT + cut, name)
        pages = await client.read_pages(here[1], here[0], tags[: source.pages])
        for page in pages:
            page[3::4] = bytes(byte ^ 0x80 for byte in page[3::4])  # Signs of float32.
        spoilt = stream_of(f"spoilt {at}")
        await client.write_pages(here[1], there[0], spoilt, tags[: source.pages], pages)
        source = await client.source(there[0], spoilt)
        rest, loaded, damaged = await restored(client, there, name, cut, source)
        assert (loaded, damaged) == (source.pages, 0)
        assert rest != calm[CUT:]


@pytest.mark.parametrize("bad", [0, 5])
@pytest.mark.parametrize("at", ["d0", "d1"])
async def test_a_page_with_a_flipped_bit_is_computed_and_saved_again(
    servers: VllmServers, at: str, bad: int
) -> None:
    """With either policy of vLLM for loads that fail, since none does; also the first page, at
    which `recompute` asks a connector that goes on offering it without an end.
    """
    first, second = places(servers)
    here, there = (second, first) if at == "d0" else (first, second)
    name = f"flip {bad} {at}"
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client:
        calm = await client.generate(there[1], PROMPT, TOKENS, salt=f"calm of {name}")
        cut, source = await saved(client, here, here[0], name)
        tags = await client.tags(here[1], PROMPT + cut, name)
        pages = await client.read_pages(here[1], here[0], tags[: source.pages])
        flip_a_bit(servers, bytes(pages[bad]))

        found = await restored(client, there, name, cut, source, checkpoints=to(there[0]))

        assert found == (calm[CUT:], bad, 1)
        again = await client.source(there[0], stream_of(name))
        assert again.pages >= source.pages
        whole = await client.read_pages(there[1], there[0], tags[: source.pages])
        assert whole[:bad] == pages[:bad]


async def test_200_aborts_in_mid_load_and_mid_save_leave_nothing(servers: VllmServers) -> None:
    """After 5 s no block is pinned or used, no page staged, and streams are restored as before."""
    first, second = places(servers)
    choose = random.Random(7)
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client:
        names = [f"abort {number}" for number in range(8)]
        stored = await asyncio.gather(*(saved(client, first, first[0], name) for name in names))

        async def abort(number: int) -> None:
            name, (cut, source) = names[number % 8], stored[number % 8]
            stream = stream_of(f"abort again {number}")
            node, instance = second if number % 3 else first
            # No proxy gives the agent's room back.
            target = to(node, 1 << 20)
            params = KvrsParams(stream, 2, len(PROMPT), sources=[source], checkpoints=target)
            salt = name if number % 2 else f"{name} {number}"
            with suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(choose.random() * 0.6):
                    await client.generate(instance, PROMPT + cut, 1000, params, salt=salt)

        for batch in range(5):
            await asyncio.gather(*(abort(40 * batch + number) for number in range(40)))
        await asyncio.sleep(5.0)

        for _, instance in (first, second):
            report = await client.report(instance)
            assert (report.pinned_blocks, report.off_reason) == (0, None)
            assert report.lag_pages == 0
            counters = servers.counters(str(instance.id))
            assert counters["running"] == 0
            assert counters["cache_usage"] == 0
        calm = await client.generate(second[1], PROMPT, TOKENS, salt="calm after aborts")
        cut, source = await saved(client, first, first[0], "after aborts")
        assert await restored(client, second, "after aborts", cut, source) == (
            calm[CUT:],
            source.pages,
            0,
        )


async def killed_and_restored(servers: VllmServers) -> None:
    """All but the last block of a stream's history is loaded, though its prompt is short and nearly
    all of it was generated; none of a wrong page, and the tokens are the same.
    """
    (_, d0), (n1, d1) = places(servers)
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client:
        calm = await client.generate(d1, PROMPT, LONG, salt="calm")
        loaded = (await client.report(d1)).pages_loaded
        stream = stream_of("killed")
        first = KvrsParams(stream, 1, len(PROMPT), checkpoints=to(n1))
        cut = await client.generate(d0, PROMPT, LONG, first, kill_at=LATE_CUT)
        assert LATE_CUT <= len(cut) < LONG

        source = await client.source(n1, stream)
        assert source.pages * PAGE_TOKENS >= 0.95 * (len(PROMPT) + len(cut))
        again = KvrsParams(stream, 2, len(PROMPT), sources=[source])
        rest = await client.generate(d1, PROMPT + cut, LONG - len(cut), again)

        assert cut + rest == calm
        report = await client.report(d1)
        assert report.pages_loaded - loaded == source.pages
        assert report.off_reason is None
        # Parameters of anybody else are served without pages.
        forged = KvrsParams(stream, 3, len(PROMPT), sources=[source])
        servers.secret, own = b"x" * 32, servers.secret
        assert await client.generate(d1, PROMPT, 20, forged, salt="forged") == calm[:20]
        servers.secret = own
        assert (await client.report(d1)).pages_loaded == report.pages_loaded


async def test_a_killed_server_s_stream_is_restored_from_an_agent(servers: VllmServers) -> None:
    await killed_and_restored(servers)


async def test_preempted_streams_are_restored_from_their_own_pages(servers: VllmServers) -> None:
    """In a cache for half of the streams blocks go from one to another while they are saved."""
    first, second = places(servers)
    servers.flags["d0"] = ["--num-gpu-blocks-override", "70"]
    servers.start("d0")
    await asyncio.to_thread(servers.wait_ready, "d0")
    prompts = {f"full {number}": [*range(5 + number, 45 + number)] for number in range(12)}
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client:

        async def cut(name: str) -> list[int]:
            target = to(second[0], 1 << 20)
            params = KvrsParams(stream_of(name), 1, len(PROMPT), checkpoints=target)
            return await client.generate(first[1], prompts[name], CUT, params, salt=name)

        async def rest(name: str, ids: list[int]) -> tuple[list[int], int]:
            # At once: no proxy renews its lease.
            source = await client.source(second[0], stream_of(name))
            params = KvrsParams(stream_of(name), 2, len(PROMPT), sources=[source])
            history, tokens = prompts[name] + ids, TOKENS - CUT
            return await client.generate(
                second[1], history, tokens, params, salt=name
            ), source.pages

        async def whole(name: str) -> list[int]:
            return await client.generate(second[1], prompts[name], TOKENS, salt=f"calm {name}")

        before = await client.report(second[1])
        cuts = await asyncio.gather(*map(cut, prompts))
        rests = await asyncio.gather(*map(rest, prompts, cuts))
        after = await client.report(second[1])
        calm = await asyncio.gather(*map(whole, prompts))

        assert servers.counters("d0")["preemptions"] > 0
        assert (await client.report(first[1])).off_reason is None
        assert [ids + more for ids, (more, _) in zip(cuts, rests, strict=True)] == calm
        pages = sum(pages for _, pages in rests)
        assert after.pages_loaded - before.pages_loaded == pages
        assert pages * PAGE_TOKENS >= 0.5 * CUT * len(prompts)


@pytest.mark.parametrize("oldest", ["d0", "d1"])
async def test_streams_move_between_the_oldest_and_the_newest_version(
    tmp_path: Path, oldest: str
) -> None:
    if OLDEST_PYTHON_ENV not in os.environ:
        pytest.skip(f"{OLDEST_PYTHON_ENV} names no interpreter")
    others = {oldest: os.environ[OLDEST_PYTHON_ENV]}
    with VllmServers(connector_config(tmp_path), os.environ[PYTHON_ENV], **others) as servers:
        start(servers)
        await killed_and_restored(servers)
