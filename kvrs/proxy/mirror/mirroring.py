"""Keeps the record of every stream that can be resumed at a peer, and finds those of others.

Of the streams that live here each has a mirror among the live peers. What is new goes there some milliseconds later, that of
all streams in one message; an opening, an end, and with `mirror: sync` everything, goes at once.
"""

import asyncio
import logging
from collections.abc import Callable

from kvrs.errors import RequestError, UpstreamError
from kvrs.ids import StreamId
from kvrs.policy.events import Kept
from kvrs.protocol.mirror import Ack, Claim, ClaimAnswer, Opening, Refusal, Seen, Standing, Update
from kvrs.protocol.openai import error_body
from kvrs.proxy.answers import WholeClient
from kvrs.proxy.clients import SseClient
from kvrs.proxy.config import MirrorMode, ProxySettings
from kvrs.proxy.journal import Journal
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.keys import Asking
from kvrs.proxy.mirror.peers import Peers, ProxyPeer
from kvrs.proxy.mirror.records import Outbox, Record, RecordBook, best_of, merged, mirror_for, record_of
from kvrs.proxy.streams import Failed

log = logging.getLogger(__name__)

_GATHER_S = 0.01
_TOUCH_S = 1.0  # Also a stream that is silent is heard of: so its owner learns when it has lost it.
_MOST_BATCH_BYTES = 8 << 20
_TRIES = 4
_AGAIN_S = 0.05

SUPERSEDED = Failed(
    409, error_body("the stream goes on elsewhere: its client has resumed it", kind="server_error", code="superseded")
)
HANDED_OVER = Failed(
    503,
    error_body("the proxy is going: ask another one, with the same key", kind="server_error", code="handed_over"),
    retry_after_s=1.0,
)
_REFUSALS = {
    Refusal.BUSY: (409, "resume_conflict", "the stream has just been resumed by another request"),
    Refusal.OTHER_BODY: (422, "idempotency_mismatch", "the key belongs to a request with another body"),
    Refusal.OTHER_STREAM: (404, "unknown_stream", "the key belongs to another stream than Last-Event-ID"),
    Refusal.INEXACT: (409, "inexact", "what the client has beyond the mirror cannot be made again exactly"),
    Refusal.BEYOND: (400, "beyond_end", "Last-Event-ID lies behind the end of the stream"),
}


class Mirror:
    """`name` is this run of this proxy, and of no other; `stop` ends a stream of the driver's."""

    def __init__(
        self,
        settings: ProxySettings,
        name: str,
        peers: dict[str, ProxyPeer],
        clock: Callable[[], float],
        *,
        kept: Callable[[StreamId], tuple[Kept, ...]],
        stop: Callable[[StreamId, Failed], None],
        count: Callable[[str], None],
    ) -> None:
        self.name = name
        self.book = RecordBook(name)
        self.peers = Peers(peers, self._peer_lost, self._peer_up)
        self._sync = settings.mirror is MirrorMode.SYNC
        self._clock = clock
        self._kept = kept
        self._stop = stop
        self._count = count
        self._streams: dict[str, KeyedStream] = {}  # Those that live here, by key.
        self._closing: dict[str, KeyedStream] = {}  # That are over, and whose mirror has yet to hear of it.
        self._wake = {peer: asyncio.Event() for peer in peers}
        self._hurry = {peer: asyncio.Event() for peer in peers}

    # Streams that live here.

    def open(self, asking: Asking, journal: Journal, record: Record | None, inner: SseClient | WholeClient) -> KeyedStream:
        """The stream lives here from now on: a new one, or one that was found.

        Raises:
            RequestError: there is no room for its record.
        """
        now_s = self._clock()
        if record is None:
            deadlines = (journal.deadlines.ttft_s, journal.deadlines.recovery_gap_s, journal.deadlines.end_to_end_s)
            opening = Opening(asking.digest, journal.seed, deadlines, 0.0, 0.0)
            record = Record(asking.key, journal.stream, opening, now_s, self.name, journal.owner_epoch)
            record.standing = Standing(inexact=journal.inexact)
        self._oust(asking.key)
        record.touched_s = now_s
        if not self.book.own(record, now_s):
            raise RequestError("too many streams are kept to be resumed; without a key there may be room", status=503)
        outbox = Outbox(record)
        stream = journal.stream
        keyed = KeyedStream(
            journal,
            inner,
            outbox,
            self.book,
            asking.after,
            sync=self._sync,
            changed=self._changed,
            kept=lambda: self._kept(stream),
            stop=lambda failure: self._stop(stream, failure),
        )
        self._streams[asking.key] = keyed
        self._assign(keyed)
        return keyed

    def close(self, keyed: KeyedStream) -> None:
        """It does not live here any more; its mirror is told so, and keeps it for a time, as we do."""
        keyed.close()
        record = keyed.record
        if self._streams.get(record.key) is not keyed:
            return
        del self._streams[record.key]
        self.book.let_go(record, self._clock())
        if not record.standing.complete:
            keyed.release()
        if not keyed.outbox.settled:
            self._closing[record.key] = keyed
            self._changed(keyed)

    def forget(self, keyed: KeyedStream) -> None:
        """The request was refused: the next one with its key is a new one."""
        keyed.close()
        if self._streams.get(keyed.record.key) is keyed:
            del self._streams[keyed.record.key]
            self.book.forget(keyed.record.key)

    def hand_over(self) -> None:
        """All of them, because this proxy is going."""
        for keyed in list(self._streams.values()):
            keyed.fail(HANDED_OVER)

    def describe(self) -> dict[str, object]:
        return {
            "peers": {peer.id: "up" if peer.run is not None else "down" for peer in self.peers.known.values()},
            "records": len(self.book.records),
            "record_bytes": self.book.size_bytes,
            "resumable": len(self._streams),
            "unmirrored": sum(keyed.outbox.mirror is None for keyed in self._streams.values()),
        }

    def _oust(self, key: str) -> None:
        if (keyed := self._streams.pop(key, None)) is not None:
            self._count("superseded")
            keyed.fail(SUPERSEDED)
        self._closing.pop(key, None)

    # What peers say.

    def take(self, update: Update) -> Ack:
        ack, ousts = self.book.apply(update, self._clock())
        if ousts:
            self._oust(update.key)
        return ack

    def grant(self, claim: Claim) -> ClaimAnswer:
        answer = self.book.claim(claim, self._clock())
        if answer.granted is not None and not answer.granted.standing.complete:
            self._oust(claim.key)
        return answer

    # Telling the mirrors.

    def _assign(self, keyed: KeyedStream) -> None:
        live = [] if keyed.outbox.full else [peer.id for peer in self.peers.live]
        keyed.outbox.assign(mirror_for(keyed.record.key, live))
        keyed.wake()
        self._changed(keyed)

    def _changed(self, keyed: KeyedStream) -> None:
        mirror, record = keyed.outbox.mirror, keyed.record
        if mirror is None:
            return
        self._wake[mirror].set()
        if self._sync or keyed.outbox.acked < 0 or record.standing.released or record.standing.complete:
            self._hurry[mirror].set()

    def _peer_lost(self, peer: str) -> None:
        self.book.lose_mirror(peer)
        for keyed in [*self._streams.values(), *self._closing.values()]:
            if keyed.outbox.mirror == peer:
                self._assign(keyed)
                if keyed.outbox.mirror is None:
                    self._closing.pop(keyed.record.key, None)

    def _peer_up(self) -> None:
        for keyed in self._streams.values():
            if keyed.outbox.mirror is None:
                self._assign(keyed)

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self.peers.run(), self._touch(), *map(self._tell, self.peers.known.values()))

    async def _touch(self) -> None:
        while True:
            await asyncio.sleep(_TOUCH_S)
            now_s = self._clock()
            self.book.expire(now_s)
            for keyed in list(self._streams.values()):
                keyed.record.touched_s = now_s
                keyed.touch()

    async def _tell(self, peer: ProxyPeer) -> None:
        wake, hurry = self._wake[peer.id], self._hurry[peer.id]
        while True:
            await wake.wait()
            try:
                async with asyncio.timeout(_GATHER_S):
                    await hurry.wait()
            except TimeoutError:
                pass
            wake.clear()
            hurry.clear()
            told, updates = self._updates_for(peer.id)
            if not updates:
                continue
            try:
                answer = await peer.mirror(updates)
            except UpstreamError as error:
                self.peers.fail(peer, str(error))
                continue
            # Before the answer is read: what the process before this one had is gone.
            self.peers.note(peer, answer.run)
            for keyed, mirror_no, ack in zip(told, [update.mirror_no for update in updates], answer.acks, strict=True):
                self._acknowledged(keyed, mirror_no, ack)

    def _updates_for(self, peer: str) -> tuple[list[KeyedStream], list[Update]]:
        told, updates, size_bytes, now_s = [], [], 0, self._clock()
        for keyed in [*self._streams.values(), *self._closing.values()]:
            if keyed.outbox.mirror != peer or not keyed.outbox.dirty:
                continue
            if size_bytes > _MOST_BATCH_BYTES:
                self._wake[peer].set()
                break
            update = keyed.outbox.next(now_s)
            size_bytes += sum(len(event.data) for event in update.events)
            told.append(keyed)
            updates.append(update)
        return told, updates

    def _acknowledged(self, keyed: KeyedStream, mirror_no: int, ack: Ack) -> None:
        outbox = keyed.outbox
        if outbox.mirror is None or outbox.record.mirror_no != mirror_no:
            return
        if ack.superseded:
            if self._streams.get(keyed.record.key) is keyed:
                self._oust(keyed.record.key)
                self.book.forget(keyed.record.key)
            self._closing.pop(keyed.record.key, None)
            return
        outbox.take(ack)
        keyed.wake()
        if outbox.dirty:
            self._changed(keyed)
        elif self._closing.get(keyed.record.key) is keyed:
            del self._closing[keyed.record.key]

    # Finding streams.

    async def find(self, asking: Asking) -> Record | None:
        """The record of a stream, which is this proxy's to go on with; None: nobody knows the key, and it may be a new one.

        Raises:
            RequestError: it cannot be had, or not for certain.
        """
        for turn in range(_TRIES):
            if turn:
                await asyncio.sleep(_AGAIN_S)
            seen, unasked = await self._look(asking)
            best = best_of(seen)
            if best is None:
                if asking.stream is None:
                    return None
                if unasked:
                    raise _error(503, "mirror_unreachable", f"nobody knows the stream, and {unasked[0]} cannot be asked")
                raise _error(404, "unknown_stream", "nobody knows the stream any more")
            answer = await self._claim(best[0], asking, best[1])
            if answer is not None and answer.granted is not None:
                self._count("granted")
                return merged(record_of(answer.granted, self._clock()), self.book.records.get(asking.key))
            if answer is not None and answer.refusal in _REFUSALS and best[1].grants:
                self._count(str(answer.refusal))
                raise _error(*_REFUSALS[answer.refusal])
        self._count("unreachable")
        raise _error(503, "mirror_unreachable", "whoever could grant the stream cannot be asked")

    async def _look(self, asking: Asking) -> tuple[list[tuple[str, Seen]], list[str]]:
        """What each proxy knows of it, and who could not be asked."""
        key = asking.key
        found: list[tuple[str, Seen]] = []
        unasked: list[str] = []
        if (own := self.book.look(key)) is not None:
            found.append((self.name, own))

        async def ask(peer: ProxyPeer) -> None:
            try:
                if (seen := (await peer.look(key)).seen) is not None:
                    found.append((peer.id, seen))
            except UpstreamError as error:
                self.peers.fail(peer, str(error))
                unasked.append(peer.id)

        # Who has a part already wants the rest of it and nothing else: so also those are asked that were not there a moment ago.
        await asyncio.gather(*map(ask, self.peers.live if asking.stream is None else self.peers.known.values()))
        return found, unasked

    async def _claim(self, holder: str, asking: Asking, seen: Seen) -> ClaimAnswer | None:
        claim = Claim(asking.key, self.name, seen, asking.digest, asking.stream, asking.after)
        if holder == self.name:
            return self.grant(claim)
        try:
            return await self.peers.known[holder].claim(claim)
        except UpstreamError as error:
            self.peers.fail(self.peers.known[holder], str(error))
            return None


def _error(status: int, code: str, message: str) -> RequestError:
    return RequestError(message, status=status, code=code)
