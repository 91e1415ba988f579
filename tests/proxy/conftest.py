"""Fixtures of the proxy's tests."""

import asyncio
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvrs.core.fleet import silence
from kvrs_testkit.memory_loop import MemoryLoop
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster
from kvrs_testkit.scripted_model import save_tokenizer

# The openai client asks for it with its first request; the first call runs `uname -p`, which is no
# process of the test's.
platform.processor()

ProxyClusterBuilder = Callable[..., Awaitable[ProxyCluster]]

_SHORTEST_SILENCE_S = silence.SHORTEST_SILENCE_S


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """With sockets, the event loop that the product runs the proxy on; else one in memory and
    virtual time.
    """
    if item.get_closest_marker("network") is None:
        return {"memory": MemoryLoop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that wait at a gate are not to be taken for silent ones, however long a busy machine
    takes for what happens meanwhile.
    """
    monkeypatch.setattr(silence, "SHORTEST_SILENCE_S", 60.0)


@pytest.fixture
def quick_suspicion(monkeypatch: pytest.MonkeyPatch, _patient: None) -> None:
    """Silence is noticed as soon as in the product: for tests of what is silent, or only slow."""
    monkeypatch.setattr(silence, "SHORTEST_SILENCE_S", _SHORTEST_SILENCE_S)


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
