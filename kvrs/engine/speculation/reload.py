"""Tells the other instances, while a model loads, that this one is being started again: with
`speculation.when: reload` they make drafts meanwhile.

The load has the thread of the event loop, so this has a thread of its own. No answer is waited for,
and an instance that hears nothing makes no drafts.
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
from kvrs.ids import InstanceId
from kvrs.protocol.speculation import ReloadNotice
from kvrs.proving import ProvingConnector, instance_keys
from kvrs.tls import load_certificates

log = logging.getLogger(__name__)

PERIOD_S = 1.0
FOR_S = 3 * PERIOD_S  # A notice counts so long: one may be lost.


@contextmanager
def announced(config: Config, instance: InstanceId, start: int, secret: bytes) -> Iterator[None]:
    """Others are told while the block runs, and once more when it has ended; a first start is
    announced to nobody.
    """
    settings = config.speculation
    if (
        start <= 1
        or settings.source is DraftSourceName.OFF
        or settings.when is not DraftTime.RELOAD
    ):
        yield
        return
    announcer = _Announcer(config, instance, secret)
    thread = threading.Thread(target=announcer.run, name="kvrs-reload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        announcer.over.set()
        thread.join()


class _Announcer:
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
        timeout = aiohttp.ClientTimeout(total=PERIOD_S)
        async with aiohttp.ClientSession(
            connector=ProvingConnector(keys, tls), timeout=timeout
        ) as http:
            while not self.over.is_set():
                await self._tell(http, FOR_S)
                await asyncio.to_thread(self.over.wait, PERIOD_S)
            await self._tell(http, 0.0)

    async def _tell(self, http: aiohttp.ClientSession, for_s: float) -> None:
        body = msgspec.json.encode(ReloadNotice(self._instance, for_s))
        urls = [f"{self._config.url_of(one)}/kvrs/v1/reload" for one in self._others]
        await asyncio.gather(*(self._send(http, url, body) for url in urls))

    async def _send(self, http: aiohttp.ClientSession, url: str, body: bytes) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with http.post(url, data=body):
                pass
