"""Runs one instance until it is told to stop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from kvrs.config import Config
from kvrs.engine.http import make_app
from kvrs.engine.instance import EngineInstance
from kvrs.engine.served import EPOCHS_PER_START, ServedInstance
from kvrs.ids import InstanceId
from kvrs.transfer.fault_route import add_fault_route
from kvrs.transfer.http import naming_port


async def serve(
    config: Config, instance_id: InstanceId, start: int, secret: bytes, stop: asyncio.Event, ready: Callable[[], None]
) -> None:
    """Serve until `stop` is set; `ready` is called once requests are taken. `start` must rise with every start of the instance.

    Raises:
        ConfigError: a port is in use.
    """
    instance = EngineInstance(config, instance_id, start * EPOCHS_PER_START, secret)
    async with face_of(instance, allow_faults=config.cluster.allow_faults):
        ready()
        await asyncio.wait({asyncio.ensure_future(stop.wait()), *instance.tasks}, return_when=asyncio.FIRST_COMPLETED)
        if (bug := instance.failed()) is not None:
            raise bug


@asynccontextmanager
async def face_of(instance: ServedInstance, *, allow_faults: bool) -> AsyncIterator[web.Application]:
    """Start an instance and take requests on its port; both end when the block is left.

    Raises:
        ConfigError: a port is in use.
    """
    app = make_app(instance)
    if allow_faults:
        add_fault_route(app, instance.faults, {peer.node for peer in instance.registry.values()})
    # A client that leaves cancels its handler, and with it the run.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5, access_log=None)
    await runner.setup()
    settings, who = instance.settings, f"instance {instance.settings.id}"
    try:
        with naming_port(who, "page_port", settings.host, settings.page_port):
            await instance.start()
        with naming_port(who, "port", settings.host, settings.port):
            await web.TCPSite(runner, settings.host, settings.port, backlog=1024).start()
        yield app
    finally:
        await runner.cleanup()
        await instance.close()
