"""The helper: while an instance's model loads after a restart, the instance drafts tokens for the
most congested other instance without a helper.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec

from kvrs.config.cluster import InstanceSettings
from kvrs.config.file import Config
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import (
    HEARTBEAT_S,
    MAX_MESSAGE_BYTES,
    Burst,
    DraftOffer,
    LoadReport,
    MirrorUpdate,
    ReloadState,
    Role,
)
from kvrs.text.output import load_tokenizer
from kvrs_engine.elastic.pairing import by_congestion
from kvrs_engine.engine.anchored import AnchoredMemory
from kvrs_engine.engine.models.reading import WeightReading
from kvrs_engine.engine.requests import Vocabulary
from kvrs_engine.engine.speculation.drafting import Drafting
from kvrs_engine.engine.speculation.paired import NEVER, vocabulary_digest
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.pace import Pace

log = logging.getLogger(__name__)

_AGAIN_S = 0.25  # Pause after all other instances have refused.


class DraftHelper:
    def __init__(
        self,
        config: Config,
        instance: InstanceId,
        others: Sequence[InstanceSettings],
        http: aiohttp.ClientSession,
        reading: WeightReading,
        anchored: AnchoredMemory | None = None,
    ) -> None:
        """`http` authenticates to the other instances; `reading` tracks the draft model's load.
        `anchored` has the draft's weights; None: they are read.
        """
        self.state = ReloadState.LOADING_DRAFT
        self.paired_with: InstanceId | None = None
        self._config, self._instance = config, instance
        # Only decoding instances use drafts.
        self._others = [one for one in others if one.role is not Role.PREFILL]
        self._http, self._reading, self._anchored = http, reading, anchored
        pace = config.speculation.pace
        self._pace = None if pace is None else Pace(pace)

    async def run(self) -> None:
        """Help other instances until cancelled.

        Raises:
            KvrsError: no instance wants drafts, or accepts drafts of this model.
        """
        if not await self._by_congestion():
            raise KvrsError("no other instance wants drafts")
        directory = Path(self._config.speculation.draft or "")
        worker = await self._loaded(directory)
        vocabulary = Vocabulary(load_tokenizer(directory), worker.vocab_size, worker.eos_token_ids)
        offer = DraftOffer(self._instance, vocabulary_digest(vocabulary))
        self.state = ReloadState.ASSIST
        while True:
            for other in await self._by_congestion():
                with suppress(aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
                    await self._help(other, offer, worker)
            await asyncio.sleep(_AGAIN_S)

    async def _loaded(self, directory: Path) -> Worker:
        """Load the draft model in a daemon thread, so that a cancelled load delays nothing."""
        loop = asyncio.get_running_loop()
        worker: asyncio.Future[Worker] = loop.create_future()

        def load() -> None:
            try:
                engine = self._config.cluster.engine
                found = Worker(directory, engine, self._anchored, self._reading)
                found.take_memory(None)
                self._reading.end()
                time.sleep(0.0 if self._pace is None else self._pace.load_s)
            except Exception as error:
                loop.call_soon_threadsafe(_settle, worker, error)
            else:
                loop.call_soon_threadsafe(_settle, worker, found)
            finally:
                self._reading.end()

        threading.Thread(target=load, name="kvrs-draft", daemon=True).start()
        return await worker

    async def _by_congestion(self) -> list[InstanceSettings]:
        """Return the instances that want drafts and have no helper, the most congested first."""
        others = {other.id: other for other in self._others}
        found = await asyncio.gather(*map(self._load, others.values()))
        loads = {name: load for name, load in zip(others, found, strict=True) if load is not None}
        return [others[name] for name in by_congestion(loads, self._instance)]

    async def _load(self, other: InstanceSettings) -> LoadReport | None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
            async with self._http.get(f"{self._config.url_of(other)}/kvrs/v1/load") as answer:
                return msgspec.json.decode(await answer.read(), type=LoadReport)
        return None

    async def _help(self, other: InstanceSettings, offer: DraftOffer, worker: Worker) -> None:
        async with self._http.ws_connect(
            f"{self._config.url_of(other)}/kvrs/v1/drafts",
            max_msg_size=MAX_MESSAGE_BYTES,
            heartbeat=HEARTBEAT_S,
        ) as socket:
            await socket.send_bytes(msgspec.msgpack.encode(offer))
            engine, depth = self._config.cluster.engine, self._config.speculation.depth
            drafting = Drafting(worker, engine, depth, self._pace)
            self.paired_with = other.id
            try:
                await self._draft(socket, drafting)
            finally:
                self.paired_with = None
            if socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION:
                log.info("drafts not wanted", extra={"instance": other.id})

    async def _draft(self, socket: aiohttp.ClientWebSocketResponse, drafting: Drafting) -> None:
        """Receive updates, compute batches and send drafts until the connection ends."""
        received: asyncio.Task[aiohttp.WSMessage] | None = None
        try:
            while True:
                received = received or asyncio.create_task(socket.receive())
                if not drafting.batches.has_work:
                    await asyncio.wait({received})
                if received.done():
                    message, received = received.result(), None
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        if message.data == NEVER:
                            raise KvrsError(message.extra or "refused")
                        return
                    drafting.batches.update(
                        msgspec.msgpack.decode(message.data, type=list[MirrorUpdate])
                    )
                    await asyncio.sleep(0)
                    continue
                bursts: list[Burst] = await asyncio.to_thread(drafting.step)
                if bursts:
                    await socket.send_bytes(msgspec.msgpack.encode(bursts))
        finally:
            if received is not None:
                received.cancel()


def _settle(worker: "asyncio.Future[Worker]", found: Worker | Exception) -> None:
    if worker.done():
        return
    if isinstance(found, Exception):
        worker.set_exception(found)
    else:
        worker.set_result(found)
