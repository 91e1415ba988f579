"""Several models at one port of clients, before scripted instances."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvrs_testkit.models_cluster import ModelsCluster, open_models_cluster

pytestmark = pytest.mark.network


@pytest.fixture
async def system() -> AsyncIterator[ModelsCluster]:
    async with open_models_cluster("a", "b") as made:
        yield made


async def test_each_request_goes_to_its_model(system: ModelsCluster) -> None:
    """Also those that aiohttp's server takes: a body of more than 64 kB, and one in chunks."""
    status, answer = await system.complete("a")
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert system.prompts("a") > 0
    assert system.prompts("b") == 0

    before = system.prompts("a")
    status, _ = await system.complete("b", user="x" * 100_000)
    assert status == 200

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"prompt":[1,2],"temperature":0,"max_tokens":4,'
        await asyncio.sleep(0.05)
        yield b'"model":"b"}'

    async with system.http.post(f"{system.url}/v1/completions", data=chunks()) as response:
        assert response.status == 200
    assert system.prompts("a") == before
    assert system.prompts("b") > 0
