"""A proxy before scripted instances, and the unmodified `openai` client of it."""

from collections.abc import AsyncIterator

import openai
import pytest

from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder


@pytest.fixture
async def system(build: ProxyClusterBuilder) -> ProxyCluster:
    return await build()


@pytest.fixture
async def client(system: ProxyCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made
