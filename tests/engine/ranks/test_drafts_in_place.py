"""Drafts of another instance for one of several ranks: a rank is lost, the helper stays."""

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Burst, DraftOffer, MirrorUpdate
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.routes import make_routes
from kvrs_engine.engine.speculation.paired import PairedDrafts, vocabulary_digest
from kvrs_testkit.ports import instance_client
from tests.engine.ranks.test_in_place import befall
from tests.engine.serving import SECRET, serving

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.usefixtures("patient"),
    pytest.mark.nightly,
]

STREAMS, TOKENS = 4, 300


def prompt(stream: int) -> list[int]:
    return [3 + at * (2 * stream + 3) % 500 for at in range(40)]


async def answer(client: aiohttp.ClientSession, stream: int) -> list[int]:
    """The ids of prompt and output, greedy or seeded."""
    body = {"prompt": prompt(stream), "max_tokens": TOKENS, "temperature": 0.8 * (stream % 2)}
    body |= {"seed": stream, "ignore_eos": True, "return_token_ids": True}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return [*prompt(stream), *(await response.json())["choices"][0]["token_ids"]]


class RightHelper:
    """Knows how all streams go on, and is wrong in each seventh token."""

    def __init__(self, calm: list[list[int]]) -> None:
        self._calm = calm
        self._known: dict[int, list[int]] = {}
        self.told_anew = 0

    async def help(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            updates = msgspec.msgpack.decode(message.data, type=list[MirrorUpdate])
            bursts = [burst for update in updates for burst in self._bursts(update)]
            await socket.send_bytes(msgspec.msgpack.encode(bursts))

    def _bursts(self, update: MirrorUpdate) -> list[Burst]:
        if not update.token_ids:
            self._known.pop(update.number, None)
            return []
        if update.choice is not None:
            self.told_anew += len(update.token_ids) > len(prompt(0)) + 1
            self._known[update.number] = []
        known = self._known[update.number]
        known += update.token_ids
        (right,) = (each for each in self._calm if each[: len(known)] == known)
        # Behind the tokens that are chosen meanwhile, too.
        ahead = [(0 if at % 7 == 0 else right[at]) for at in range(len(known), len(right))][:8]
        return [Burst(update.number, len(known), ahead, begins_anew=True)]


async def test_a_helper_goes_on_where_a_rank_is_lost(tiny_model: Path) -> None:
    """With its memory: the streams begin again in their attempt, and so do their drafts."""
    async with serving(tiny_model) as (_, client):
        calm = await asyncio.gather(*(answer(client, at) for at in range(STREAMS)))
    nodes = [{"id": "n0", "instances": [{"id": "e0", "role": "both", "tp": 2}]}]
    config = parse_config(
        {
            "cluster": {"model": str(tiny_model), "engine": {"pages": 512}, "nodes": nodes},
            "speculation": {"source": "draft", "draft": "unused here", "depth": 4},
        }
    )
    instance, helper = EngineInstance(config, InstanceId("e0"), 1, SECRET), RightHelper(calm)
    assert isinstance(instance.drafts, PairedDrafts)
    async with asyncio.timeout(300), instance_client(make_routes(instance), SECRET) as client:
        await instance.start()
        async with client.ws_connect("/kvrs/v1/drafts") as socket:
            offer = DraftOffer(InstanceId("d1"), vocabulary_digest(instance.vocabulary))
            await socket.send_bytes(msgspec.msgpack.encode(offer))
            while not instance.drafts.active:
                await asyncio.sleep(0.01)
            helping = asyncio.create_task(helper.help(socket))
            tasks = [asyncio.create_task(answer(client, at)) for at in range(STREAMS)]
            while instance.drafts.report().accepted < 2 * STREAMS:
                await asyncio.sleep(0.01)
            await befall(instance, client, "lose_device")
            before = instance.drafts.report().accepted
            assert await asyncio.gather(*tasks) == calm
            after = instance.drafts.report()
            assert not helping.done(), "it is still connected"
            helping.cancel()
        await instance.close()
    assert helper.told_anew > 0
    assert after.accepted > before
    assert after.accepted < after.proposed
