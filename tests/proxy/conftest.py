"""Fixtures of the proxy's tests."""

import asyncio
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.proxy.proxy_cluster import ProxyCluster, open_proxy_cluster
from tests.proxy.scripted_model import save_tokenizer

# The openai client asks for it with its first request; the first call runs `uname -p`, which is no
# process of the test's.
platform.processor()

ProxyClusterBuilder = Callable[..., Awaitable[ProxyCluster]]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that the product runs the proxy on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the scripted model's tokenizer, for proxies that need one."""
    directory: Path = tmp_path_factory.mktemp("model")
    save_tokenizer(directory)
    return str(directory)


@pytest.fixture
async def build() -> AsyncIterator[ProxyClusterBuilder]:
    """`await build(pairs=2, proxy={...}, ...)`, as `open_proxy_cluster`."""
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> ProxyCluster:
            return await stack.enter_async_context(open_proxy_cluster(**settings))

        yield make
