"""Keeps the record of every stream that can be resumed at a peer, and finds those of others.

Of the streams that live here each has a mirror among the live peers. What is new goes there some milliseconds later, that of
all streams in one message; an opening, an end, and with `mirror: sync` everything, goes at once. Of all others, whose clients are
away or have everything, two proxies have the record too: whoever finds itself alone with it sends a copy to a live peer.
"""

import asyncio
import logging
from collections.abc import Callable

from kvrs.errors import RequestError, UpstreamError
from kvrs.ids import StreamId
from kvrs.policy.events import Kept
from kvrs.protocol.mirror import Ack, Claim, ClaimAnswer, Hello, Opening, Refusal, Seen, Standing, Update
from kvrs.protocol.openai import error_body
from kvrs.proxy.answers import WholeClient
from kvrs.proxy.clients import SseClient
from kvrs.proxy.config import MirrorMode, ProxySettings
from kvrs.proxy.journal import Journal
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.keys import Asking
from kvrs.proxy.mirror.peers import Peers, ProxyPeer
from kvrs.proxy.mirror.records import Outbox, Record, RecordBook, best_of, merged, mirror_for, record_of, size_of
from kvrs.proxy.streams import Failed
from kvrs.proxy.texts import Texts

log = logging.getLogger(__name__)

_GATHER_S = 0.01
_TOUCH_S = 1.0  # Also a stream that is silent is heard of: so its owner learns when it has lost it.
_MEND_S = 0.25
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
        texts: Texts,
        kept: Callable[[StreamId], tuple[Kept, ...]],
        stop: Callable[[StreamId, Failed], None],
        count: Callable[[str], None],
    ) -> None:
        self.name = name
        self._id = settings.id
        self.book = RecordBook(name)
        self.peers = Peers(Hello(settings.id, name), peers, self._peer_lost, self._peer_up)
        self._sync = settings.mirror is MirrorMode.SYNC
        self._clock = clock
        self._texts = texts
        self._kept = kept
        self._stop = stop
        self._count = count
        self._streams: dict[str, KeyedStream] = {}  # Those that live here, by key.
        self._closing: dict[str, KeyedStream] = {}  # That are over, and whose mirror has yet to hear of it.
        self._copying: dict[str, str] = {}  # Which peer gets a copy of which record next, by key.
        self._no_room: set[str] = set()  # Records that were refused for it, until some peer comes or goes.
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
            clock=self._clock,
            texts=self._texts,
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
            "uncopied": self.uncopied,
        }

    @property
    def uncopied(self) -> int:
        """Of the records whose streams do not live here, those that nobody else has."""
        return len(self.book.alone({peer.id for peer in self.peers.live}, self._clock()))

    def _oust(self, key: str) -> None:
        if (keyed := self._streams.pop(key, None)) is not None:
            self._count("superseded")
            keyed.fail(SUPERSEDED)
        self._closing.pop(key, None)

    # What peers say.

    def take(self, update: Update, sender: str) -> Ack:
        ack, ousts = (self.book.keep if update.copied else self.book.apply)(update, sender, self._clock())
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
        live, before = [] if keyed.outbox.full else [peer.id for peer in self.peers.live], keyed.record.other
        # Whoever has granted the stream has it already, and is the one who would tell others of it.
        keyed.outbox.assign(before if before in live else mirror_for(keyed.record.key, live))
        keyed.wake()
        self._changed(keyed)

    def _changed(self, keyed: KeyedStream) -> None:
        outbox, standing = keyed.outbox, keyed.record.standing
        if outbox.mirror is None:
            return
        self._wake[outbox.mirror].set()
        if standing.released or standing.complete or outbox.waits(self._clock(), sync=self._sync):
            self._hurry[outbox.mirror].set()

    def _peer_lost(self, peer: str) -> None:
        self.book.lose(peer)
        for keyed in self._streams.values():
            if keyed.outbox.mirror == peer:
                self._assign(keyed)
        # What is over is copied as any other record.
        self._closing = {key: keyed for key, keyed in self._closing.items() if keyed.outbox.mirror != peer}
        self._copying = {key: target for key, target in self._copying.items() if target != peer}
        self._no_room.clear()
        self._mend()

    def _peer_up(self) -> None:
        for keyed in self._streams.values():
            if keyed.outbox.mirror is None:
                self._assign(keyed)
        self._no_room.clear()
        self._mend()

    def _mend(self) -> None:
        """See to it that somebody else has what we are alone with."""
        live = {peer.id for peer in self.peers.live}
        if not live:
            return
        for record in self.book.alone(live, self._clock()):
            if record.key not in self._copying and record.key not in self._no_room:
                target = mirror_for(record.key, live)
                assert target is not None
                self._copying[record.key] = target
                self._wake[target].set()
                self._hurry[target].set()

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self.peers.run(), self._touch(), self._keep_mending(), *map(self._tell, self.peers.known.values()))

    async def _keep_mending(self) -> None:
        while True:
            await asyncio.sleep(_MEND_S)
            self._mend()

    async def _touch(self) -> None:
        while True:
            await asyncio.sleep(_TOUCH_S)
            now_s = self._clock()
            self.book.expire(now_s)
            self._no_room &= self.book.records.keys()
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
            told = self._updates_for(peer.id)
            if not told:
                continue
            try:
                answer = await peer.mirror([update for _, update in told])
            except UpstreamError as error:
                self.peers.fail(peer, str(error))
                continue
            # Before the answer is read: what the process before this one had is gone.
            self.peers.note(peer, answer.run)
            for (whose, update), ack in zip(told, answer.acks, strict=True):
                if isinstance(whose, Record):
                    self._copied(whose, update, peer.id, ack)
                else:
                    self._acknowledged(whose, update.mirror_no, ack)

    def _updates_for(self, peer: str) -> list[tuple[KeyedStream | Record, Update]]:
        told: list[tuple[KeyedStream | Record, Update]] = []
        size_bytes, now_s = 0, self._clock()
        waiting: list[KeyedStream | str] = [
            *(keyed for keyed in self._streams.values() if keyed.outbox.mirror == peer and keyed.outbox.dirty),
            *(keyed for keyed in self._closing.values() if keyed.outbox.mirror == peer and keyed.outbox.dirty),
            *(key for key, target in self._copying.items() if target == peer),
        ]
        for each in waiting:
            if size_bytes > _MOST_BATCH_BYTES:
                self._wake[peer].set()
                break
            if isinstance(each, KeyedStream):
                told.append((each, each.outbox.next(now_s)))
            elif (record := self._still_alone(each)) is not None:
                told.append((record, record.copy(now_s)))
            else:
                continue
            size_bytes += size_of(told[-1][1])
        return told

    def _still_alone(self, key: str) -> Record | None:
        record = self.book.records.get(key)
        if record is not None and key not in self.book.held:
            return record
        del self._copying[key]
        return None

    def _copied(self, record: Record, update: Update, peer: str, ack: Ack) -> None:
        """Another one has said what became of our copy."""
        self._copying.pop(record.key, None)
        if self.book.records.get(record.key) is not record or record.key in self.book.held:
            return
        if ack.superseded:
            self.book.forget(record.key)
        elif ack.full:
            self._no_room.add(record.key)
        elif record.owner_epoch == update.owner_epoch and record.other not in {peer.id for peer in self.peers.live}:
            record.other = peer

    def _acknowledged(self, keyed: KeyedStream, mirror_no: int, ack: Ack) -> None:
        outbox = keyed.outbox
        if outbox.mirror is None or outbox.record.mirror_no != mirror_no:
            return
        if ack.superseded:
            key = keyed.record.key
            if keyed in (self._streams.get(key), self._closing.get(key)):
                self._oust(key)
                self.book.forget(key)
            return
        outbox.take(ack)
        keyed.wake()
        if not outbox.settled:
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
                record = merged(record_of(answer.granted, self._clock()), self.book.records.get(asking.key))
                record.other = None if best[0] == self._id else best[0]
                return record
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
            found.append((self._id, own))

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
        if holder == self._id:
            return self.grant(claim)
        try:
            return await self.peers.known[holder].claim(claim)
        except UpstreamError as error:
            self.peers.fail(self.peers.known[holder], str(error))
            return None


def _error(status: int, code: str, message: str) -> RequestError:
    return RequestError(message, status=status, code=code)
