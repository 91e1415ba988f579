"""The server of one instance of the embedded engine."""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from kvrs.config.file import Config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.net.connections import ConnectionLimits
from kvrs.net.http import inner_server, naming_port
from kvrs.net.routes import Routes
from kvrs.net.tls import load_certificates
from kvrs.process.memory import keep_what_is_there, raise_descriptor_limit
from kvrs.protocol.instance import EPOCHS_PER_START
from kvrs.protocol.secrets import Scope, scoped_keys
from kvrs.transfer.fault_route import add_fault_route
from kvrs_engine.engine.instance import EngineInstance, LoadedModel
from kvrs_engine.engine.routes import make_routes
from kvrs_engine.engine.served import ServedInstance
from kvrs_engine.engine.speculation.reload import announced

log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05


async def serve(
    config: Config,
    instance_id: InstanceId,
    start: int,
    secret: bytes,
    stop: asyncio.Event,
    ready: Callable[[], None],
    at_once: asyncio.Event | None = None,
    older: Sequence[bytes] = (),
    loaded: LoadedModel | None = None,
    read: Callable[[], Config] | None = None,
) -> None:
    """Serve until `stop` is set, then until no stream or page is needed, at most for
    `cluster.drain_s` or until `at_once`.

    `ready` is called when requests are accepted. `start` must rise with every start of the
    instance. `older` are secrets that are accepted beside the current one. `loaded` is the model,
    if loaded before. At SIGHUP the configuration is read again by `read`, for new instances.

    Raises:
        ConfigError: a port is in use.
    """
    epoch = start * EPOCHS_PER_START
    with announced(config, instance_id, start, secret) as restart:
        loaded = loaded or LoadedModel.load(
            config, instance_id, secret, restart.reading, restart.loaded, epoch
        )
        restart.loaded()
        instance = EngineInstance(config, instance_id, epoch, secret, older, loaded)
        instance.skipped = restart.skipped
    if read is not None:  # Register the handler first, so that no change is missed.
        learn = partial(_learn, instance, read)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, learn)
    async with serve_http(instance, allow_faults=config.cluster.allow_faults) as routes:
        keep_what_is_there()
        ready()
        restart.keep_draft()
        stopping = asyncio.ensure_future(
            _drained(instance, routes, stop, at_once or asyncio.Event(), config.cluster.drain_s)
        )
        await asyncio.wait({stopping, *instance.tasks}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if (bug := instance.failed()) is not None:
            raise bug


def _learn(instance: EngineInstance, read: Callable[[], Config]) -> None:
    try:
        instance.port.learn(read())
    except ConfigError as error:
        for fault in error.faults:
            log.error("not reloaded", extra={"cause": fault})
    else:
        log.info("reloaded", extra={"peers": len(instance.registry)})


async def _drained(
    instance: EngineInstance,
    routes: Routes,
    stop: asyncio.Event,
    at_once: asyncio.Event,
    drain_s: float,
) -> None:
    """Wait for `stop`, then until the instance may end. A proxy that does not watch the instance
    does not move its streams, whose leases expire.
    """
    await stop.wait()
    instance.drain()
    until_s = time.monotonic() + drain_s
    while (
        not instance.drained(watched=bool(routes.watches))
        and not at_once.is_set()
        and time.monotonic() < until_s
    ):
        await asyncio.sleep(_DRAIN_POLL_S)


@asynccontextmanager
async def serve_http(instance: ServedInstance, *, allow_faults: bool) -> AsyncIterator[Routes]:
    """Start an instance and serve requests on its port until the block ends.

    Raises:
        ConfigError: a port is in use.
    """
    routes = make_routes(instance)
    if allow_faults:
        nodes = {peer.node for peer in instance.registry.values()}
        add_fault_route(routes, instance.faults, nodes, instance.lose_device)
    raise_descriptor_limit()
    settings, name = instance.settings, f"instance {instance.settings.id}"
    keys = scoped_keys(instance.ring, settings.id, Scope.INSTANCE, Scope.ADMIN)
    names, limits = {settings.host, *instance.security.hosts}, ConnectionLimits.of_peers()
    tls = load_certificates("security.tls", instance.security.tls)
    port = inner_server(routes, limits, shutdown_timeout_s=0.5, names=names, keys=keys, tls=tls)
    try:
        with naming_port(name, "page_port", settings.bound(settings.host), settings.page_port):
            await instance.start()
        with naming_port(name, "port", bind := settings.bound(settings.host), settings.port):
            await port.open(bind, settings.port)
        if tls is not None:
            instance.tasks.append(asyncio.create_task(tls.run()))
        yield routes
    except Exception:
        # An instance that has failed must not look alive, not even while it ends.
        port.abort()
        raise
    finally:
        await port.close()
        await instance.close()
