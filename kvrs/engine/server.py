"""Runs one instance until it is told to stop."""

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from kvrs.config import Config, InstanceSettings
from kvrs.engine.faults import add_fault_route
from kvrs.engine.http import make_app
from kvrs.engine.instance import EngineInstance
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId


async def serve(
    config: Config, instance_id: InstanceId, epoch: int, secret: bytes, stop: asyncio.Event, ready: Callable[[], None]
) -> None:
    """Serve until `stop` is set; `ready` is called once requests are taken.

    Raises:
        ConfigError: a port is in use.
    """
    instance = EngineInstance(config, instance_id, epoch, secret)
    # A client that leaves cancels its handler, and with it the run.
    app = make_app(instance)
    if config.cluster.allow_faults:
        add_fault_route(app, instance.page_server.faults, {peer.node for peer in instance.registry.values()})
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5, access_log=None)
    await runner.setup()
    settings = instance.settings
    try:
        with _naming(settings, "page_port"):
            await instance.start()
        with _naming(settings, "port"):
            await web.TCPSite(runner, settings.host, settings.port, backlog=1024).start()
        ready()
        await asyncio.wait({asyncio.ensure_future(stop.wait()), *instance.tasks}, return_when=asyncio.FIRST_COMPLETED)
        if (bug := instance.failed()) is not None:
            raise bug
    finally:
        await runner.cleanup()
        await instance.close()


@contextmanager
def _naming(settings: InstanceSettings, key: str) -> Iterator[None]:
    """Say which port it is that cannot be had."""
    try:
        yield
    except OSError as error:
        why = "in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        address = f"{settings.host}:{getattr(settings, key)}"
        raise ConfigError([f"instance {settings.id}: {key}: {address} is {why}; allowed: a free port"]) from None
