"""Runs one instance until it is told to stop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from kvrs.config import Config
from kvrs.engine.http import make_app
from kvrs.engine.instance import EngineInstance
from kvrs.engine.served import EPOCHS_PER_START, ServedInstance
from kvrs.ids import InstanceId
from kvrs.transfer.fault_route import add_fault_route
from kvrs.transfer.http import naming_port, watches

_LOOK_AGAIN_S = 0.05


async def serve(
    config: Config,
    instance_id: InstanceId,
    start: int,
    secret: bytes,
    stop: asyncio.Event,
    ready: Callable[[], None],
    at_once: asyncio.Event | None = None,
    older: Sequence[bytes] = (),
) -> None:
    """Serve until `stop` is set, then until nothing is left that others need, at most for `cluster.drain_s` or until `at_once`.

    `ready` is called once requests are taken. `start` must rise with every start of the instance.
    `older`: secrets that are accepted beside the one in use.

    Raises:
        ConfigError: a port is in use.
    """
    instance = EngineInstance(config, instance_id, start * EPOCHS_PER_START, secret, older)
    async with face_of(instance, allow_faults=config.cluster.allow_faults) as app:
        ready()
        stopping = asyncio.ensure_future(_drained(instance, app, stop, at_once or asyncio.Event(), config.cluster.drain_s))
        await asyncio.wait({stopping, *instance.tasks}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if (bug := instance.failed()) is not None:
            raise bug


async def _drained(
    instance: EngineInstance, app: web.Application, stop: asyncio.Event, at_once: asyncio.Event, drain_s: float
) -> None:
    """Until it may end. Who does not watch will not take its streams away, and its leases run out."""
    await stop.wait()
    instance.drain()
    until_s = time.monotonic() + drain_s
    while not instance.drained(watched=watches(app) > 0) and not at_once.is_set() and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_AGAIN_S)


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
