"""Drafts from another instance, whose own model is loading, at the instance that verifies them.

The instance has one helper at a time, sends it the streams' tokens, and uses its drafts as they
arrive. No step waits for a draft.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from kvrs.config.sections import DraftSourceName, SpeculationSettings
from kvrs.ids import InstanceId
from kvrs.protocol.instance import (
    HEARTBEAT_S,
    MAX_MESSAGE_BYTES,
    Burst,
    DraftChoice,
    DraftOffer,
    Reload,
    ReloadNotice,
    SpeculationReport,
    in_messages,
)
from kvrs_engine.engine.hooks import DraftSource
from kvrs_engine.engine.requests import GenerationRun, Vocabulary
from kvrs_engine.scheduling.assisted import AssistedStreams, DraftCounts

log = logging.getLogger(__name__)

_OFFER_S = 5.0  # Time limit for a helper's offer.
NEVER = WSCloseCode.UNSUPPORTED_DATA  # No instance of the cluster accepts drafts of this model.
_NOT_NOW = WSCloseCode.POLICY_VIOLATION


class ReloadNotices:
    """The other instances that are restarting, by their own notices."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._notices: dict[InstanceId, tuple[ReloadNotice, float]] = {}  # With time of expiry.

    def note(self, notice: ReloadNotice) -> None:
        self._notices[notice.instance] = notice, self._clock() + notice.for_s

    def now(self) -> dict[InstanceId, Reload]:
        now_s = self._clock()
        return {
            name: notice.reload
            for name, (notice, until_s) in self._notices.items()
            if until_s > now_s
        }


class PairedDrafts(DraftSource):
    def __init__(self, settings: SpeculationSettings, vocabulary: Vocabulary) -> None:
        self.helper: InstanceId | None = None
        self._vocab_size, self._digest = vocabulary.vocab_size, vocabulary_digest(vocabulary)
        self._assisted = AssistedStreams(settings.depth)
        self._news = asyncio.Event()
        self._counts = DraftCounts()
        self._is_ending = False

    @property
    def active(self) -> bool:
        return self.helper is not None

    def propose(self, run: GenerationRun, most: int) -> list[int]:
        params = run.params
        choice = DraftChoice(
            params.temperature, params.top_p, params.top_k, params.min_p, params.seed
        )
        self._news.set()
        return self._assisted.propose(run.sequence, choice, most)

    def verified(self, run: GenerationRun, proposed: int, accepted: int) -> None:
        self._counts.verified(proposed, accepted)

    def ended(self, run: GenerationRun) -> None:
        self._assisted.ended(run.sequence)
        self._news.set()

    def end(self) -> None:
        """Release the helper and accept no other one, because the streams leave this instance."""
        self._is_ending = True
        self._news.set()

    def report(self) -> SpeculationReport:
        counts = self._counts
        return SpeculationReport(
            source=DraftSourceName.DRAFT,
            active=self.active,
            steps=counts.steps,
            proposed=counts.proposed,
            accepted=counts.accepted,
            stale=self._assisted.stale,
            helper=self.helper,
        )

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve the connection of a helper until either side ends it."""
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=HEARTBEAT_S)
        await socket.prepare(request)
        try:
            offer = msgspec.msgpack.decode(
                await socket.receive_bytes(timeout=_OFFER_S), type=DraftOffer
            )
            refusal = self._refusal(offer)
        except (TypeError, TimeoutError, msgspec.DecodeError) as error:
            refusal = _NOT_NOW, f"no offer: {error or type(error).__name__}"
        if refusal is not None:
            code, reason = refusal
            await socket.close(code=code, message=reason.encode()[:120])
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
            log.info("another instance makes no more drafts", extra={"instance": offer.instance})
            self.helper = None
            self._assisted.left()
            await socket.close()
        return socket

    def _refusal(self, offer: DraftOffer) -> tuple[int, str] | None:
        """Return the close code and the reason of a refusal; None: the helper is accepted."""
        if offer.vocabulary != self._digest:
            return NEVER, f"vocabulary: got {offer.vocabulary}; allowed: {self._digest}"
        if self.helper is not None:
            return _NOT_NOW, f"{self.helper} makes drafts already"
        return (_NOT_NOW, "the instance is about to end") if self._is_ending else None

    async def _send(self, socket: web.WebSocketResponse) -> None:
        with suppress(ConnectionError):
            while not self._is_ending:
                await self._news.wait()
                self._news.clear()
                for updates in in_messages(self._assisted.take_updates()):
                    await socket.send_bytes(msgspec.msgpack.encode(updates))
            await socket.close(code=_NOT_NOW, message=b"the instance is about to end")

    def _came(self, bursts: list[Burst]) -> None:
        """Add received drafts, without those that have ids outside the model's vocabulary."""
        self._assisted.came(
            burst for burst in bursts if max(burst.token_ids, default=0) < self._vocab_size
        )


def vocabulary_digest(vocabulary: Vocabulary) -> str:
    text = f"{vocabulary.vocab_size}\n{vocabulary.tokenizer.to_str()}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
