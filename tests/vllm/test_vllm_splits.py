"""A history at real vLLM whose front is computed while its back comes from an agent: by the calls
that a proxy makes.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvrs.config.cluster import InstanceSettings
from kvrs.core.model import actions as act
from kvrs.ids import StreamId
from kvrs.protocol.instance import Capability, CheckpointTarget, KvrsParams, SourceRange
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.backends.bodies import Call, decode_call
from kvrs.proxy.backends.cluster import new_engine_links, open_backends
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs.proxy.wire.upstream import EventReader
from kvrs_testkit.vllm_clients import Clients, clients
from kvrs_testkit.vllm_servers import PAGE_TOKENS, PYTHON_ENV, VllmServers, connector_config
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

# 46 pages, of which 20 are computed at once and 26 loaded, and 28 tokens.
PROMPT = [5 + 7 * index % 480 for index in range(900)]
CUT, TOKENS = 600, 700
FRONT = 20
HISTORY = len(PROMPT) + CUT
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    """Two decode instances, d0 and d1, and an agent on the node of each."""
    config = connector_config(tmp_path_factory.mktemp("split"))
    with VllmServers(config, os.environ[PYTHON_ENV]) as servers:
        servers.start(*(str(node.agent_id) for node in config.cluster.nodes))
        for name in servers.names:
            servers.start(name)
            servers.wait_ready(name)
        yield servers


@asynccontextmanager
async def at(servers: VllmServers, instance: InstanceSettings) -> AsyncIterator[Backend]:
    """The instance, as proxies have it."""
    async with new_engine_links(servers.config, servers.secret) as links:
        backend = open_backends(servers.config, links, servers.secret)[instance.id]
        info = await backend.info()
        assert Capability.SPLIT in info.capabilities
        yield backend


async def saved(
    servers: VllmServers, client: Clients, salt: str
) -> tuple[list[int], list[int], SourceRange]:
    """A stream up to its cut, its rest, and what the agent of the other node has of it."""
    (_, d0), (n1, d1) = servers.config.cluster.instances()
    calm = await client.generate(d1, PROMPT, TOKENS, salt=f"calm {salt}")
    target = CheckpointTarget(n1.agent_id, 16 << 20)
    params = KvrsParams(stream_of(salt), 1, len(PROMPT), checkpoints=[target])
    cut = await client.generate(d0, PROMPT, CUT, params, salt=salt)
    assert cut == calm[:CUT]
    source = await client.source(n1, stream_of(salt))
    assert source.pages * PAGE_TOKENS >= 0.9 * HISTORY
    return cut, calm[CUT:], source


def stream_of(name: str) -> StreamId:
    return StreamId(name.encode().hex().ljust(32, "0")[:32])


def split_call(servers: VllmServers, cut: Sequence[int], source: SourceRange, salt: str) -> Call:
    """The decode call of the next attempt, behind pages from `FRONT` on."""
    fields: dict[str, Any] = {
        "model": servers.model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    journal = Journal(
        stream=stream_of(salt),
        parsed=read(COMPLETIONS, msgspec.json.encode(fields)),
        arrived_s=time.monotonic(),
        seed=None,
        prompt_ids=PROMPT,
    )
    journal.attempt = 2
    journal.output_ids.extend(cut)
    run = act.PageRange(source.id, FRONT, source.pages - FRONT, source.generation)
    return decode_call(journal, 2, [run], (), None, exact=False)


def ids_of(events: EventReader) -> list[int]:
    return [
        token
        for payload in events.payloads
        if payload != b"[DONE]"
        for choice in msgspec.json.decode(payload)["choices"]
        for token in choice["token_ids"]
    ]


async def fetched(backend: Backend, salt: str) -> tuple[int, int]:
    """Tokens of the history that were loaded, and computed by the decode call itself."""
    (found,) = [each for each in await backend.fetches() if each.stream == stream_of(salt)]
    return found.loaded_tokens, found.computed_tokens


async def test_the_front_is_computed_and_the_back_loaded(servers: VllmServers) -> None:
    """By the counts of vLLM and of the connector they are the whole history, and the tokens are
    those of a stream that was not cut.
    """
    _, (_, d1) = servers.config.cluster.instances()
    async with (
        asyncio.timeout(DEADLINE_S),
        clients(servers) as client,
        at(servers, d1) as backend,
    ):
        cut, rest, source = await saved(servers, client, "split")
        before, events = servers.counters("d1"), EventReader()

        await backend.decode(split_call(servers, cut, source, "split"), events)

        assert ids_of(events) == rest
        after = servers.counters("d1")
        sources = ("local_tokens", "pulled_tokens", "computed_tokens")
        local, loaded, computed = (int(after[each] - before[each]) for each in sources)
        front, back = FRONT * PAGE_TOKENS, (source.pages - FRONT) * PAGE_TOKENS
        # vLLM counts the front twice: as computed, and as found.
        assert (local, loaded, computed) == (front, back, front + HISTORY - front - back)
        assert await fetched(backend, "split") == (back, HISTORY - front - back)
        assert (await client.report(d1)).off_reason is None


async def test_a_front_that_never_comes_holds_a_stream_for_the_deadline(
    servers: VllmServers,
) -> None:
    _, (_, d1) = servers.config.cluster.instances()
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client, at(servers, d1) as backend:
        cut, rest, source = await saved(servers, client, "alone")
        source = msgspec.structs.replace(source, first_page=FRONT, pages=source.pages - FRONT)
        params = KvrsParams(stream_of("alone"), 2, len(PROMPT), sources=[source])
        began_s, first_s = time.monotonic(), []

        ids = await client.generate(
            d1,
            PROMPT + cut,
            TOKENS - CUT,
            params,
            salt="alone",
            on_ids=lambda _: first_s.append(time.monotonic()),
        )

        assert ids == rest
        assert 2.0 <= first_s[0] - began_s < 6.0
        assert await fetched(backend, "alone") == (0, HISTORY)


async def test_a_client_that_leaves_ends_both_requests(servers: VllmServers) -> None:
    _, (_, d1) = servers.config.cluster.instances()
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client, at(servers, d1) as backend:
        cut, rest, source = await saved(servers, client, "gone")
        for delay_s in (0.0, 0.01, 0.05, 0.2):
            call = split_call(servers, cut, source, "gone")
            decoded = asyncio.create_task(backend.decode(call, EventReader()))
            await asyncio.sleep(delay_s)
            decoded.cancel()
            await asyncio.wait([decoded])

        await asyncio.sleep(3.0)
        counters = servers.counters("d1")
        assert (counters["running"], counters["cache_usage"]) == (0, 0)
        assert (await client.report(d1)).pinned_blocks == 0
        events = EventReader()
        await backend.decode(split_call(servers, cut, source, "gone"), events)
        assert ids_of(events) == rest
