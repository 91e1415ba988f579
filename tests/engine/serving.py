"""An instance of the real engine with the generated model, in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.routes import make_routes
from kvrs_testkit.ports import instance_client

SECRET = b"a secret of the tests, long enough"


@asynccontextmanager
async def serving(
    model: Path, *, speculation: dict[str, Any] | None = None, **engine: Any
) -> AsyncIterator[tuple[EngineInstance, aiohttp.ClientSession]]:
    """One instance, and a client of its HTTP side."""
    nodes = [{"id": "n0", "instances": [{"id": "e0", "role": "both"}]}]
    config = parse_config(
        {
            "cluster": {
                "model": str(model),
                "engine": {"pages": 1024, **engine},
                "nodes": nodes,
            },
            "speculation": speculation or {},
        }
    )
    instance = EngineInstance(config, InstanceId("e0"), 1, SECRET)
    # A bug that ends the engine's loop leaves requests without an answer; no test shall wait for it
    # for ever.
    async with asyncio.timeout(180), instance_client(make_routes(instance), SECRET) as client:
        await instance.start()
        try:
            yield instance, client
        finally:
            await instance.close()
