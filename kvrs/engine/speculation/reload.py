"""What an instance does while it is being started again and its model loads: it says so to the
others, which may make drafts meanwhile, and with `speculation.source: draft` it makes drafts for
one.

The load has the thread of the event loop, so this has a thread and a loop of its own. Nothing waits
for it, neither here nor at the others.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import aiohttp
import msgspec

from kvrs.config.file import Config
from kvrs.config.speculation import DraftSourceName, DraftTime
from kvrs.engine.speculation.helping import DraftHelper
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.speculation import ReloadNotice, ReloadState
from kvrs.proving import ProvingConnector, instance_keys
from kvrs.tls import load_certificates

log = logging.getLogger(__name__)

PERIOD_S = 0.5
FOR_S = 3.0  # A notice counts so long: some may be lost.


@contextmanager
def announced(config: Config, instance: InstanceId, start: int, secret: bytes) -> Iterator[None]:
    """Others are told and helped while the block runs, and told once more when it has ended; a
    first start concerns nobody.
    """
    settings = config.speculation
    if (
        start <= 1
        or settings.source is DraftSourceName.OFF
        or (settings.source is DraftSourceName.LOOKUP and settings.when is DraftTime.ALWAYS)
    ):
        yield
        return
    reload = _Reload(config, instance, secret)
    threading.Thread(target=reload.run, name="kvrs-reload", daemon=True).start()
    try:
        yield
    finally:
        reload.over.set()


class _Reload:
    def __init__(self, config: Config, instance: InstanceId, secret: bytes) -> None:
        self.over = threading.Event()
        self._config, self._instance, self._secret = config, instance, secret
        self._others = [one for _, one in config.cluster.instances() if one.id != instance]

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:
            log.exception("others do not know of this start")

    async def _run(self) -> None:
        keys = instance_keys(self._secret, self._others)
        tls = load_certificates("security.tls", self._config.security.tls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=FOR_S / 3, sock_read=FOR_S)
        connector = ProvingConnector(keys, tls)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            helper, helping = None, None
            if self._config.speculation.source is DraftSourceName.DRAFT:
                helper = DraftHelper(self._config, self._instance, self._others, http)
                helping = asyncio.create_task(self._help(helper))
            while not self.over.is_set():
                await self._tell(http, FOR_S, helper)
                await asyncio.to_thread(self.over.wait, PERIOD_S)
            if helping is not None:
                helping.cancel()
                await asyncio.wait({helping})
            await self._tell(http, 0.0, None)

    async def _help(self, helper: DraftHelper) -> None:
        try:
            await helper.run()
        except (KvrsError, OSError, ValueError) as error:
            helper.state = ReloadState.LOADING
            log.warning("no drafts are made", extra={"cause": str(error)})

    async def _tell(
        self, http: aiohttp.ClientSession, for_s: float, helper: DraftHelper | None
    ) -> None:
        notice = ReloadNotice(self._instance, for_s)
        if helper is not None:
            notice = ReloadNotice(self._instance, for_s, helper.state, helper.paired_with)
        body = msgspec.json.encode(notice)
        urls = [f"{self._config.url_of(one)}/kvrs/v1/reload" for one in self._others]
        await asyncio.gather(*(self._send(http, url, body) for url in urls))

    async def _send(self, http: aiohttp.ClientSession, url: str, body: bytes) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with http.post(url, data=body, timeout=aiohttp.ClientTimeout(total=FOR_S / 3)):
                pass
