"""The connection over which another instance sends drafts: tokens are right whatever it sends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import WSCloseCode, WSMsgType

from kvrs.ids import InstanceId
from kvrs.protocol.instance import MAX_MESSAGE_BYTES, Burst, DraftOffer, MirrorUpdate
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.speculation.paired import PairedDrafts, vocabulary_digest
from tests.engine.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.network]

D1 = InstanceId("d1")
PROMPT, TOKENS = 30, 80
DRAFT = {"source": "draft", "draft": "unused here", "depth": 4}


@asynccontextmanager
async def verifying(model: Path) -> AsyncIterator[tuple[EngineInstance, aiohttp.ClientSession]]:
    async with serving(model, speculation=DRAFT) as (instance, client):
        yield instance, client


def offer_of(instance: EngineInstance, vocabulary: str | None = None) -> bytes:
    digest = vocabulary_digest(instance.vocabulary)
    return msgspec.msgpack.encode(DraftOffer(D1, vocabulary or digest))


async def answer(client: aiohttp.ClientSession, step: int = 7, tokens: int = TOKENS) -> list[int]:
    body = {
        "prompt": [3 + at * step % 500 for at in range(PROMPT)],
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": step,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        ids: list[int] = (await response.json())["choices"][0]["token_ids"]
    return ids


async def until_helped(instance: EngineInstance, helped: bool) -> None:
    assert isinstance(instance.drafts, PairedDrafts)
    async with asyncio.timeout(30):
        while instance.drafts.active is not helped:
            await asyncio.sleep(0.01)


async def close_of(socket: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage:
    async with asyncio.timeout(30):
        while (message := await socket.receive()).type is WSMsgType.BINARY:
            pass
    return message


async def draft(
    socket: aiohttp.ClientWebSocketResponse, right: Sequence[int], random: Random
) -> None:
    """Send drafts of which most are right, at positions of which most are."""
    known: dict[int, int] = {}
    async for message in socket:
        for update in msgspec.msgpack.decode(message.data, type=list[MirrorUpdate]):
            if not update.token_ids:
                known.pop(update.number, None)
                continue
            tokens = known[update.number] = known.get(update.number, 0) + len(update.token_ids)
            if random.random() < 0.2:
                tokens += random.randint(-5, 5)
            ids = list(right[max(0, tokens - 30) :][: random.randint(0, 12)])
            if ids and random.random() < 0.3:
                ids[random.randrange(len(ids))] = random.choice([0, 5, 511, 512, 1 << 31])
            number = update.number if random.random() < 0.9 else random.randrange(1 << 40)
            bursts = [Burst(number, max(0, tokens), ids)]
            await socket.send_bytes(msgspec.msgpack.encode(bursts))


async def test_tokens_are_right_whatever_drafts_come(tiny_model: Path) -> None:
    async with verifying(tiny_model) as (instance, client):
        calm = await answer(client)
        for seed in range(3):
            async with helping(client, instance) as socket:
                drafting = asyncio.create_task(draft(socket, calm, Random(seed)))
                assert await answer(client) == calm
                drafting.cancel()
            await until_helped(instance, False)
        report = instance.load().speculation
        assert report is not None
        assert 20 < report.accepted < report.proposed
        assert report.stale > 0
        assert await answer(client) == calm


@asynccontextmanager
async def helping(
    client: aiohttp.ClientSession, instance: EngineInstance
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """The connection of a helper that the instance has taken."""
    async with client.ws_connect("/kvrs/v1/drafts") as socket:
        await socket.send_bytes(offer_of(instance))
        await until_helped(instance, True)
        yield socket


async def told(socket: aiohttp.ClientWebSocketResponse) -> MirrorUpdate:
    """The first one of the next message."""
    return msgspec.msgpack.decode(await socket.receive_bytes(), type=list[MirrorUpdate])[0]


@pytest.mark.parametrize(
    "foreign",
    [512, *(pytest.param(n, marks=pytest.mark.nightly) for n in (None, 1 << 31, (1 << 32) - 1))],
)
async def test_ids_that_the_model_does_not_have_are_no_drafts(
    tiny_model: Path, foreign: int | None
) -> None:
    """They come before their turn, as right ones (None) may."""
    async with verifying(tiny_model) as (instance, client):
        calm = await answer(client)
        async with helping(client, instance) as socket:
            asked = asyncio.create_task(answer(client))
            number = (await told(socket)).number
            ids = calm[60:64] if foreign is None else [foreign] * 4
            await socket.send_bytes(msgspec.msgpack.encode([Burst(number, PROMPT + 60, ids)]))
            assert await asked == calm
        report = instance.load().speculation
    assert report is not None
    assert (report.proposed, report.accepted) == ((4, 4) if foreign is None else (0, 0))


async def test_the_next_helper_is_told_a_running_stream_anew(tiny_model: Path) -> None:
    async with verifying(tiny_model) as (instance, client):
        asked = None
        numbers = list[int]()
        for _ in range(2):
            async with helping(client, instance) as socket:
                asked = asked or asyncio.create_task(answer(client, tokens=600))
                update = await told(socket)
                assert update.choice is not None, "it would know nothing of the tokens before"
                assert len(update.token_ids) >= PROMPT
                numbers.append(update.number)
            await until_helped(instance, False)
        assert asked is not None
        assert not asked.done(), "the same stream"
        assert numbers[0] != numbers[1]
        await asked


@pytest.mark.parametrize(
    "first",
    [b"", b"\x00", b"{}", msgspec.msgpack.encode({"instance": "d1"}), b"\xff" * 1000],
)
async def test_no_offer_is_refused(tiny_model: Path, first: bytes) -> None:
    async with verifying(tiny_model) as (instance, client):
        async with client.ws_connect("/kvrs/v1/drafts") as socket:
            await socket.send_bytes(first)
            closed = await close_of(socket)
        assert closed.data == WSCloseCode.POLICY_VIOLATION
        assert closed.extra is not None
        assert closed.extra.startswith("no offer")
        await until_helped(instance, False)


async def test_another_vocabulary_is_refused(tiny_model: Path) -> None:
    async with verifying(tiny_model) as (instance, client):
        async with client.ws_connect("/kvrs/v1/drafts") as socket:
            await socket.send_bytes(offer_of(instance, "another one"))
            closed = await close_of(socket)
        assert closed.data == WSCloseCode.UNSUPPORTED_DATA, "a helper does not ask again"
        assert closed.extra == (
            f"vocabulary: got another one; allowed: {vocabulary_digest(instance.vocabulary)}"
        )


async def test_a_second_helper_is_refused(tiny_model: Path) -> None:
    async with verifying(tiny_model) as (instance, client):
        async with helping(client, instance):
            async with client.ws_connect("/kvrs/v1/drafts") as other:
                await other.send_bytes(offer_of(instance))
                assert (await close_of(other)).extra == "d1 makes drafts already"
            await until_helped(instance, True)
        await until_helped(instance, False)


async def test_an_instance_that_ends_lets_its_helper_go(tiny_model: Path) -> None:
    """Its streams leave, and another instance may need the drafts."""
    async with verifying(tiny_model) as (instance, client):
        calm = await answer(client)
        async with helping(client, instance) as socket:
            asked = asyncio.create_task(answer(client))

            instance.drain()

            assert (await close_of(socket)).extra == "the instance is about to end"
            await until_helped(instance, False)
            assert await asked == calm
        async with client.ws_connect("/kvrs/v1/drafts") as socket:
            await socket.send_bytes(offer_of(instance))
            assert (await close_of(socket)).extra == "the instance is about to end"


@pytest.mark.parametrize(
    "wrong",
    [
        b"\xc1",
        msgspec.msgpack.encode([{"number": 1, "position": 0, "token_ids": [-1]}]),
        *(
            pytest.param(wrong, marks=pytest.mark.nightly)
            for wrong in (
                msgspec.msgpack.encode([{"number": -1, "position": 0, "token_ids": []}]),
                msgspec.msgpack.encode([{"number": 1, "position": 0, "token_ids": [1] * 65}]),
                msgspec.msgpack.encode([{"number": 1, "position": 0, "token_ids": [1] * 10**6}]),
                bytes(MAX_MESSAGE_BYTES + 1),
                "text",
            )
        ),
    ],
    ids=lambda wrong: f"{len(wrong)} {wrong[:4]!r}",
)
async def test_a_helper_that_sends_rubbish_is_dropped(tiny_model: Path, wrong: bytes | str) -> None:
    """The stream goes on, and another helper is taken."""
    async with verifying(tiny_model) as (instance, client):
        calm = await answer(client)
        async with helping(client, instance) as socket:
            asked = asyncio.create_task(answer(client))
            with suppress(ConnectionError):  # It is closed while too much is on its way.
                if isinstance(wrong, str):
                    await socket.send_str(wrong)
                else:
                    await socket.send_bytes(wrong)
            await close_of(socket)
            assert await asked == calm
        await until_helped(instance, False)
        async with helping(client, instance):
            pass


async def test_an_instance_without_drafts_takes_no_helper(tiny_model: Path) -> None:
    async with serving(tiny_model) as (_, client):
        response: Any = await client.get("/kvrs/v1/drafts")
        assert response.status == 404
