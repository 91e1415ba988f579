"""A request's memory is free when it has ended, without the collector of cycles."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from kvrs.proxy.wire.journal import Journal
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

REQUEST = {"prompt": "a word " * 50, "max_tokens": 6, "temperature": 0}


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def journals() -> int:
    return sum(type(each) is Journal for each in gc.get_objects())


async def leave(system: ProxyCluster, key: str) -> None:
    """A client that leaves after the first event."""
    async with system.http.post(
        system.url + "/v1/completions",
        json=REQUEST | {"stream": True, "max_tokens": 400},
        headers={"Idempotency-Key": key},
    ) as response:
        await response.content.readuntil(b"\n\n")
        response.close()


async def take_over(system: ProxyCluster, key: str) -> None:
    """A client that asks again while its first stream runs."""
    fields, headers = REQUEST | {"stream": True, "max_tokens": 30}, {"Idempotency-Key": key}
    first = asyncio.create_task(system.ask(fields, headers))
    await system.until_streams_hold(1)
    await system.ask(fields, headers)
    await first


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("kind", ["plain", "keyed", "whole", "leaves", "taken-over", "refused"])
async def test_a_request_that_has_ended_is_freed_at_once(
    build: ProxyClusterBuilder, kind: str
) -> None:
    """Its prompt may be of megabytes: 200 of them must not wait for a collection. The connection
    holds its last request only.
    """
    system = await build(pairs=1)
    if kind == "refused":
        system.instances["p0"].refusal = (400, b'{"error":{"message":"no"}}')
    if kind in ("leaves", "taken-over"):
        system.script.pause_s = 0.01
    before = journals()

    for number in range(10):
        key = f"{kind}-{number}"
        match kind:
            case "plain":
                await system.ask(REQUEST | {"stream": True})
            case "leaves":
                await leave(system, key)
            case "taken-over":
                await take_over(system, key)
            case _:
                fields = REQUEST | {"stream": kind == "keyed"}
                await system.ask(fields, {"Idempotency-Key": key})

    async def are_freed() -> bool:
        return journals() - before <= 2

    await system.until(are_freed)
