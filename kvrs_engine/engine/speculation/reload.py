"""The restart of an instance with `speculation.source: draft`: while its model loads, the instance
sends notices to the other instances and drafts tokens for one of them.

The load occupies the thread of the event loop, so this module has its own thread and loop. No
instance waits for it.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import msgspec

from kvrs.config.file import Config
from kvrs.config.sections import DraftSourceName
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.net.proving import ProvingConnector, instance_keys
from kvrs.net.tls import load_certificates
from kvrs.protocol.instance import MAX_READY_S, MAX_REASON, Reload, ReloadNotice, ReloadState
from kvrs_engine.engine.anchored import AnchoredMemory
from kvrs_engine.engine.models.reading import reading_of
from kvrs_engine.engine.speculation.helping import DraftHelper

log = logging.getLogger(__name__)

PERIOD_S = 0.5
FOR_S = 3.0  # Validity of a notice, of which some may be lost.
_ANSWER_S = 1.0


@contextmanager
def announced(
    config: Config, instance: InstanceId, start: int, secret: bytes
) -> Iterator["Restart"]:
    """Notify and help the other instances while the block runs, and notify them of its end. A first
    start is not announced.
    """
    restart = Restart(config, instance, start, secret)
    if not restart.is_announced:
        yield restart
        return
    threading.Thread(target=restart.run, name="kvrs-reload", daemon=True).start()
    try:
        yield restart
    finally:
        restart.over()


class Restart:
    def __init__(self, config: Config, instance: InstanceId, start: int, secret: bytes) -> None:
        """Raises ConfigError if the profile of `pace` has no load time."""
        self._config, self._instance, self._secret = config, instance, secret
        self._others = [one for _, one in config.cluster.instances() if one.id != instance]
        self._is_loaded = self._is_over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._helper: DraftHelper | None = None
        self._logged: tuple[ReloadState, InstanceId | None] | None = None
        self.skipped = ""  # The reason why no drafts are made.
        speculation, engine = config.speculation, config.cluster.engine
        self.is_announced = start > 1 and speculation.source is DraftSourceName.DRAFT
        self._helps = self.is_announced
        draft = Path(speculation.draft or "")
        self._draft_reading = reading_of(draft, engine.disk_bytes_per_s, speculation.pace)
        # The memory of the node's agent for the draft's weights; None: there is no state plane.
        self._memory: AnchoredMemory | None = None
        if speculation.source is DraftSourceName.DRAFT and config.state_plane.enabled:
            node, _ = config.cluster.find(instance)
            self._memory = AnchoredMemory(config, node.id, instance, secret)
        self._is_kept = self._helps and self._memory is not None and self._memory.has_weights(draft)
        # A draft that the agent keeps is not read, so the model does not wait for it.
        before = self._draft_reading if self._helps and not self._is_kept else None
        model = Path(config.cluster.model or "")
        pace = config.cluster.engine.pace
        self.reading = reading_of(model, engine.disk_bytes_per_s, pace, before)
        if self._helps and not self._draft_reading.is_shorter_than(self.reading):
            self._skip("the draft model is not smaller than the model")

    # `loaded` and `over` run in the thread that loads.

    def loaded(self) -> None:
        """Stop helping, because the model is loaded."""
        if self._helps and (
            self._helper is None or self._helper.state is ReloadState.LOADING_DRAFT
        ):
            self._skip("the model was loaded first")
        self._is_loaded = True
        self._wake()

    def over(self) -> None:
        self._is_over = True
        self._wake()

    def keep_draft(self) -> None:
        """Have the node's agent keep the draft's weights for the next start; a thread reads them if
        it has none.
        """
        if self._memory is not None:
            threading.Thread(target=self._keep, name="kvrs-keep-draft", daemon=True).start()

    def _keep(self) -> None:
        assert self._memory is not None
        try:
            self._memory.keep_weights(Path(self._config.speculation.draft or ""))
        except KvrsError as error:
            log.warning("the agent does not keep the draft", extra={"cause": str(error)})

    def now(self) -> Reload:
        """Return the current notice."""
        left_s = self.reading.left_s()
        ready_in_s = None if left_s is None else min(left_s, MAX_READY_S)
        if self._is_loaded:
            return Reload(ReloadState.HOTSWAP, None, ready_in_s, self.skipped)
        helper = self._helper if self._helps else None
        state, partner = ReloadState.LOADING, None
        if helper is not None:
            state, partner = helper.state, helper.paired_with
        return Reload(state, partner, ready_in_s, self.skipped)

    def _wake(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._news.set)

    def run(self) -> None:
        """Run in a separate thread until `over`."""
        try:
            asyncio.run(self._run())
        except Exception:
            log.exception("no notices of this restart are sent")

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        keys = instance_keys(self._secret, self._others)
        tls = load_certificates("security.tls", self._config.security.tls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_S, sock_read=FOR_S)
        connector = ProvingConnector(keys, tls)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            helping = None
            if self._helps:
                memory = self._memory if self._is_kept else None
                self._helper = DraftHelper(
                    self._config, self._instance, self._others, http, self._draft_reading, memory
                )
                helping = asyncio.create_task(self._help(self._helper))
            while not self._is_over:
                if self._is_loaded and helping is not None:
                    helping.cancel()
                    await asyncio.wait({helping})
                    helping = None
                await self._tell(http, FOR_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._news.wait()
                self._news.clear()
            if helping is not None:
                helping.cancel()
                await asyncio.wait({helping})
            await self._tell(http, 0.0)

    async def _help(self, helper: DraftHelper) -> None:
        try:
            await helper.run()
        except Exception as error:  # Also errors of torch, such as too little memory.
            self._skip(str(error) if isinstance(error, KvrsError) else repr(error))

    def _skip(self, reason: str) -> None:
        self._helps, self.skipped = False, f"draft: {reason}"[:MAX_REASON]
        self._draft_reading.end()
        log.info("no drafts are made", extra={"cause": reason})

    async def _tell(self, http: aiohttp.ClientSession, for_s: float) -> None:
        now = self.now()
        if (now.state, now.paired_with) != self._logged:
            self._logged = now.state, now.paired_with
            log.info(
                "state of the start", extra={"state": now.state, "paired_with": now.paired_with}
            )
        body = msgspec.json.encode(ReloadNotice(self._instance, for_s, now))
        urls = [f"{self._config.url_of(one)}/kvrs/v1/reload" for one in self._others]
        await asyncio.gather(*(self._send(http, url, body) for url in urls))

    async def _send(self, http: aiohttp.ClientSession, url: str, body: bytes) -> None:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with http.post(url, data=body, timeout=timeout):
                pass
