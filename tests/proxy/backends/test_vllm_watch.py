"""The watch of a vLLM instance, at its end."""

import asyncio

import pytest

from kvrs.proxy.backends.idle_connection import IdleConnection


@pytest.mark.network
async def test_a_watch_that_is_cancelled_as_its_process_dies_is_cancelled() -> None:
    """Else the watcher would go on for ever, and the proxy with it."""
    idle = IdleConnection("http://127.0.0.1:1")

    async def watch() -> None:
        async with idle:
            await idle.wait(0.0)
            await asyncio.sleep(60)

    watching = asyncio.create_task(watch())
    while idle._gone is None or not idle._gone.done():
        await asyncio.sleep(0.01)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
