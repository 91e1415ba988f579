"""A proxy of several models as a process: a whole proxy for each, but for the one port of clients
that they share. They have one event loop, and nothing else that one could keep from another.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from kvrs.config.file import Config, configs_of
from kvrs.config.origin import ConfigFile
from kvrs.errors import ConfigError
from kvrs.net.direct import DirectServer
from kvrs.process.garbage import keep_what_is_there
from kvrs.proxy.models.endpoint import ModelsEndpoint
from kvrs.proxy.process.running import Stop, run_service
from kvrs.proxy.reload import ReloadResult
from kvrs.proxy.server import Proxy

log = logging.getLogger(__name__)


class ModelProxy(Proxy):
    """The proxy of one model. The port of clients is opened by `serve_clients`, for all models."""

    async def _listen_to_clients(self) -> None:
        pass

    async def serve_clients(self, app: web.Application, direct: DirectServer) -> None:
        self.port = await self._listen(app, "port", direct=direct)

    async def refuse_clients(self) -> None:
        """Take no further connections."""
        await self._stop_taking_clients()


class ModelsProxy:
    """The proxy of a configuration with `models`; `by_name` has that of each."""

    def __init__(
        self,
        config: Config,
        secret: bytes,
        older: Sequence[bytes] = (),
        file: ConfigFile | None = None,
    ) -> None:
        self._config = config
        self._configs = configs_of(config)
        self.by_name = {
            name: ModelProxy(
                own,
                secret,
                older,
                None if file is None else _file_of(file, list(self._configs), name),
                beside=partial(self._beside, name),
            )
            for name, own in self._configs.items()
        }
        self._first = next(iter(self.by_name.values()))

    @property
    def port(self) -> int:
        return self._first.port

    @property
    def admin_ports(self) -> dict[str, int]:
        """By model."""
        return {name: proxy.admin_port for name, proxy in self.by_name.items()}

    def _beside(self, name: str) -> list[Config]:
        """The configurations in use of all models but this one."""
        return [proxy.reloads.config for other, proxy in self.by_name.items() if other != name]

    async def start(self) -> None:
        """Raises ConfigError, as `Proxy.start` does."""
        try:
            for name, proxy in self.by_name.items():
                await _start(name, proxy)
            models = {name: proxy.parts for name, proxy in self.by_name.items()}
            app, direct = await ModelsEndpoint(models, self._config.proxy, time.monotonic).open()
            await self._first.serve_clients(app, direct)
        except BaseException:
            await self.close()
            raise
        for proxy in self.by_name.values():
            proxy.port = self.port

    async def run(self) -> None:
        await asyncio.gather(*(proxy.run() for proxy in self.by_name.values()))

    def told_to_end(self) -> None:
        for proxy in self.by_name.values():
            proxy.told_to_end()

    async def leave(self) -> None:
        await asyncio.gather(*(proxy.leave() for proxy in self.by_name.values()))

    async def drain(self) -> None:
        await asyncio.gather(*(proxy.drain() for proxy in self.by_name.values()))

    async def close(self) -> None:
        """End every stream of all models, then release all resources."""
        await self._first.refuse_clients()
        proxies = list(self.by_name.values())
        # That of the port of clients comes last: they read there how their streams ended.
        await asyncio.gather(*(proxy.close() for proxy in proxies if proxy is not self._first))
        await self._first.close()

    async def reload(self) -> ReloadResult:
        """All models take over what has changed for them. Raises ConfigError: for one, it cannot
        be, and nothing of this one has changed.
        """
        found: list[ReloadResult] = []
        faults: list[str] = []
        for name, proxy in self.by_name.items():
            try:
                found.append(await proxy.reload())
            except ConfigError as error:
                faults += [f"model {name!r}: {fault}" for fault in error.faults]
        if faults:
            raise ConfigError(list(dict.fromkeys(faults)))
        return msgspec.structs.replace(
            found[0],
            applied=[key for result in found for key in result.applied],
            restart_needed=[key for result in found for key in result.restart_needed],
        )


async def _start(name: str, proxy: Proxy) -> None:
    """Raises ConfigError, which names the model."""
    try:
        await proxy.start()
    except ConfigError as error:
        raise ConfigError([f"model {name!r}: {fault}" for fault in error.faults]) from None


def _file_of(file: ConfigFile, names: Sequence[str], name: str) -> ConfigFile:
    """The file as one model has it."""

    def read() -> Config:
        configs = configs_of(file.read())
        if list(configs) != list(names):
            raise ConfigError(
                f"models: got {', '.join(configs) or 'none'}; allowed: {', '.join(names)}, in this "
                "order, or a restart of the proxy"
            )
        return configs[name]

    launch = file.launch
    if launch is not None:
        launch = msgspec.structs.replace(launch, digest=launch.of_models.get(name, launch.digest))
    return ConfigFile(file.path, read, launch)


async def serve_models(
    config: Config,
    secret: bytes,
    older: Sequence[bytes] = (),
    file: ConfigFile | None = None,
    watched: Path | None = None,
) -> None:
    """Run the proxy of a configuration with `models` until SIGINT or SIGTERM, as `serve` does."""
    proxy = ModelsProxy(config, secret, older, file)
    stop = Stop(config.proxy.drain_delay_s)

    def ready() -> None:
        keep_what_is_there()
        for name, admin_port in proxy.admin_ports.items():
            extra = {"model": name, "port": proxy.port, "admin_port": admin_port}
            log.info("proxy ready", extra=extra)

    await run_service(proxy, ready, stop, watched)
