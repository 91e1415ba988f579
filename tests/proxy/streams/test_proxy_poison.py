"""Requests that end what they run on, and the streams beside them."""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted_model import expected_ids, text_of
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

PROMPT = [1, 2, 3]
TOKENS = 12
WHOLE = "".join(map(text_of, expected_ids(PROMPT, TOKENS)))
REQUEST: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}


def kills_of(system: ProxyCluster, user: str) -> int:
    return sum(poison == user for poison, _ in system.script.poisoned)


async def settled(system: ProxyCluster) -> None:
    for instance in system.instances.values():
        if instance.dying is not None:
            await instance.dying


async def wait_for(system: ProxyCluster, kills: int) -> None:
    async def reached() -> bool:
        return len(system.script.poisoned) >= kills

    await system.until(reached)


async def test_a_request_that_kills_what_it_runs_on_kills_three_and_no_stream(
    build: ProxyClusterBuilder,
) -> None:
    """It is refused with an error that no client repeats; streams beside it go on."""
    system = await build(pairs=6)
    system.script.poisons = {"poison": -1}  # In prefill.
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    beside = [asyncio.create_task(system.complete(**REQUEST)) for _ in range(24)]
    await system.until_streams_hold(3, count=24)

    status, body = await system.complete(**REQUEST, user="poison")
    system.script.gate.set()

    answers = await asyncio.gather(*beside)
    error = msgspec.json.decode(body)["error"]
    assert (status, error["code"], error["type"]) == (422, "poison", "invalid_request_error")
    assert kills_of(system, "poison") == 3
    assert {status for status, _ in answers} == {200}
    assert {msgspec.json.decode(body)["choices"][0]["text"] for _, body in answers} == {WHOLE}
    await settled(system)


async def test_streams_that_begin_beside_poison_are_not_charged(
    build: ProxyClusterBuilder,
) -> None:
    """Each waits for its first token where the poison runs, and runs apart after that death."""
    system = await build(pairs=5)
    system.script.poisons = {"poison": 0}
    system.script.gate = asyncio.Event()  # Nothing has a token before the first death.
    asked = [asyncio.create_task(system.complete(**REQUEST)) for _ in range(9)]

    async def all_decode() -> bool:
        streams = (await system.state())["streams"]
        return len(streams) == 9 and all(row["stage"] == "decode" for row in streams)

    await system.until(all_decode)
    poison = asyncio.create_task(system.complete(**REQUEST, user="poison"))
    await wait_for(system, 1)
    system.script.gate.set()

    answers = await asyncio.gather(*asked)
    assert (await poison)[0] == 422
    assert kills_of(system, "poison") <= 3
    assert {status for status, _ in answers} == {200}
    await settled(system)


async def test_three_poisoned_requests_cost_no_other_stream(build: ProxyClusterBuilder) -> None:
    """They come together, between streams that flow and streams that begin; instances restart."""
    system = await build(pairs=4)
    system.script.poisons = dict.fromkeys(("a", "b", "c"), 0)
    system.script.pause_s = 0.02
    restarting = asyncio.create_task(restart_what_dies(system))
    request = REQUEST | {"max_tokens": 60}
    beside = [asyncio.create_task(system.complete(**request)) for _ in range(20)]
    await system.until_streams_hold(2, count=20)

    poisons = [asyncio.create_task(system.complete(**REQUEST, user=user)) for user in "abc"]
    beside += [asyncio.create_task(system.complete(**request)) for _ in range(10)]

    assert [status for status, _ in await asyncio.gather(*poisons)] == [422] * 3
    answers = await asyncio.gather(*beside)
    restarting.cancel()
    assert {status for status, _ in answers} == {200}
    assert max(kills_of(system, user) for user in "abc") <= 3
    await settled(system)


async def restart_what_dies(system: ProxyCluster) -> None:
    while True:
        for instance in system.instances.values():
            if instance.dying is not None and instance.dying.done():
                instance.dying = None
                await instance.restart()
        await asyncio.sleep(0.05)


async def test_a_request_that_kills_late_is_refused_and_costs_no_other_stream(
    build: ProxyClusterBuilder,
) -> None:
    """It has had tokens, as all others: the kill while it flowed does not count, three more do."""
    system = await build(pairs=6)
    system.script.poisons = {"poison": 5}
    system.script.pause_s = 0.01
    request = REQUEST | {"max_tokens": 80}
    beside = [asyncio.create_task(system.complete(**request)) for _ in range(18)]
    await system.until_streams_hold(1, count=18)

    status, body = await system.complete(**REQUEST, user="poison", stream=True)

    answers = await asyncio.gather(*beside)
    error = msgspec.json.decode(events_of(body)[-2][6:])["error"]
    assert (status, error["code"]) == (200, "poison")
    assert kills_of(system, "poison") <= 4
    assert {status for status, _ in answers} == {200}
    await settled(system)
