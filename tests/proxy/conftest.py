"""Fixtures of the proxy's tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.proxy.house import House, open_house
from tests.proxy.scripted_model import save_tokenizer

HouseBuilder = Callable[..., Awaitable[House]]


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
async def build() -> AsyncIterator[HouseBuilder]:
    """`await build(pairs=2, proxy={...}, ...)`, as `open_house`."""
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> House:
            return await stack.enter_async_context(open_house(**settings))

        yield make
