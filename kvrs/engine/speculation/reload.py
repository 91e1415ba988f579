"""The start of an instance that was there before: while its model loads it says so to the others,
which may make drafts meanwhile, and with `speculation.source: draft` it makes drafts for one.

The load has the thread of the event loop, so this has a thread and a loop of its own. Nothing waits
for it, neither here nor at the others.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
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
_ANSWER_S = 1.0


@contextmanager
def announced(
    config: Config, instance: InstanceId, start: int, secret: bytes
) -> Iterator[Callable[[], None]]:
    """Tell and help the other instances while the block runs, and tell them once more when it has
    ended; a first start is not announced. Yields a function, to be called once the model is there:
    from then on no instance is helped.
    """
    settings = config.speculation
    if (
        start <= 1
        or settings.source is DraftSourceName.OFF
        or (settings.source is DraftSourceName.LOOKUP and settings.when is DraftTime.ALWAYS)
    ):
        yield lambda: None
        return
    restart = _Restart(config, instance, secret)
    threading.Thread(target=restart.run, name="kvrs-reload", daemon=True).start()
    try:
        yield restart.loaded
    finally:
        restart.over()


class _Restart:
    def __init__(self, config: Config, instance: InstanceId, secret: bytes) -> None:
        self._config, self._instance, self._secret = config, instance, secret
        self._others = [one for _, one in config.cluster.instances() if one.id != instance]
        self._is_loaded = self._is_over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    # In the thread that loads.

    def loaded(self) -> None:
        self._is_loaded = True
        self._wake()

    def over(self) -> None:
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # It has ended.
                self._loop.call_soon_threadsafe(self._news.set)

    # In a thread of its own.

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:
            log.exception("others do not know of this start")

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        keys = instance_keys(self._secret, self._others)
        tls = load_certificates("security.tls", self._config.security.tls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_S, sock_read=FOR_S)
        connector = ProvingConnector(keys, tls)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            helper, helping = None, None
            if self._config.speculation.source is DraftSourceName.DRAFT:
                helper = DraftHelper(self._config, self._instance, self._others, http)
                helping = asyncio.create_task(self._help(helper))
            while not self._is_over:
                if self._is_loaded and helping is not None:
                    helping.cancel()
                    await asyncio.wait({helping})
                    helping = None
                await self._tell(http, FOR_S, helper)
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._news.wait()
                self._news.clear()
            if helping is not None:
                helping.cancel()
                await asyncio.wait({helping})
            await self._tell(http, 0.0, helper)

    async def _help(self, helper: DraftHelper) -> None:
        try:
            await helper.run()
        except (KvrsError, OSError, ValueError) as error:
            helper.state = ReloadState.LOADING
            log.warning("no drafts are made", extra={"cause": str(error)})

    async def _tell(
        self, http: aiohttp.ClientSession, for_s: float, helper: DraftHelper | None
    ) -> None:
        state, partner = ReloadState.LOADING, None
        if helper is not None:
            state, partner = helper.state, helper.paired_with
        if self._is_loaded:
            state = ReloadState.HOTSWAP
        body = msgspec.json.encode(ReloadNotice(self._instance, for_s, state, partner))
        urls = [f"{self._config.url_of(one)}/kvrs/v1/reload" for one in self._others]
        await asyncio.gather(*(self._send(http, url, body) for url in urls))

    async def _send(self, http: aiohttp.ClientSession, url: str, body: bytes) -> None:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with http.post(url, data=body, timeout=timeout):
                pass
