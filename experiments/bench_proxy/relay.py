"""A minimal relay over aiohttp: each request goes to the engine as it is, and each chunk of its
answer to the client. It keeps no journal.

    python -m experiments.bench_proxy.relay --port 0 --engine http://127.0.0.1:9000

`ready PORT` on stdout says that it takes requests.
"""

import argparse
import asyncio

import aiohttp
import uvloop
from aiohttp import web


class Relay:
    def __init__(self, engine: str, session: aiohttp.ClientSession) -> None:
        self._engine = engine
        self._session = session

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        url = self._engine + request.path_qs
        async with self._session.request(
            request.method, url, data=body, headers=headers
        ) as upstream:
            kept = {"Content-Type": upstream.headers.get("Content-Type", "text/plain")}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


async def run(port: int, engine: str) -> None:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", Relay(engine, session).serve)
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=60)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        print("ready", runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--engine", required=True)
    arguments = parser.parse_args()
    uvloop.run(run(arguments.port, arguments.engine))


if __name__ == "__main__":
    main()
