"""Hand-offs of vLLM that no stream fetches: their blocks at prefill are freed."""

import asyncio
from typing import Any

import aiohttp
import pytest

from kvrs.proxy.streams import abandoned
from kvrs.proxy.streams.open_stream import StreamPhase
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Builder, Vllms

pytestmark = pytest.mark.network

DECODES = ("d0", "d1")


async def counted(system: Vllms) -> dict[str, float]:
    counts = {
        how.value: await system.count("kvrs_hand_offs_given_up_total", outcome=how.value)
        for how in abandoned.Freed
    }
    return {name: count for name, count in counts.items() if count}


async def until_counted(system: Vllms, **wanted: float) -> None:
    async def holds() -> bool:
        return await counted(system) == wanted

    await system.until(holds)


def busy(system: Vllms, status: int | None) -> None:
    for name in DECODES:
        system.servers[name].denies = status


async def leave_after_prefill(system: Vllms, count: int) -> None:
    """Clients whose streams end between prefill and decode, since decode has no room."""
    # Some may not begin: none does any more once both decode instances are known to be busy.
    asked = [asyncio.create_task(system.ids([*PROMPT, n])) for n in range(count + 4)]

    streams = system.proxy.parts.driver.streams

    async def are_prefilled() -> bool:
        return len(system.shared.hand_offs) >= count

    await system.until(are_prefilled)
    # The proxy knows what it has to free when it has read the answers: no further prefill begins,
    # and each stream that has begun has waited behind its last one.
    system.servers["p0"].denies = 503
    waited: set[str] = set()

    async def have_waited() -> bool:
        waits = (name for name, each in streams.items() if each.phase is StreamPhase.WAITING)
        waited.update(waits)
        return len(waited) == len(asked)

    await system.until(have_waited)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)

    async def have_left() -> bool:
        return not (await system.state())["streams"]

    await system.until(have_left)  # Until then attempts go on.
    system.servers["p0"].denies = None


async def test_blocks_are_freed_when_clients_leave_while_decode_is_busy(vllms: Builder) -> None:
    """A decode instance gets the requests as soon as it takes any again."""
    system = await vllms()
    busy(system, 503)
    await leave_after_prefill(system, 10)
    given_up = len(system.shared.hand_offs)

    busy(system, None)
    await until_counted(system, freed=given_up)

    assert given_up >= 10
    assert system.shared.hand_offs == {}
    assert system.shared.violations == []


async def test_blocks_of_a_stream_that_is_computed_elsewhere_are_freed(vllms: Builder) -> None:
    """By one token's request, of which no other one can have the pages."""
    system = await vllms(policy={"name": "always_recompute"})
    system.servers["d0"].denies = 503

    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    await until_counted(system, freed=1)

    assert system.shared.hand_offs == {}
    freeing = [body for body in system.servers["d1"].bodies if "kv_transfer_params" in body]
    (body,) = freeing
    assert (body["prompt"], body["max_tokens"], body["stream"]) == (PROMPT, 1, True)
    assert len(body["cache_salt"]) == 32


async def test_a_request_that_waits_in_the_queue_is_aborted(vllms: Builder) -> None:
    """vLLM frees the blocks as well, and no decode instance has to compute a token."""
    system = await vllms(policy={"name": "always_recompute"})
    system.servers["d0"].denies = 503
    system.servers["d1"].queue = asyncio.Event()

    asked = asyncio.create_task(system.ids())
    await until_counted(system, freed=1)

    async def are_free() -> bool:
        return not system.shared.hand_offs

    await system.until(are_free)
    assert system.servers["d1"].pulled == 0
    system.servers["d1"].queue.set()
    assert await asked == expected_ids(PROMPT, TOKENS)


@pytest.mark.parametrize("lacks", [[], ["kv_fetch_by_stage"], ["kv_fetch_by", "waiting_by"]])
async def test_a_pull_under_way_is_not_aborted(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch, lacks: list[str]
) -> None:
    """By the engine's own count of pulls; a version without one may be pulling at any time."""
    monkeypatch.setattr("kvrs.proxy.backends.vllm._ABORTED_AFTER_S", 0.1)
    monkeypatch.setattr("kvrs.proxy.backends.vllm._LOOK_AGAIN_S", 0.1)
    system = await vllms(policy={"name": "always_recompute"})
    server = system.servers["d1"]
    server.lacks |= {*lacks}
    system.servers["d0"].denies = 503
    server.pull = asyncio.Event()

    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    await system.until(lambda: _is_true(server.fetching == 1))
    reads = server.reads
    await system.until(lambda: _is_true(server.reads > reads + 3))
    await asyncio.sleep(0.5)
    assert (server.fetching, server.aborted_pulls) == (1, 0)
    server.pull.set()

    await until_counted(system, freed=1)
    assert (server.pulled, server.aborted_pulls) == (1, 0)
    assert system.shared.hand_offs == {}


async def test_a_hand_off_that_was_fetched_is_not_fetched_again(vllms: Builder) -> None:
    """However its stream ends: prefill would count that as an error, and decode would read blocks
    of others.
    """
    system = await vllms()
    for _ in range(3):
        await system.ids()
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    asked = asyncio.create_task(system.ids())
    await system.until_streams_hold(2)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    system.shared.gate.set()

    await asyncio.sleep(0.05)

    assert await counted(system) == {}
    assert system.shared.violations == []


async def test_a_request_that_vllm_itself_refuses_leaves_nothing(vllms: Builder) -> None:
    """It frees the blocks as it refuses; a second notice to prefill would be an error there."""
    system = await vllms()
    busy(system, 400)

    with pytest.raises((AssertionError, aiohttp.ClientError)):
        await system.ids()

    await asyncio.sleep(0.05)
    assert await counted(system) == {}


async def test_blocks_are_gone_with_their_prefill_instance(vllms: Builder) -> None:
    system = await vllms()
    busy(system, 503)
    await leave_after_prefill(system, 2)

    await system.servers["p0"].kill()

    await system.until_health(p0="down")
    await until_counted(system, gone=len(system.shared.hand_offs))


async def test_blocks_are_gone_with_the_process_of_their_prefill_instance(vllms: Builder) -> None:
    """The next one has other KV in them."""
    system = await vllms()
    busy(system, 503)
    await leave_after_prefill(system, 2)
    given_up = len(system.shared.hand_offs)

    await system.servers["p0"].kill()
    await system.until_health(p0="down")
    await system.servers["p0"].restart()
    await system.until_health(p0="up")
    busy(system, None)

    await until_counted(system, gone=given_up)
    assert system.servers["d0"].pulled + system.servers["d1"].pulled == 0


@pytest.mark.parametrize(("name", "outcome"), [("LEASE_S", "expired"), ("MOST_WAITING", "dropped")])
async def test_hand_offs_that_cannot_be_freed_are_counted(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch, name: str, outcome: str
) -> None:
    """Nothing is tried behind the end of the lease, and only so many wait."""
    monkeypatch.setattr(abandoned, name, 0)
    system = await vllms(policy={"name": "always_recompute"})
    system.servers["d0"].denies = 503

    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    await until_counted(system, **{outcome: 1})

    assert len(system.shared.hand_offs) == 1


async def test_few_requests_that_free_blocks_run_at_a_time(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned, "AT_A_TIME", 2)
    monkeypatch.setattr("kvrs.proxy.backends.vllm._ABORTED_AFTER_S", 60.0)
    system = await vllms()
    busy(system, 503)
    await leave_after_prefill(system, 6)
    for name in DECODES:
        system.servers[name].queue = asyncio.Event()
        system.servers[name].bodies.clear()
    busy(system, None)

    def freeing() -> list[Any]:
        bodies = [body for name in DECODES for body in system.servers[name].bodies]
        return [body for body in bodies if body["max_tokens"] == 1]

    async def some() -> bool:
        return len(freeing()) >= 2

    await system.until(some)
    await asyncio.sleep(0.05)

    assert len(freeing()) == 2


async def _is_true(holds: bool) -> bool:
    return holds
