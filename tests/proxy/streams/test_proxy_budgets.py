"""How often streams are tried again: over deaths, and while instances are busy."""

import asyncio
from typing import Any

import msgspec

from kvrs.protocol.openai.chunks import error_body
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder

PROMPT = [1, 2, 3]
REQUEST: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "stream": True}


def say_busy(system: ProxyCluster, names: list[str], status: int, retry_after: str | None) -> None:
    for name in names:
        system.instances[name].refusal = (status, error_body("no room"))
        system.instances[name].retry_after = retry_after


def calls(system: ProxyCluster) -> int:
    return sum(len(instance.completions) for instance in system.instances.values())


async def test_busy_is_passed_on_with_retry_after(build: ProxyClusterBuilder) -> None:
    """A client that has got nothing gets what the instances say, when its wait is over; meanwhile
    they are asked a few times, by one request for all.
    """
    system = await build(policy={"recovery": {"wait_s": 1.0}})
    say_busy(system, list(system.instances), 429, None)

    async def ask() -> tuple[int, str | None, Any]:
        request = {"prompt": PROMPT, "max_tokens": 3}
        async with system.http.post(f"{system.url}/v1/completions", json=request) as response:
            return response.status, response.headers.get("Retry-After"), await response.json()

    answers = [await ask(), *await asyncio.gather(*(ask() for _ in range(20)))]

    assert {status for status, _, _ in answers} == {429}
    assert all(after is not None and int(after) >= 1 for _, after, _ in answers)
    assert {body["error"]["code"] for _, _, body in answers} == {"busy"}
    assert {body["error"]["type"] for _, _, body in answers} == {"rate_limit_error"}
    assert calls(system) < 2 * len(answers)


async def test_retry_after_of_instances_is_honoured(build: ProxyClusterBuilder) -> None:
    """A request that cannot wait for that long learns it at once, with the time; the instances are
    not asked before it is over.
    """
    system = await build()
    say_busy(system, list(system.instances), 503, "50")

    statuses = [(await system.complete(prompt=PROMPT, max_tokens=3))[0] for _ in range(9)]

    assert statuses == [503] * 9
    assert calls(system) == 2


async def test_a_stream_that_flows_is_told_why_it_ends(build: ProxyClusterBuilder) -> None:
    """An error event, when every survivor has been busy for `recovery.wait_s`."""
    system = await build(policy={"recovery": {"wait_s": 2.0}})
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = asyncio.create_task(system.complete(**REQUEST, max_tokens=9))
    await system.until_streams_hold(3)
    (row,) = (await system.state())["streams"]
    say_busy(system, list(system.instances), 503, None)

    await system.instances[row["decode"]].kill()

    status, body = await asked
    error = msgspec.json.decode(events_of(body)[-2][6:])["error"]
    assert (status, error["code"]) == (200, "busy")
    assert "every instance is busy" in error["message"]
