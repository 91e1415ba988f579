"""The end of a slot at its agent: the engine ends that transfer and nothing
else.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrs.ids import StreamId
from kvrs_engine.engine.runs import FencedError
from tests.engine.peers import P, PeerEngine, peer_engines
from tests.engine.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.network]

PROMPT = [3 + position * 7 % 500 for position in range(4 * P + 5)]
NEW = P
CUT = 5  # Output tokens that the client has, when the stream is continued elsewhere.
S = StreamId("s")


def body(token_ids: list[int], stream: str = "s", **kvrs: Any) -> dict[str, Any]:
    kvrs = {"stream": stream, "attempt": 2, "prompt_tokens": len(PROMPT), **kvrs}
    return {
        "prompt": token_ids,
        "max_tokens": NEW,
        "ignore_eos": True,
        "temperature": 0,
        "kvrs": kvrs,
    }


class World:
    def __init__(self, target: PeerEngine, holder: PeerEngine, output: list[int]) -> None:
        self.target, self.holder, self.output = target, holder, output

    def fetching(self, stream: str = "s", **kvrs: Any) -> dict[str, Any]:
        """A recovery whose KV comes from the holder, under a slot."""
        source = {"id": "e1", "first_page": 0, "pages": len(PROMPT) // P, "generation": 1}
        return body(
            PROMPT + self.output[:CUT], stream, **{"sources": [source], "slot_token": 7} | kvrs
        )

    def end_transfers(self, **attempts: tuple[int, int]) -> None:
        self.target.instance.end_transfers(
            {StreamId(stream): number for stream, number in attempts.items()}
        )


@pytest.fixture
async def world(tiny_model: Path) -> AsyncIterator[World]:
    """The pulls of the target wait until they are let go."""
    async with peer_engines([tiny_model] * 2) as (target, holder):
        output = await holder.answer(body(PROMPT, attempt=1))
        target.may_pull.clear()
        yield World(target, holder, output)


async def test_a_transfer_whose_slot_has_ended_ends(world: World) -> None:
    """And its attempt is over, however late another call of it comes. The instance keeps
    its epoch.
    """
    target = world.target
    run = await target.begin(world.fetching())
    await target.until(lambda: bool(target.asked))

    world.end_transfers(s=(0, 3))
    target.may_pull.set()

    assert await target.rest_of(run) == []
    with pytest.raises(FencedError):
        await target.begin(world.fetching())
    assert target.instance.info().epoch == 1
    assert await target.answer(world.fetching(attempt=3, slot_token=9)) == world.output[CUT:]


async def test_one_that_still_waits_in_line_ends_too(world: World) -> None:
    """It would fetch later, when others have its slot."""
    target = world.target
    target.may_compute.clear()
    run = await target.begin(world.fetching())

    world.end_transfers(s=(0, 3))
    target.may_compute.set()

    assert await target.rest_of(run) == []


@pytest.mark.parametrize(
    ("kvrs", "why"),
    [
        ({"slot_token": 0}, "its proxy could not ask the agent, which knows nothing of it"),
        ({"attempt": 3}, "it is a later attempt"),
        ({"attempt": 1, "owner_epoch": 1}, "another proxy has taken the stream over"),
        ({"stream": "t"}, "it is another stream"),
    ],
)
async def test_other_transfers_go_on(world: World, kvrs: dict[str, Any], why: str) -> None:
    """The agent ends what it has granted, and only the attempt of the silent owner."""
    target = world.target
    run = await target.begin(world.fetching(**kvrs))
    await target.until(lambda: bool(target.asked))

    world.end_transfers(s=(0, 3))
    target.may_pull.set()

    assert await target.rest_of(run) == world.output[CUT:], why


async def test_a_stream_that_flows_goes_on(world: World) -> None:
    """Its transfer is over, and what gave its slot back has not reached the agent: no reason to
    interrupt it.
    """
    target = world.target
    target.may_pull.set()
    run = await target.begin(world.fetching())
    first = await asyncio.wait_for(run.outputs.get(), 60)

    world.end_transfers(s=(0, 3))

    assert first is not None
    assert [*first.token_ids, *await target.rest_of(run)] == world.output[CUT:]


async def test_fences_over_http_name_owners(tiny_model: Path) -> None:
    """A proxy's fence raises the epoch, an agent's end of slots does not; an attempt of a later
    owner is above both.
    """
    ask = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
    later = {"stream": "s", "attempt": 1, "prompt_tokens": 3, "owner_epoch": 1}
    async with serving(tiny_model) as (instance, client):
        epoch = instance.info().epoch
        slots = await client.post("/kvrs/v1/fence", json={"attempts": {"s": 9}, "slots_only": True})
        fence = await client.post("/kvrs/v1/fence", json={"attempts": {"s": 9}})
        statuses = []
        for kvrs in ({**later, "owner_epoch": 0}, later):
            statuses.append(
                (await client.post("/v1/completions", json={**ask, "kvrs": kvrs})).status
            )
        await client.post("/kvrs/v1/fence", json={"attempts": {"s": 2}, "owner_epochs": {"s": 1}})
        statuses.append((await client.post("/v1/completions", json={**ask, "kvrs": later})).status)

        assert ((await slots.json())["epoch"], (await fence.json())["epoch"]) == (epoch, epoch + 1)
        assert statuses == [409, 200, 409]
