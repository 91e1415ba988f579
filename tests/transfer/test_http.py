"""What the HTTP faces of instances and agents have in common."""

import asyncio

import aiohttp
import msgspec
from aiohttp import web

from kvrs.protocol.secrets import http_token
from kvrs.transfer import http

SECRET = b"only for the tests"


class Report(msgspec.Struct):
    epoch: int = 1


async def watched(request: web.Request) -> web.StreamResponse:
    return await http.watch(request, Report)


async def test_a_face_that_shuts_down_waits_for_no_watcher() -> None:
    """A watch has no end of its own; whoever waits for it is late by all that a last answer may take."""
    app = http.new_app(SECRET)
    app.router.add_get("/watched", watched)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=3600, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    headers = {"Authorization": f"Bearer {http_token(SECRET)}"}
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as client,
        client.get("/watched?watch=3600") as watching,
    ):
        first = await watching.content.readline()

        async with asyncio.timeout(20):
            await runner.cleanup()

    assert first == b'{"epoch":1}\n'
