"""Drafts that another instance makes while its own model loads, at the instance that verifies
them.

One helper at a time; streams are told to it as they run, and its bursts are used when their turn
comes. Nothing waits for them.
"""

import asyncio
import hashlib
import logging
from collections import deque
from contextlib import suppress

import msgspec
from aiohttp import WSMsgType, web

from kvrs.config.speculation import DraftSourceName, SpeculationSettings
from kvrs.engine.hooks import DraftSource
from kvrs.engine.requests import GenerationRun, Vocabulary
from kvrs.engine.speculation.alignment import Bursts
from kvrs.ids import InstanceId
from kvrs.protocol.speculation import (
    MOST_MESSAGE_BYTES,
    Burst,
    DraftChoice,
    DraftOffer,
    MirrorUpdate,
    SpeculationReport,
)

log = logging.getLogger(__name__)

_OFFER_S = 5.0  # Within which a helper says what it is.


class _Paired:
    """A stream that the helper knows."""

    def __init__(self, number: int, run: GenerationRun) -> None:
        self.number, self.told = number, len(run.sequence.token_ids)
        self.bursts = Bursts()


class PairedDrafts(DraftSource):
    def __init__(self, settings: SpeculationSettings, vocabulary: Vocabulary) -> None:
        self.helper: InstanceId | None = None
        self._depth = settings.depth
        self._vocab_size, self._digest = vocabulary.vocab_size, vocabulary_digest(vocabulary)
        self._streams: dict[GenerationRun, _Paired] = {}
        self._by_number: dict[int, _Paired] = {}
        self._begun = 0
        self._updates: deque[MirrorUpdate] = deque()
        self._news = asyncio.Event()
        self._steps = self._proposed = self._accepted = self._stale = 0

    @property
    def active(self) -> bool:
        return self.helper is not None

    def propose(self, run: GenerationRun, most: int) -> list[int]:
        token_ids = run.sequence.token_ids
        if (paired := self._streams.get(run)) is None:
            self._begun += 1
            paired = self._streams[run] = _Paired(self._begun, run)
            self._by_number[self._begun] = paired
            params = run.params
            choice = DraftChoice(
                params.temperature, params.top_p, params.top_k, params.min_p, params.seed
            )
            self._tell(MirrorUpdate(paired.number, list(token_ids), choice))
        elif paired.told < len(token_ids):
            self._tell(MirrorUpdate(paired.number, token_ids[paired.told :]))
            paired.told = len(token_ids)
        return paired.bursts.proposal(token_ids, min(most, self._depth))

    def verified(self, run: GenerationRun, proposed: int, accepted: int) -> None:
        self._steps += 1
        self._proposed += proposed
        self._accepted += accepted

    def ended(self, run: GenerationRun) -> None:
        if (paired := self._streams.pop(run, None)) is not None:
            del self._by_number[paired.number]
            self._stale += paired.bursts.stale
            self._tell(MirrorUpdate(paired.number))

    def report(self) -> SpeculationReport:
        stale = self._stale + sum(each.bursts.stale for each in self._streams.values())
        return SpeculationReport(
            source=DraftSourceName.DRAFT,
            active=self.active,
            steps=self._steps,
            proposed=self._proposed,
            accepted=self._accepted,
            stale=stale,
            helper=self.helper,
        )

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """The connection of a helper, until one of both ends it."""
        socket = web.WebSocketResponse(max_msg_size=MOST_MESSAGE_BYTES, heartbeat=_OFFER_S)
        await socket.prepare(request)
        try:
            offer = msgspec.msgpack.decode(
                await socket.receive_bytes(timeout=_OFFER_S), type=DraftOffer
            )
            refusal = self._refusal(offer)
        except (TypeError, TimeoutError, msgspec.DecodeError) as error:
            refusal = f"no offer: {error or type(error).__name__}"
        if refusal is not None:
            await socket.close(code=1008, message=refusal.encode()[:120])
            return socket
        self.helper = offer.instance
        log.info("another instance makes drafts", extra={"instance": offer.instance})
        sending = asyncio.create_task(self._send(socket))
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                self._came(msgspec.msgpack.decode(message.data, type=list[Burst]))
        except msgspec.DecodeError as error:
            log.warning("drafts refused", extra={"instance": offer.instance, "cause": str(error)})
        finally:
            sending.cancel()
            self.helper = None
            self._stale += sum(each.bursts.stale for each in self._streams.values())
            self._streams.clear()
            self._by_number.clear()
            self._updates.clear()
            await socket.close()
        return socket

    def _refusal(self, offer: DraftOffer) -> str | None:
        if self.helper is not None:
            return f"{self.helper} makes drafts already"
        if offer.vocabulary != self._digest:
            return f"vocabulary: got {offer.vocabulary}; allowed: {self._digest}"
        return None

    def _tell(self, update: MirrorUpdate) -> None:
        self._updates.append(update)
        self._news.set()

    async def _send(self, socket: web.WebSocketResponse) -> None:
        with suppress(ConnectionError):
            while True:
                await self._news.wait()
                self._news.clear()
                updates = [self._updates.popleft() for _ in range(len(self._updates))]
                await socket.send_bytes(msgspec.msgpack.encode(updates))

    def _came(self, bursts: list[Burst]) -> None:
        for burst in bursts:
            paired = self._by_number.get(burst.number)
            # Ids that the model does not have are no drafts of its vocabulary.
            if paired is not None and max(burst.token_ids, default=0) < self._vocab_size:
                paired.bursts.came(burst.position, burst.token_ids, burst.begins_anew)


def vocabulary_digest(vocabulary: Vocabulary) -> str:
    text = f"{vocabulary.vocab_size}\n{vocabulary.tokenizer.to_str()}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
