"""Responses whose proxy is killed: every other proxy goes on with them, with the same events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvrs.protocol.mirror import Update
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group
from kvrs_testkit.plays import SCENARIOS
from kvrs_testkit.proxy_cluster import WITHIN_S
from tests.proxy.mirror.late_mirror import hold_mirror

REQUEST: dict[str, Any] = {
    "model": "scripted",
    "input": "play all/tokens.",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "max_output_tokens": 90,
    "background": True,
}


@pytest.fixture
async def group() -> AsyncIterator[MultiProxyCluster]:
    async with open_proxy_group(3) as made:
        made.system.script.pause_s = 0.01
        yield made


@pytest.fixture
async def clients(group: MultiProxyCluster) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """One for each proxy."""
    made = [
        openai.AsyncOpenAI(base_url=f"{group.url(proxy)}/v1", api_key="none", max_retries=0)
        for proxy in range(3)
    ]
    yield made
    for each in made:
        await each.close()


async def read(stream: Any, most: int | None, into: list[dict[str, Any]]) -> None:
    try:
        async for event in stream:
            into.append(event.model_dump())
            if len(into) == most:
                return
    finally:
        await stream.close()


async def replace(group: MultiProxyCluster, proxy: int) -> None:
    await group.kill(proxy)
    await group.start(proxy)
    await group.know_each_other()


async def test_a_stream_goes_on_at_any_proxy_behind_the_last_event(
    group: MultiProxyCluster, clients: list[openai.AsyncOpenAI]
) -> None:
    """No number is missing or comes twice, and each event is that of the undisturbed stream."""
    whole: list[dict[str, Any]] = []
    await read(await clients[0].responses.create(**REQUEST, stream=True), None, whole)

    seen: list[dict[str, Any]] = []
    await read(await clients[0].responses.create(**REQUEST, stream=True), 1, seen)
    name, proxy = seen[0]["response"]["id"], 0
    while seen[-1]["type"] != "response.completed":
        await replace(group, proxy)
        proxy = (proxy + 1) % 3
        last = seen[-1]["sequence_number"]
        stream = await clients[proxy].responses.retrieve(name, stream=True, starting_after=last)
        await read(stream, len(seen) + 9, seen)

    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert [_plain(event) for event in seen] == [_plain(event) for event in whole]
    for each in clients:
        assert (await each.responses.retrieve(name)).model_dump() == seen[-1]["response"]
        again: list[dict[str, Any]] = []
        await read(await each.responses.retrieve(name, stream=True), None, again)
        assert again == seen


async def test_a_response_that_is_polled_is_finished_elsewhere(
    group: MultiProxyCluster, clients: list[openai.AsyncOpenAI]
) -> None:
    """A poll at another proxy does not take a running stream over; after a kill it does."""
    group.system.script.gate, group.system.script.gate_at = asyncio.Event(), 5
    begun = await clients[0].responses.create(**REQUEST | {"input": "play emoji."})
    async with asyncio.timeout(WITHIN_S):
        while not (polled := await clients[1].responses.retrieve(begun.id)).output_text:
            await asyncio.sleep(0.01)
    streams = [len(group.mirror(proxy).streams) for proxy in range(3)]

    await group.kill(0)
    group.system.script.gate.set()
    async with asyncio.timeout(WITHIN_S):
        while (polled := await clients[1].responses.retrieve(begun.id)).status != "completed":
            await asyncio.sleep(0.01)

    assert streams == [1, 0, 0]
    assert polled.output_text == SCENARIOS["emoji"]
    assert (await clients[2].responses.retrieve(begun.id)).model_dump() == polled.model_dump()


async def test_a_response_is_cancelled_and_deleted_from_another_proxy(
    group: MultiProxyCluster, clients: list[openai.AsyncOpenAI]
) -> None:
    """Its stream ends where it runs; a deleted one is gone from all of them."""
    group.system.script.gate, group.system.script.gate_at = asyncio.Event(), 5
    cancelled, deleted = [await clients[0].responses.create(**REQUEST) for _ in range(2)]
    async with asyncio.timeout(WITHIN_S):
        while sum(one.running for one in group.system.instances.values()) < 2:
            await asyncio.sleep(0.01)

    stopped = await clients[1].responses.cancel(cancelled.id)
    await clients[2].responses.delete(deleted.id)

    assert stopped.status == "cancelled"
    async with asyncio.timeout(WITHIN_S):  # The proxy that it ran at learns of it within a second.
        while any(group.mirror(proxy).streams for proxy in range(3)):
            await asyncio.sleep(0.01)
    for each in clients:
        assert await each.responses.retrieve(cancelled.id) == stopped
        with pytest.raises(openai.NotFoundError):
            await each.responses.retrieve(deleted.id)


async def test_a_response_is_cancelled_before_its_record_is_mirrored(
    group: MultiProxyCluster,
    clients: list[openai.AsyncOpenAI],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy that has just taken it over does not begin to produce what nothing reads."""
    group.system.script.gate, group.system.script.gate_at = asyncio.Event(), 5
    begun = await clients[0].responses.create(**REQUEST | {"input": "play emoji."})
    async with asyncio.timeout(WITHIN_S):
        while not (await clients[1].responses.retrieve(begun.id)).output_text:
            await asyncio.sleep(0.01)
    answers = hold_mirror(monkeypatch)
    await group.kill(0)
    polling = asyncio.create_task(clients[1].responses.retrieve(begun.id))
    async with asyncio.timeout(WITHIN_S):
        while not group.mirror(1).streams:
            await asyncio.sleep(0.001)
        stopped = await clients[1].responses.cancel(begun.id)
    answers.set()
    await polling

    assert stopped.status == "cancelled"


async def test_a_deleted_response_does_not_come_back_from_what_was_on_its_way(
    group: MultiProxyCluster,
    clients: list[openai.AsyncOpenAI],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its record reaches the mirror after the order to drop it."""
    arrived = list[str]()

    def note(updates: list[Update]) -> None:
        arrived.extend(update.key for update in updates if update.header is not None)

    group.system.script.gate, group.system.script.gate_at = asyncio.Event(), 5
    answers = hold_mirror(monkeypatch, note)
    deleted = await clients[0].responses.create(**REQUEST)
    await clients[1].responses.delete(deleted.id)
    answers.set()
    async with asyncio.timeout(WITHIN_S):
        while not arrived:
            await asyncio.sleep(0.01)

    for each in clients:
        with pytest.raises(openai.NotFoundError):
            await each.responses.retrieve(deleted.id)


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two responses: ids, and the time of creation."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            left_out = ("id", "item_id", "call_id", "created_at")
            return {key: strip(each) for key, each in value.items() if key not in left_out}
        return [strip(each) for each in value] if isinstance(value, list) else value

    stripped = strip(event)
    assert isinstance(stripped, dict)
    return stripped
