"""Real engines send their pages to a real store over sockets, while streams are served."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.file import Config, parse_config
from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import MEMORY, Capability
from kvrs.protocol.pages import CheckpointClaim, Tag, page_tags
from kvrs.transfer import checkpoint_backlog as backlog
from kvrs.transfer import checkpoint_sender
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import PullRequest
from kvrs.transfer.server import PageServer
from kvrs.transfer.store.directory import StoreDirectory, store_directory
from kvrs.transfer.store.host import HostStore
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.routes import make_routes
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import instance_client
from tests.engine.serving import SECRET

pytestmark = [pytest.mark.engine, pytest.mark.network]

AGENT, AGENTS_NODE = InstanceId("agent-n1"), NodeId("n1")
PAGE = 16


def page_of(instance: EngineInstance, page: int) -> bytes:
    assert isinstance(instance.worker.pool, KvPool), "one process"
    return bytes(instance.worker.pool.view(page))


class CountingStore(HostStore):
    """Remembers what it was sent."""

    sent: list[tuple[StreamId, Tag]]

    def begin(self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]) -> Any:
        self.sent += [(claim.stream, tag) for tag in tags]
        return super().begin(claim, first_page, tags)


@asynccontextmanager
async def agent(
    directory: Path, port: int = 0, capacity_bytes: int = 64 << 20
) -> AsyncIterator[tuple[CountingStore, int]]:
    """A store and its page port, as an agent has them."""
    loop = asyncio.get_running_loop()
    with StoreDirectory(directory) as place:
        store = CountingStore(
            AGENT, AGENTS_NODE, place, capacity_bytes, lease_s=30.0, clock=loop.time
        )
        store.sent = []

        settings = TransferSettings()
        links = SendingLinks(settings, SendingFaults(), AGENTS_NODE)
        server = PageServer(store, SECRET, settings, links)
        server.keep(store)
        port = await server.start("127.0.0.1", port)
        server.lend(place.path)
        try:
            yield store, port
        finally:
            await server.close()
            store.check()
            store.clear()


def cluster(model: Path, agent_port: int, **sections: Any) -> Config:
    prefill, decode, third = (
        {"id": name, "role": role}
        for name, role in (("p0", "prefill"), ("d0", "decode"), ("p1", "prefill"))
    )
    engine = {"pages": 512, **sections.pop("engine", {})}
    page_ports = free_ports(2)
    return parse_config(
        {
            "cluster": {
                "model": str(model),
                "engine": engine,
                "allow_faults": True,
                "nodes": [
                    {
                        "id": "n0",
                        "instances": [
                            {**prefill, "page_port": page_ports[0]},
                            {**decode, "page_port": page_ports[1]},
                        ],
                    },
                    {"id": "n1", "instances": [third], "agent": {"page_port": agent_port}},
                ],
            },
            "backup": {"mode": "remote", **sections.pop("backup", {})},
            **sections,
        }
    )


@asynccontextmanager
async def engine(
    config: Config, name: str
) -> AsyncIterator[tuple[EngineInstance, aiohttp.ClientSession]]:
    """An instance; when it is closed nothing is pinned any more."""
    instance = EngineInstance(config, InstanceId(name), 1, SECRET)
    async with instance_client(make_routes(instance), SECRET, name) as client:
        await instance.start()
        try:
            yield instance, client
            assert instance.failed() is None
            instance.checkpointer.check()
        finally:
            await instance.close()
    assert instance.checkpointer.lent_pages == 0
    instance.pages.check()
    assert instance.pages.free_pages == instance.pages.pages


def prompt_of(seed: int, tokens: int) -> list[int]:
    return [2 + (seed * 7919 + index * 31) % 500 for index in range(tokens)]


async def ask(
    client: aiohttp.ClientSession, stream: str, ids: list[int], max_tokens: int, **body: Any
) -> dict[str, Any]:
    kvrs = {
        "stream": stream,
        "attempt": 1,
        "prompt_tokens": len(ids),
        "checkpoints": [{"agent": AGENT, "reserved_bytes": 16 << 20}],
    }
    asked = {
        "prompt": ids,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with client.post(
        "/v1/completions", json={**asked, "kvrs": {**kvrs, **body.pop("kvrs", {})}, **body}
    ) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert isinstance(answer, dict)
        return answer


async def prefill_and_decode(
    prefill: aiohttp.ClientSession,
    decode: aiohttp.ClientSession,
    stream: str,
    ids: list[int],
    max_tokens: int,
) -> list[int]:
    """Run a stream as a proxy does; return its tokens."""
    done = await ask(prefill, stream, ids, 1, kv_transfer_params={"do_remote_decode": True})
    answer = await ask(
        decode, stream, ids, max_tokens, kv_transfer_params=done["kv_transfer_params"]
    )
    return list(answer["choices"][0]["token_ids"])


async def eventually(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.002)


@contextmanager
def stalling_server() -> Iterator[int]:
    """Accepts connections and never answers, like a stopped process."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        yield int(sock.getsockname()[1])


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_sender, "RETRY_S", 0.02)
    monkeypatch.setattr(backlog, "STUCK_S", 0.02)


async def test_prefill_and_decode_together_keep_whole_streams_at_the_agent(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Bit for bit what decode has, whole while the streams go on, and no page is sent twice."""
    streams = {f"s{seed}": prompt_of(seed, 70 + 37 * seed) for seed in range(4)}
    async with asyncio.timeout(180), agent(tmp_path / "store") as (store, port):
        config = cluster(tiny_model, port)
        async with (
            engine(config, "p0") as (prefill, to_prefill),
            engine(config, "d0") as (decode, to_decode),
        ):
            assert Capability.CHECKPOINT in prefill.info().capabilities
            answers = asyncio.gather(
                *(
                    prefill_and_decode(to_prefill, to_decode, stream, ids, 90)
                    for stream, ids in streams.items()
                )
            )
            # A stream that ended has nothing to bring: it is looked at while it runs.
            await eventually(
                lambda: all(
                    store.held(StreamId(stream)) > len(ids) // PAGE
                    for stream, ids in streams.items()
                )
            )
            outputs = await answers
            await eventually(
                lambda: (
                    prefill.load().checkpoint_lag_pages == decode.load().checkpoint_lag_pages == 0
                )
            )

            for (stream, ids), output in zip(streams.items(), outputs, strict=True):
                tags = page_tags(decode.root(""), ids + output[:-1], PAGE)
                held = store.held(StreamId(stream))
                # What was filled in the last moments of a stream need not be there; what was filled
                # before must.
                assert len(tags) - 2 <= held <= len(tags)
                ours = decode.pages.match(tags[:held])
                assert len(ours) == held
                async with store.pinned(PullRequest(tuple(tags[:held]))) as theirs:
                    assert [bytes(page) for page in theirs.pages] == [
                        page_of(decode, page) for page in ours
                    ]
                decode.pages.release(ours)
            assert len(store.sent) == len(set(store.sent))


async def test_an_engine_of_the_agents_node_copies_pages_out_of_its_memory(
    tiny_model: Path, tmp_path: Path
) -> None:
    """And goes on exactly; an engine of another node is sent the same pages."""
    ids = prompt_of(8, 200)
    directory = store_directory(str(tmp_path), SECRET, AGENTS_NODE)
    async with asyncio.timeout(180), agent(directory) as (store, port):
        config = cluster(tiny_model, port, backup={"directory": str(tmp_path)})
        async with engine(config, "d0") as (_, to_decode):
            answer = asyncio.create_task(ask(to_decode, "s", ids, 60))
            await eventually(lambda: store.held(StreamId("s")) >= 13)
            output = (await answer)["choices"][0]["token_ids"]
        copied = {}
        for name in ("p1", "p0"):
            async with engine(config, name) as (other, client):
                source = {"id": AGENT, "first_page": 0, "pages": 13, "generation": store.epoch}
                kvrs = {"attempt": 2, "sources": [source]}
                again = await ask(client, "s", ids + output[:20], 40, kvrs=kvrs)
                assert again["choices"][0]["token_ids"] == output[20:]
                assert other.core.fetched_pages == 13
                (fetch,) = other.load().fetches
                assert (fetch.stream, fetch.attempt) == ("s", 2)
                assert fetch.loaded_tokens == 13 * PAGE
                assert fetch.computed_tokens == len(ids) + 20 - 13 * PAGE
                copied[name] = MEMORY in other.port.puller.links()

    assert copied == {"p1": True, "p0": False}


async def test_a_stream_that_is_longer_than_was_guessed_is_kept_whole(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The proxy reserves before the text is tokenised; the engine that tokenises it asks for what
    is really needed.
    """
    ids = prompt_of(6, 100)
    async with (
        asyncio.timeout(180),
        agent(tmp_path / "store") as (store, port),
        engine(cluster(tiny_model, port), "d0") as (decode, client),
    ):
        page_bytes = decode.worker.geometry.page_bytes
        guessed = {"checkpoints": [{"agent": AGENT, "reserved_bytes": 2 * page_bytes}]}
        answer = asyncio.create_task(ask(client, "s", ids, 300, kvrs=guessed))
        await eventually(lambda: store.held(StreamId("s")) > 2 or answer.done())

        assert store.held(StreamId("s")) > 2
        assert decode.checkpointer.unprotected == 0
        assert store.reserved_bytes == (100 + 300) // PAGE * page_bytes
        await answer


async def tokens_without(model: Path, ids: list[int], max_tokens: int) -> list[int]:
    config = cluster(model, 1, backup={"mode": "off"})
    async with engine(config, "d0") as (_, client):
        answer = await ask(client, "plain", ids, max_tokens, kvrs={"checkpoints": []})
        return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize(
    "how", ["dead", "full", pytest.param("stalled", marks=pytest.mark.nightly)]
)
async def test_decode_goes_on_whatever_the_agent_does(
    tiny_model: Path, tmp_path: Path, how: str
) -> None:
    """Same tokens, all of them, while nothing is taken; and the pool is as small as it can be."""
    ids = prompt_of(1, 100)
    expected = await tokens_without(tiny_model, ids, 60)
    async with asyncio.timeout(180):
        with stalling_server() as stalling:
            async with agent(tmp_path / "store", capacity_bytes=1 << 16) as (store, small):
                port = {"dead": 1, "stalled": stalling, "full": small}[how]
                config = cluster(
                    tiny_model, port, engine={"pages": 10}, transfer={"stall_timeout_s": 0.05}
                )
                async with engine(config, "d0") as (decode, client):
                    unprotected = 0

                    async def look() -> None:
                        nonlocal unprotected
                        while True:
                            unprotected = max(unprotected, decode.checkpointer.unprotected)
                            await asyncio.sleep(0.001)

                    looking = asyncio.create_task(look())
                    for number in range(3):
                        answer = await ask(client, f"s{number}", ids, 60)
                        assert answer["choices"][0]["token_ids"] == expected
                    looking.cancel()
                    assert unprotected == 1
                    assert decode.load().checkpoint_lag_pages == 0
                    assert store.held_bytes == 0


@pytest.mark.parametrize(
    "kvrs",
    [
        {"stream": "s" * 256},
        {"owner_epoch": 1 << 64},
        {"attempt": 1 << 64},
        {"checkpoints": [{"agent": AGENT, "reserved_bytes": 1 << 64}]},
    ],
)
async def test_what_no_frame_can_carry_is_refused(
    tiny_model: Path, tmp_path: Path, kvrs: dict[str, Any]
) -> None:
    """Else the engine would find out when it makes the offer, and end with all its streams; and so
    would the next one.
    """
    async with (
        asyncio.timeout(180),
        agent(tmp_path / "store") as (_, port),
        engine(cluster(tiny_model, port), "d0") as (_, client),
    ):
        with pytest.raises(AssertionError, match="invalid_request_error"):
            await ask(client, "s", prompt_of(7, 40), 4, kvrs=kvrs)
