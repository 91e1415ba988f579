"""Requests that end what they run on, and the streams beside them."""

import asyncio
import json
from typing import Any

import pytest

from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted_model import expected_ids, text_of
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


async def test_streams_that_begin_beside_poison_are_not_charged(
    build: ProxyClusterBuilder,
) -> None:
    """Each waits for its first token where the poison runs at its first death."""
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
    status, body = await poison
    assert (status, json.loads(body)["error"]["code"]) == (422, "poison")
    assert kills_of(system, "poison") <= 3
    assert {status for status, _ in answers} == {200}
    await settled(system)
