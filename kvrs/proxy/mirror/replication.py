"""Replication of the records of resumable streams to peers, and search for records at peers.

Each stream that runs here has a mirror among the live peers. Updates of all streams go there in one
message some milliseconds later; headers, ends, and with `mirror: sync` all updates go at once. The
messages also carry the prompts that were sent to instances. Records of other streams, whose clients
are away or have everything, are kept at two proxies too: the only proxy with a record sends a copy
to a live peer.

Functions that read and delete records at all proxies, without taking over the streams.

HTTP routes of the port for other proxies. All of them need the proxy's key.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Generic, TypeVar

import msgspec

from kvrs.config.proxy import MirrorMode, ProxySettings
from kvrs.core.model.cluster_view import SHARE_S
from kvrs.errors import RequestError, UpstreamError
from kvrs.net import http
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.mirror import (
    AckStatus,
    Batch,
    BatchAnswer,
    Claim,
    ClaimAnswer,
    DrainOrder,
    Hello,
    Lookup,
    LookupAnswer,
    ReadAnswer,
    RecordVersion,
    StreamHeader,
    StreamState,
    Update,
    UpdateAck,
)
from kvrs.protocol.secrets import Scope
from kvrs.proxy.fleet.orders import ProxyOrders
from kvrs.proxy.mirror import headers
from kvrs.proxy.mirror.book import CopyQueue, Outbox, RecordBook, SentPrompts
from kvrs.proxy.mirror.headers import ResumeRequest
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.peers import PATH, Peers, ProxyPeer
from kvrs.proxy.mirror.records import (
    Record,
    RecordRole,
    best_of,
    merged,
    mirror_for,
    record_from,
    size_of,
)
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.open_stream import Client
from kvrs.proxy.wire.journal import Journal

log = logging.getLogger(__name__)

# Delay in which updates are gathered, for streams whose clients can continue only from the mirror's
# events.
_GATHER_S = 0.02
# Delay in which updates are gathered, for streams that an engine regenerates exactly.
_GATHER_EXACT_S = 0.1
# Interval of updates of streams without news; the answers tell an owner whether its stream was
# granted elsewhere.
_HEARTBEAT_S = 1.0
# Size in memory after which a batch of updates gets no other one: that much is decoded at once.
_MAX_BATCH_BYTES = 1 << 20
_TRIES = 4
_RETRY_S = 0.05

S = TypeVar("S")


class _Outgoing(msgspec.Struct, frozen=True):
    """An update to send: of a stream that runs here (`source` is the stream), or a copy (`source`
    is the record).
    """

    source: KeyedStream | Record
    update: Update


class Pending(Generic[S]):
    """Streams with news for one peer, in the order of the news. Urgent streams, whose clients wait
    for the peer, are sent at once and alone; otherwise all are sent together when the first is due.
    """

    def __init__(self) -> None:
        self._all: dict[S, None] = {}
        self._urgent: dict[S, None] = {}
        self._due_s = inf
        self._changed = asyncio.Event()

    def add(self, stream: S, within_s: float) -> None:
        """Add a stream to be sent in `within_s` at the latest; 0: urgent."""
        self._all[stream] = None
        if within_s <= 0:
            self._urgent[stream] = None
            self._changed.set()
        else:
            self.hurry(within_s)

    def hurry(self, within_s: float = 0.0) -> None:
        """Make all streams due within this time at the latest."""
        due_s = asyncio.get_running_loop().time() + within_s
        if due_s < self._due_s:
            self._due_s = due_s
            self._changed.set()

    def clear(self) -> None:
        self._all.clear()
        self._urgent.clear()

    async def next(self) -> bool:
        """Wait until a stream is due; return True to send all streams, False for only the urgent
        ones.
        """
        loop = asyncio.get_running_loop()
        while not self._urgent and loop.time() < self._due_s:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if self._due_s == inf else self._due_s):
                    await self._changed.wait()
        if loop.time() < self._due_s:
            return False
        self._due_s = inf
        return True

    def take(self, *, urgent_only: bool) -> Iterator[S]:
        """Yield the streams to be sent, each removed as it is taken."""
        waiting = self._urgent if urgent_only else self._all
        while waiting:
            stream = next(iter(waiting))
            self._all.pop(stream, None)
            self._urgent.pop(stream, None)
            yield stream


class Mirror:
    """The records of a proxy's streams, which it exchanges with its peers. `name` identifies this
    run of this proxy.
    """

    def __init__(
        self, settings: ProxySettings, driver: Driver, metrics: Metrics, peers: dict[str, ProxyPeer]
    ) -> None:
        self._driver = driver
        self._resumes = metrics.resumes
        self.name = driver.run_id
        self.clock = driver.clock
        self._id = settings.id
        self._sync = settings.mirror is MirrorMode.SYNC
        self.book = RecordBook(max_bytes=settings.mirror_bytes)
        me, orders = Hello(settings.id, self.name), ProxyOrders(driver.control, driver.clock)
        self.peers = Peers(me, peers, self._peer_lost, self._peers_changed, orders)
        # Keyed streams that run here, by key of the record.
        self.streams: dict[str, KeyedStream] = {}
        # Ended streams whose mirror does not have all events yet, by key of the record.
        self._closing: dict[str, KeyedStream] = {}
        # Streams with news, by the peer that gets them.
        self._pending = defaultdict[str, Pending[KeyedStream]](Pending)
        self._copies = CopyQueue(self.book)
        self.sent = SentPrompts(driver.control.policy)

    def open(
        self,
        resume: ResumeRequest,
        journal: Journal,
        record: Record | None,
        inner: Client,
        *,
        sync: bool = False,
    ) -> KeyedStream:
        """Start to replicate a stream, new or with a found record.

        Raises:
            RequestError: no room for the record, or the client has events beyond the mirror that
                cannot be regenerated exactly.
        """
        now_s = self.clock()
        if record is None:
            record = self._new_record(resume, journal, now_s)
        elif resume.after > record.seq and journal.holds_text_back:
            raise headers.inexact()
        self.supersede(record.key)
        record.touched_s = now_s
        if not self.book.own(record, now_s):
            raise RequestError(
                "too many streams are kept to be resumed; without a key there may be room",
                status=503,
            )
        keyed = KeyedStream(
            journal,
            inner,
            Outbox(record),
            self.book,
            resume.after,
            self._driver,
            sync=self._sync or sync,
            changed=self._changed,
        )
        self.streams[record.key] = keyed
        self._assign(keyed)
        return keyed

    def _new_record(self, resume: ResumeRequest, journal: Journal, now_s: float) -> Record:
        limits = journal.deadlines
        deadlines = (limits.ttft_s, limits.recovery_gap_s, limits.end_to_end_s)
        whom, what = resume.tenant, resume.request
        header = StreamHeader(resume.digest, journal.seed, deadlines, 0.0, 0.0, whom, what)
        record = Record(
            resume.keys[0], journal.stream, header, now_s, self.name, journal.owner_epoch
        )
        record.state = StreamState(inexact=journal.exactness.elsewhere)
        ids = journal.prompt_ids
        record.reserve_prompt(journal.prompt_tokens_guess if ids is None else len(ids))
        return record

    def close(self, keyed: KeyedStream) -> None:
        """Note that a stream has stopped running here; its mirror gets the rest of it, and both
        keep the record for a time.
        """
        keyed.close()
        record = keyed.record
        if self.streams.get(record.key) is not keyed:
            return
        del self.streams[record.key]
        self.book.end(record, self.clock())
        if not record.state.complete:
            keyed.release()
        if not keyed.outbox.settled:
            self._closing[record.key] = keyed
            self._changed(keyed)

    def forget(self, keyed: KeyedStream) -> None:
        """Forget the stream of a refused request, so that the next request with its key starts a
        new stream.
        """
        keyed.close()
        if self.streams.get(keyed.record.key) is keyed:
            del self.streams[keyed.record.key]
            self.book.forget(keyed.record.key)

    def hand_over(self) -> None:
        """End every stream that a staying proxy mirrors, because this proxy shuts down; the clients
        resume them elsewhere.
        """
        staying = self.peers.staying
        for keyed in list(self.streams.values()):
            if keyed.outbox.mirror in staying:
                keyed.fail(headers.HANDED_OVER)

    def describe(self) -> dict[str, object]:
        return {
            "peers": {
                peer.id: "up" if peer.run is not None else "down"
                for peer in self.peers.known.values()
            },
            "records": len(self.book.records),
            "record_bytes": self.book.size_bytes,
            "resumable": len(self.streams),
            "unmirrored": sum(keyed.outbox.mirror is None for keyed in self.streams.values()),
            "uncopied": self.uncopied,
        }

    @property
    def uncopied(self) -> int:
        """Number of records that would be lost with this process: no live peer has all of them, and
        their streams do not run here.
        """
        return len(self.book.sole(self.peers.present, self.clock())) + len(self._closing)

    def supersede(self, key: str) -> None:
        if (keyed := self.streams.pop(key, None)) is not None:
            self._resumes.labels("superseded").inc()
            keyed.fail(headers.SUPERSEDED)
        self._closing.pop(key, None)

    def take(self, update: Update, sender: str) -> UpdateAck:
        received = self.book.receive(update, sender, self.clock())
        if received.stops_local_stream:
            self.supersede(update.key)
        return received.ack

    def grant(self, claim: Claim) -> ClaimAnswer:
        if (keyed := self.streams.get(claim.key)) is not None:
            keyed.note_state()
        answer = self.book.claim(claim, self.clock())
        if answer.granted is not None and not answer.granted.state.complete:
            self.supersede(claim.key)
        return answer

    def _assign(self, keyed: KeyedStream) -> None:
        mirrors, granter = self.peers.present.mirrors, keyed.record.peer
        if keyed.outbox.full:
            mirrors = frozenset()
        # Prefer the proxy that granted the stream as its mirror, because it has the record already.
        keyed.outbox.assign(
            granter if granter in mirrors else mirror_for(keyed.record.key, mirrors)
        )
        keyed.wake()
        self._changed(keyed)

    def _changed(self, keyed: KeyedStream) -> None:
        outbox, state = keyed.outbox, keyed.record.state
        if outbox.mirror is None:
            return
        is_urgent = state.released or state.complete
        if is_urgent or outbox.waits(self.clock(), sync=keyed.sync):
            within_s = 0.0
        else:
            journal = keyed.journal
            is_exact = not (journal.exactness.elsewhere or journal.holds_text_back)
            within_s = _GATHER_EXACT_S if is_exact else _GATHER_S
        self._pending[outbox.mirror].add(keyed, within_s)

    def _peer_lost(self, peer: str) -> None:
        self.book.lose(peer)
        self._pending[peer].clear()
        # The rest of an ended stream reaches a peer as a copy of its record.
        self._closing = {
            key: keyed for key, keyed in self._closing.items() if keyed.outbox.mirror != peer
        }
        self._peers_changed()

    def _peers_changed(self) -> None:
        mirrors = self.peers.present.mirrors
        for keyed in self.streams.values():
            if keyed.outbox.mirror not in mirrors:
                self._assign(keyed)
        self._copies.peers_changed(self.peers.present)
        self._re_replicate()

    def _re_replicate(self) -> None:
        for target in self._copies.plan(self.peers.present, self.clock()):
            self._pending[target].hurry()

    async def run(self) -> None:
        """Exchange records with the peers until cancelled."""
        await asyncio.gather(
            self.peers.run(self._send_updates), self._heartbeat(), self._keep_replicated()
        )

    async def _keep_replicated(self) -> None:
        while True:
            await asyncio.sleep(SHARE_S if self.peers.known else _HEARTBEAT_S)
            self._re_replicate()
            if self.sent.gather(live := self.peers.live_ids):
                for peer in live:
                    self._pending[peer].hurry()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for _ in self.book.pack(self.clock()):
                await asyncio.sleep(0)
            self.book.expire(self.clock())
            self._copies.expire()
            _touch(self.streams.values(), self.clock())

    async def _send_updates(self, peer: ProxyPeer) -> None:
        pending = self._pending[peer.id]
        while True:
            is_all = await pending.next()
            batch = self._batch_for(peer.id, urgent_only=not is_all)
            sent = self.sent.take(peer.id)
            if not batch and not sent:
                continue
            try:
                answer = await peer.mirror([each.update for each in batch], sent)
            except UpstreamError as error:
                self.peers.fail(peer, str(error))
                continue
            # Note the peer's run before the acks are read: a new process at the address has no
            # records of the former run.
            self.peers.on_answer(peer, answer.run)
            for each, ack in zip(batch, answer.acks, strict=True):
                if isinstance(each.source, Record):
                    self._copies.take(each.source, each.update, peer.id, ack, self.peers.present)
                else:
                    self._acknowledged(each.source, each.update.mirror_no, ack)

    def _batch_for(self, peer: str, *, urgent_only: bool) -> list[_Outgoing]:
        batch, size_bytes = [], 0
        for each in self._outgoing(peer, urgent_only=urgent_only):
            batch.append(each)
            size_bytes += size_of(each.update)
            if size_bytes > _MAX_BATCH_BYTES:
                self._pending[peer].hurry()
                break
        return batch

    def _outgoing(self, peer: str, *, urgent_only: bool) -> Iterator[_Outgoing]:
        now_s = self.clock()
        for keyed in self._pending[peer].take(urgent_only=urgent_only):
            if (
                keyed.outbox.mirror == peer
                and keyed.outbox.dirty
                and _is_in(keyed, self.streams, self._closing)
            ):
                keyed.note_state()
                yield _Outgoing(keyed, keyed.outbox.next(now_s))
        for record in () if urgent_only else self._copies.records_for(peer):
            yield _Outgoing(record, record.copy(now_s))

    def _acknowledged(self, keyed: KeyedStream, mirror_no: int, ack: UpdateAck) -> None:
        outbox = keyed.outbox
        if outbox.mirror is None or outbox.record.mirror_no != mirror_no:
            return
        if ack.status is AckStatus.SUPERSEDED:
            if _is_in(keyed, self.streams, self._closing):
                self.supersede(keyed.record.key)
                self.book.forget(keyed.record.key)
            return
        outbox.take(ack)
        keyed.wake()
        if not outbox.settled:
            self._changed(keyed)
        elif self._closing.get(keyed.record.key) is keyed:
            del self._closing[keyed.record.key]

    async def find(self, resume: ResumeRequest) -> Record | None:
        """Claim a stream, and return its record under the new owner epoch; None: no proxy knows the
        key, so the request may start a new stream.

        Raises:
            RequestError: the claim was refused, or the stream may be at an unreachable proxy.
        """
        for turn in range(_TRIES):
            if turn:
                await asyncio.sleep(_RETRY_S)
            best = await self._best_version(resume)
            if best is None:
                return None
            key, holder, version = best
            claim = Claim(key, self.name, version, resume.digest, resume.stream, resume.after)
            is_own = holder == self._id
            answer = self.grant(claim) if is_own else await self.peers.claim(holder, claim)
            if answer is None:
                continue
            if answer.granted is not None:
                self._resumes.labels("granted").inc()
                role, peer = (
                    (RecordRole.UNMIRRORED, None) if is_own else (RecordRole.MIRRORED, holder)
                )
                granted = record_from(answer.granted, self.clock(), role=role, peer=peer)
                if (keyed := self.streams.get(key)) is not None:
                    # The record's state must include the events that the mirror lacks.
                    keyed.note_state()
                return merged(granted, self.book.records.get(key))
            if version.grants and (error := headers.refused(answer.refusal)) is not None:
                self._resumes.labels(str(answer.refusal)).inc()
                raise error
        self._resumes.labels("unreachable").inc()
        raise headers.unreachable("the proxy that grants the stream cannot be reached")

    async def _best_version(self, resume: ResumeRequest) -> tuple[str, str, RecordVersion] | None:
        """Find the best version of the stream's record; return the record's key, the proxy that has
        it, and the version. None: no proxy knows the key.
        """
        unreachable: list[str] = []
        for key in resume.keys:
            # A client that has a part needs the rest of this very stream, so peers that were just
            # down are asked too.
            found = await self.peers.lookup(key, live_only=resume.stream is None)
            if (own := self.book.version(key)) is not None:
                found.versions[self._id] = own
            if (best := best_of(found.versions.items())) is not None:
                return key, *best
            unreachable += found.unreachable
        if resume.stream is None:
            return None
        if unreachable:
            raise headers.unreachable(
                f"no proxy that answers has a record of the stream, and "
                f"{unreachable[0]} cannot be reached"
            )
        raise headers.unknown_stream()


def _is_in(keyed: KeyedStream, *books: Mapping[str, KeyedStream]) -> bool:
    """Return whether one of these mappings has this very stream, not a later stream of its key."""
    return any(book.get(keyed.record.key) is keyed for book in books)


def _touch(streams: Iterable[KeyedStream], now_s: float) -> None:
    for keyed in list(streams):
        keyed.record.touched_s = now_s
        keyed.mark_dirty()


class StoredRecord(msgspec.Struct, frozen=True):
    record: Record
    runs: bool  # The stream runs at the proxy from which the record was read.


def own_record(mirror: Mirror, key: str) -> ReadAnswer:
    """Return the record that this proxy has under a key, if any."""
    if (record := mirror.book.records.get(key)) is None:
        return ReadAnswer(None, runs=False)
    if (keyed := mirror.streams.get(key)) is not None:
        keyed.note_state()
    return ReadAnswer(record.update(record.header_s), runs=record.role.is_owner)


def drop_own(mirror: Mirror, key: str) -> LookupAnswer:
    """Forget the record here, and end its stream if it runs here; return the record's version."""
    found = LookupAnswer(mirror.book.version(key))
    mirror.supersede(key)
    mirror.book.forget(key, dropped_s=mirror.clock())
    return found


async def read_record(mirror: Mirror, keys: Sequence[str], now_s: float) -> StoredRecord | None:
    """Return the record under one of the keys, from the stream's owner or else from its mirror;
    None: no proxy has it.
    """
    for key in keys:
        found = (await mirror.peers.lookup(key, live_only=True)).versions
        answers = [(version, mirror.peers.known[name]) for name, version in found.items()]
        own = mirror.book.version(key)
        ranked: list[tuple[RecordVersion, ProxyPeer | None]] = [*answers]
        if own is not None:
            ranked.append((own, None))
        for _, peer in sorted(ranked, key=lambda each: _rank(each[0]), reverse=True):
            answer = (
                own_record(mirror, key)
                if peer is None
                else await mirror.peers.answer(peer, peer.read(key))
            )
            if answer is not None and answer.record is not None and answer.record.header:
                return StoredRecord(record_from(answer.record, now_s), answer.runs)
    return None


def _rank(version: RecordVersion) -> tuple[int, int, bool, bool]:
    """Return the sort key of a version: the latest owner comes first, even though it does not grant
    claims while it has a mirror.
    """
    is_first = version.copy_hops == 0
    return version.owner_epoch, version.mirror_no, is_first, not version.grants


async def drop_record(mirror: Mirror, keys: Sequence[str]) -> bool:
    """Forget the record at all live proxies; return whether there was one."""
    answers: list[LookupAnswer | None] = [drop_own(mirror, key) for key in keys]
    peers = mirror.peers
    asked = [peers.answer(peer, peer.drop(key)) for key in keys for peer in peers.live]
    answers += await asyncio.gather(*asked)
    return any(answer is not None and answer.version is not None for answer in answers)


Body = TypeVar("Body")


def make_routes(mirror: Mirror) -> Routes:
    async def watch(request: Request) -> Response:
        return await http.watch(request, mirror.peers.hello, mirror.peers.news)

    async def hello(request: Request) -> Response:
        mirror.peers.on_hello(_decode(await request.read(), Hello))
        return _answer(mirror.peers.hello())

    async def take(request: Request) -> Response:
        batch = _decode(await request.read(), Batch)
        mirror.peers.check(batch.sender)
        mirror.sent.heard(batch.sent)
        return _answer(
            BatchAnswer(
                mirror.name, [mirror.take(update, batch.sender) for update in batch.updates]
            )
        )

    async def lookup(request: Request) -> Response:
        key = _decode(await request.read(), Lookup).key
        return _answer(LookupAnswer(mirror.book.version(key)))

    async def claim(request: Request) -> Response:
        return _answer(mirror.grant(_decode(await request.read(), Claim)))

    async def read(request: Request) -> Response:
        return _answer(own_record(mirror, _decode(await request.read(), Lookup).key))

    async def drop(request: Request) -> Response:
        return _answer(drop_own(mirror, _decode(await request.read(), Lookup).key))

    async def drain(request: Request) -> Response:
        mirror.peers.orders.obey(_decode(await request.read(), DrainOrder))
        return _answer(mirror.peers.hello())

    routes = http.authenticated(Scope.PROXY)
    routes.add("GET", PATH, watch)
    for path, handler in (
        *(("", take), ("/hello", hello), ("/lookup", lookup), ("/claim", claim)),
        *(("/read", read), ("/drop", drop), ("/drain", drain)),
    ):
        routes.add("POST", f"{PATH}{path}", handler)
    return routes


def _answer(message: msgspec.Struct) -> Response:
    return Response(200, msgspec.msgpack.encode(message), {"Content-Type": "application/msgpack"})


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(str(error)) from None
