"""Requests that would wait for too long get an answer that says when to come back."""

import asyncio

import msgspec

from tests.proxy.conftest import ProxyClusterBuilder

REQUEST = {"prompt": [1, 2, 3], "max_tokens": 4}


async def test_an_overloaded_cluster_refuses_and_names_a_time(build: ProxyClusterBuilder) -> None:
    """The time is that of the queue: 20 s beyond the bound, at most doubled by jitter."""
    system = await build(pairs=1, policy={"admission": {"wait_s": 10.0}})
    taken, _ = await system.ask(REQUEST)
    system.instances["p0"].queue_delay_s = 30.0

    async def refuses() -> bool:
        return (await system.ask(REQUEST))[0] == 503

    await system.until(refuses)
    async with system.http.post(f"{system.url}/v1/completions", json=REQUEST) as refused:
        retry_after_s = int(refused.headers["Retry-After"])
        error = msgspec.json.decode(await refused.read())["error"]

    assert taken == 200
    assert (error["type"], error["code"]) == ("server_error", "overloaded")
    assert 20 <= retry_after_s <= 43
    assert await system.count("kvrs_streams_given_up_total", reason="overloaded") >= 2


async def test_a_client_that_fills_the_queues_leaves_others_their_share(
    build: ProxyClusterBuilder,
) -> None:
    """A prompt takes 0.3 s by the table; at half of the bound the client that has all the work is
    refused with 429.
    """
    system = await build(pairs=1, policy={"admission": {"wait_s": 2.0}})
    system.script.prefill_gate = asyncio.Event()
    long = {"prompt": [1] * 3000, "max_tokens": 1}

    asked = [asyncio.create_task(system.ask(long)) for _ in range(40)]

    async def all_decided() -> bool:
        refused = sum(task.done() for task in asked)
        return refused + len(system.instances["p0"].completions) == len(asked)

    await system.until(all_decided)
    waiting = [task for task in asked if not task.done()]
    statuses = {task.result()[0] for task in asked if task.done()}
    system.script.prefill_gate.set()
    served = [status for status, _ in await asyncio.gather(*waiting)]

    assert statuses <= {429, 503}
    assert statuses
    assert served
    assert set(served) == {200}
