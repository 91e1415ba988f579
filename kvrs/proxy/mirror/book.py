"""A proxy's records: of the streams that run here, of streams that it mirrors, and copies. Pure.

A proxy whose role grants claims grants each owner epoch once, in rising order. Updates of an owner
with a lower epoch are refused. `records.py` has the tables.

Finished records make room for any other, oldest first. The record of an interrupted stream, which
its client may resume, makes room only for later records of its own tenant: no tenant ends another
tenant's stream.

Exchange of the prompts that were sent to instances, between proxies and between workers.

`Outbox` is the replication of one stream from its owner to its mirror.

Decisions of a proxy that ends: what it waits for, and when it hands over.

WAIT ──▶ ASK ──▶ HAND_OVER ──▶ CLOSE
          ▲          │
          └──────────┘ another peer is there, which seems to stay
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, assert_never

import msgspec

from kvrs.core.recovery import RecoveryPolicy
from kvrs.protocol.mirror import (
    AckStatus,
    Claim,
    ClaimAnswer,
    RecordVersion,
    Refusal,
    SentPrompt,
    StreamEvent,
    Update,
    UpdateAck,
)
from kvrs.proxy.mirror.records import (
    STEP_WITHOUT_RECORD,
    STEPS,
    Message,
    PresentPeers,
    Record,
    RecordRole,
    RoleChange,
    UpdateStep,
    message_of,
    mirror_for,
    record_from,
    relation_of,
)


class SentPrompts:
    """Prompts that this proxy has sent to instances, for the next message to each peer. A missed
    message is not repeated.
    """

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._waiting: dict[str, list[SentPrompt]] = {}

    def gather(self, peers: Iterable[str]) -> bool:
        """Queue the prompts sent since the last call for these peers; return False if there were
        none.
        """
        if sent := self._policy.take_sent():
            self._waiting = dict.fromkeys(peers, sent)
        return bool(sent)

    def take(self, peer: str) -> list[SentPrompt]:
        """Return the queued prompts of a peer."""
        return self._waiting.pop(peer, [])

    def heard(self, sent: list[SentPrompt]) -> None:
        """Tell the policy of prompts that a peer has sent to instances."""
        self._policy.sent_elsewhere(sent)


# Largest size of a mirrored record in bytes: a larger one would not fit into one message.
_MAX_RECORD_BYTES = 32 << 20
# Time for which a mirror's answer is valid. An owner without a valid answer may have been paused,
# and its stream granted to another owner, so until the next answer its client gets only what the
# mirror has.
_ACK_VALID_S = 0.5


@dataclass(slots=True, eq=False)
class Outbox:
    """State of a stream at its mirror, and the next update to send."""

    record: Record
    mirror: str | None = None
    acked: int | None = None  # Number of events that the mirror has; None: not even the header.
    full: bool = False  # The mirror has no room for the record, or the record is too long.
    dirty: bool = True
    _sent_s: float = -math.inf  # Time at which the last update was sent.
    _acked_s: float = -math.inf  # Time at which the last acknowledged update was sent.

    def assign(self, mirror: str | None) -> None:
        """Replicate the stream to a new mirror from the beginning; None: to no mirror."""
        self.full = self.record.size_bytes > _MAX_RECORD_BYTES
        self.mirror = None if self.full else mirror
        self.acked, self.dirty = None, self.mirror is not None
        self.record.copy_hops = 0
        if self.mirror is None:
            self.record.change_role(RoleChange.PEER_LOST, None)
        else:
            self.record.change_role(RoleChange.MIRROR_ASSIGNED, self.mirror)
            self.record.mirror_no += 1

    def next(self, now_s: float) -> Update:
        self.dirty, self._sent_s = False, now_s
        return self.record.update(now_s, from_event=self.acked or 0, with_header=self.acked is None)

    def take(self, ack: UpdateAck) -> None:
        """Apply the mirror's answer to the last update."""
        assert ack.status is not AckStatus.SUPERSEDED
        is_stored = ack.status is AckStatus.STORED
        self.acked = min(ack.events, len(self.record.events)) if is_stored else None
        self._acked_s = self._sent_s
        self.full = ack.status is AckStatus.FULL or self.record.size_bytes > _MAX_RECORD_BYTES
        if self.full:
            self.mirror = None
            self.record.change_role(RoleChange.PEER_LOST, None)
            # The former mirror may keep a part of the stream, which the higher number marks as
            # outdated.
            self.record.mirror_no += 1
        elif not self._is_level:
            self.dirty = True

    @property
    def _is_level(self) -> bool:
        return self.acked == len(self.record.events)

    @property
    def settled(self) -> bool:
        """Return whether the mirror, if any, has everything."""
        return self.mirror is None or (not self.dirty and self._is_level)

    def waits(self, now_s: float, *, sync: bool) -> bool:
        """Return whether the client may get only what the mirror has."""
        return self.mirror is not None and (
            sync or self.acked is None or now_s > self._acked_s + _ACK_VALID_S
        )

    def sendable(self, now_s: float, *, sync: bool) -> int:
        """Number of events that may go to the client; 0 before the mirror has the header."""
        return self.acked or 0 if self.waits(now_s, sync=sync) else len(self.record.events)


class Delivery(Enum):
    """Treatment of an event for a client that has the stream up to some position."""

    SKIP = "skip"
    SEND = "send"
    CUT = "cut"  # The client has a part of the event, so only the rest may be sent.


def delivery_of(before: int, event: StreamEvent, after: int) -> Delivery:
    """Return what to do with an event that begins at `before`, for a client that has the stream up
    to `after`.
    """
    if event.seq <= after:
        return Delivery.SKIP
    return Delivery.CUT if max(before, 0) < after else Delivery.SEND


# Time after its last message for which an unfinished stream's record is not evicted.
_EVICT_AFTER_S = 5.0
_EVICTED_SHARE = 64  # One of so many finished records is evicted at once.
# Time after its last message after which the events of a record are packed, as long as the stream
# does not run here.
_PACK_AFTER_S = 5.0
# Most bytes of events that are packed at once, and those after which others get a turn of the event
# loop: some 10 ms of work.
_BLOCK_BYTES = 1 << 20
_TURN_BYTES = 2 << 20
_AWAY_S = 10.0  # Time for which a proxy that ends waits for clients to resume their streams.
# Time for which the key of a deleted record is remembered, because updates and copies may still
# arrive.
_DROPPED_S = 30.0


class Received(msgspec.Struct, frozen=True):
    """Outcome of an update from another proxy."""

    ack: UpdateAck
    # The stream that runs here under the key must stop, because the update's owner is later.
    stops_local_stream: bool = False


class RecordBook:
    """A proxy's records, bounded in number, bytes and time. Records of streams that run here are
    never evicted; if these and interrupted streams of other tenants leave no room, new records are
    refused.
    """

    def __init__(
        self, max_records: int = 8192, max_bytes: int = 256 << 20, keep_s: float = 300.0
    ) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self.records: dict[str, Record] = {}
        self.size_bytes = 0
        # Time of deletion by key of a deleted record; at most `max_records` keys.
        self._dropped: dict[str, float] = {}

    def own(self, record: Record, now_s: float) -> bool:
        """Add the record of a stream that starts to run here; False: no room."""
        assert record.role.is_owner
        was_kept = record.key in self.records
        self._drop(record.key)
        if not self._make_room(record.tenant, now_s, record) and not was_kept:
            return False
        self._put(record)
        return True

    def end(self, record: Record, now_s: float) -> None:
        """Note that the stream has stopped running here; its record is kept for `keep_s`."""
        if self.records.get(record.key) is record:
            record.change_role(RoleChange.ENDED, record.peer)
            record.touched_s = now_s

    def add(self, record: Record, event: StreamEvent) -> None:
        self._note_growth(record, record.add(event))

    def set_prompt(self, record: Record, prompt_ids: bytes | None) -> None:
        self._note_growth(record, record.set_prompt(prompt_ids))

    def lose(self, peer: str) -> None:
        """Note that a peer's process is lost, with its records: the records here have no peer any
        more, and this proxy grants the claims that the peer would have granted.
        """
        for record in self.records.values():
            if record.peer == peer:
                record.change_role(RoleChange.PEER_LOST, None)

    def sole(self, peers: PresentPeers, now_s: float) -> list[Record]:
        """Return the records of streams that do not run here, and that no peer keeps. A stream that
        was just granted is left out, because its new owner is about to send an update.
        """
        return [
            record
            for record in self.records.values()
            if not record.has_keeper(peers)
            and not record.role.is_owner
            and not record.is_just_granted(now_s)
        ]

    def receive(self, update: Update, sender: str, now_s: float) -> Received:
        """Apply an owner's update, or a copy, by the table of `records.py`.

        Raises:
            RequestError: an incomplete copy.
        """
        if update.key in self._dropped:
            return Received(UpdateAck(AckStatus.SUPERSEDED))
        message, record = message_of(update), self.records.get(update.key)
        if record is None:
            step = STEP_WITHOUT_RECORD[message]
        else:
            step = STEPS[message, relation_of(update, record)][record.role]
        events = 0 if record is None else len(record.events)
        match step:
            case UpdateStep.STORE:
                role = RecordRole.COPY if message is Message.COPY else RecordRole.MIRROR
                stops = record is not None and record.role.is_owner
                return Received(self._store(update, sender, role, now_s), stops)
            case UpdateStep.APPEND:
                assert record is not None
                return Received(self._append(record, update, sender, now_s))
            case UpdateStep.ACKNOWLEDGE:
                return Received(UpdateAck(AckStatus.STORED, events))
            case UpdateStep.PAIR:
                assert record is not None
                record.peer = sender
                return Received(UpdateAck(AckStatus.STORED, events))
            case UpdateStep.ASK_HEADER:
                return Received(UpdateAck(AckStatus.HEADER_NEEDED))
            case UpdateStep.SUPERSEDE:
                assert record is not None
                if message is Message.COPY and record.peer == sender and not record.role.is_owner:
                    # The sender will drop its record.
                    record.change_role(RoleChange.PEER_LOST, None)
                return Received(UpdateAck(AckStatus.SUPERSEDED))
            case _:
                assert_never(step)

    def _store(self, update: Update, sender: str, role: RecordRole, now_s: float) -> UpdateAck:
        self._drop(update.key)
        record = record_from(update, now_s, role=role, peer=sender)
        if role is RecordRole.COPY:  # A peer's death brings all that it kept at once.
            record.pack(_BLOCK_BYTES)
        if not self._make_room(record.tenant, now_s, record):
            return UpdateAck(AckStatus.FULL)
        self._put(record)
        return UpdateAck(AckStatus.STORED, len(record.events))

    def _append(self, record: Record, update: Update, sender: str, now_s: float) -> UpdateAck:
        known = len(record.events)
        if update.first_event <= known:
            fresh = update.events[known - update.first_event :]
            if known == 0 and fresh:
                record.head = update.head
                self.set_prompt(record, update.prompt_ids)
            for event in fresh:
                self.add(record, event)
            if update.first_event + len(update.events) >= known:
                record.state = update.state
        record.touched_s, record.peer = now_s, sender
        if not self._make_room(record.tenant, now_s) or record.key not in self.records:
            # Drop the record: a part of a stream would be taken for the whole.
            self._drop(record.key)
            return UpdateAck(AckStatus.FULL)
        return UpdateAck(AckStatus.STORED, len(record.events))

    def version(self, key: str) -> RecordVersion | None:
        record = self.records.get(key)
        return None if record is None else record.version

    def claim(self, claim: Claim, now_s: float) -> ClaimAnswer:
        """Grant the stream to the claimant, under the next owner epoch, or return the reason for
        the refusal. A complete stream needs no owner: its record goes to every claimant.
        """
        record = self.records.get(claim.key)
        if record is None:
            return ClaimAnswer(refusal=Refusal.UNKNOWN)
        if (refusal := self._refusal(record, claim, now_s)) is not None:
            return ClaimAnswer(refusal=refusal)
        record.touched_s = now_s
        if record.state.complete:
            return ClaimAnswer(granted=record.update(now_s))
        header = msgspec.structs.replace(record.header_at(now_s), owned_s=0.0)
        record.header, record.header_s = header, now_s
        record.owner_epoch, record.owner = record.owner_epoch + 1, claim.claimant
        record.state = msgspec.structs.replace(record.state, released=False)
        record.change_role(RoleChange.GRANTED, None)
        return ClaimAnswer(granted=record.update(now_s))

    def _refusal(self, record: Record, claim: Claim, now_s: float) -> Refusal | None:
        state = record.state
        if claim.digest != record.header.digest:
            return Refusal.OTHER_BODY
        if claim.stream is not None and claim.stream != record.stream:
            return Refusal.OTHER_STREAM
        if claim.after > record.seq:
            if state.complete:
                return Refusal.BEYOND
            if state.inexact:
                return Refusal.INEXACT
        if state.complete:
            return None
        if claim.version != record.version or not record.role.grants:
            return Refusal.BUSY
        return Refusal.BUSY if record.is_just_granted(now_s) and not state.released else None

    def pack(self, now_s: float) -> Iterator[None]:
        """Pack the events of idle records, which may be all that clients have left at once. Yields
        after each part of the work, behind which the caller lets others run.
        """
        work_bytes = 0
        for record in [*self.records.values()]:
            while self._is_due(record, now_s):
                packed_bytes, grown = record.pack(_BLOCK_BYTES)
                self._note_growth(record, grown)
                work_bytes += packed_bytes
                if work_bytes >= _TURN_BYTES:
                    work_bytes = 0
                    yield

    def _is_due(self, record: Record, now_s: float) -> bool:
        """Return whether a record of the book is idle, and has events to be packed."""
        return (
            not record.is_packed
            and record.is_kept
            and record.touched_s + _PACK_AFTER_S < now_s
            and self.records.get(record.key) is record
        )

    def expire(self, now_s: float) -> None:
        self._dropped = {
            key: at_s for key, at_s in self._dropped.items() if at_s + _DROPPED_S > now_s
        }
        for record in [each for each in self.records.values() if each.is_kept]:
            if record.touched_s + self._keep_s < now_s:
                self._drop(record.key)
        # Records of streams that run here may have grown, so others must make room.
        for tenant in {each.tenant for each in self.records.values() if each.role.is_owner}:
            self._make_room(tenant, now_s)

    def forget(self, key: str, dropped_s: float | None = None) -> None:
        """Forget a record. `dropped_s`: time at which its client deleted it, so that no peer brings
        it back.
        """
        self._drop(key)
        if dropped_s is not None:
            self._dropped[key] = dropped_s
            if len(self._dropped) > self._max_records:
                del self._dropped[next(iter(self._dropped))]

    def _has_room(self, more_records: int, more_bytes: int) -> bool:
        return (
            len(self.records) + more_records <= self._max_records
            and self.size_bytes + more_bytes <= self._max_bytes
        )

    def _make_room(self, tenant: str, now_s: float, new: Record | None = None) -> bool:
        """Evict records until those of a tenant, and a new record, fit; False: not enough records
        can go.
        """
        more_records, more_bytes = (0, 0) if new is None else (1, new.size_bytes)
        while not self._has_room(more_records, more_bytes):
            evicted = self._oldest_finished() or self._oldest_interrupted(tenant, now_s)
            if not evicted:
                return False
            for each in evicted:
                self._drop(each.key)
        return True

    def _oldest_finished(self) -> list[Record]:
        """Return the oldest of the finished records, several of many: to find them takes a look at
        all records.
        """
        finished = [each for each in self.records.values() if each.is_kept and each.state.complete]
        finished.sort(key=_touched_s)
        return finished[: len(finished) // _EVICTED_SHARE + 1]

    def _oldest_interrupted(self, tenant: str, now_s: float) -> list[Record]:
        interrupted = (
            each
            for each in self.records.values()
            if each.tenant == tenant
            and each.is_kept
            and not each.state.complete
            and each.touched_s + _EVICT_AFTER_S <= now_s
        )
        oldest = min(interrupted, key=_touched_s, default=None)
        return [] if oldest is None else [oldest]

    def _put(self, record: Record) -> None:
        self.records[record.key] = record
        self._note_growth(record, record.size_bytes)

    def _note_growth(self, record: Record, size_bytes: int) -> None:
        if self.records.get(record.key) is record:
            self.size_bytes += size_bytes

    def _drop(self, key: str) -> None:
        if (record := self.records.pop(key, None)) is not None:
            self.size_bytes -= record.size_bytes


def awaited(book: RecordBook, staying: frozenset[str], now_s: float) -> int:
    """Number of unfinished streams that do not run here, whose records no staying proxy has, and
    which clients may be about to resume.
    """
    sole = book.sole(PresentPeers(staying, staying), now_s)
    return sum(not one.state.complete and one.touched_s + _AWAY_S > now_s for one in sole)


def _touched_s(record: Record) -> float:
    return record.touched_s


class CopyQueue:
    """Assigns each record that only this proxy has to a live peer, until the peer has acknowledged
    a copy.
    """

    def __init__(self, book: RecordBook) -> None:
        self._book = book
        # Peer that gets a copy of the record next, by the record's key.
        self._targets: dict[str, str] = {}
        # Keys of records that a peer had no room for; tried again when a peer comes or goes.
        self._no_room: set[str] = set()

    def plan(self, peers: PresentPeers, now_s: float) -> set[str]:
        """Assign a peer to each record that needs a copy; return the peers that got any."""
        added: set[str] = set()
        for record in self._book.sole(peers, now_s) if peers.live else []:
            if record.key not in self._targets and record.key not in self._no_room:
                target = mirror_for(record.key, peers.mirrors)
                assert target is not None
                self._targets[record.key] = target
                added.add(target)
        return added

    def records_for(self, peer: str) -> list[Record]:
        """Return the records to copy to this peer. Records that are gone, or whose streams run here
        again, are dropped from the queue.
        """
        records = []
        for key in [key for key, target in self._targets.items() if target == peer]:
            record = self._book.records.get(key)
            if record is None or record.role.is_owner:
                del self._targets[key]
            else:
                records.append(record)
        return records

    def take(
        self, record: Record, update: Update, peer: str, ack: UpdateAck, peers: PresentPeers
    ) -> None:
        """Apply a peer's answer to the copy of a record: the peer keeps it, has no room, or has a
        later one.
        """
        self._targets.pop(record.key, None)
        if self._book.records.get(record.key) is not record or record.role.is_owner:
            return
        if ack.status is AckStatus.SUPERSEDED:
            self._book.forget(record.key)
        elif ack.status is AckStatus.FULL:
            self._no_room.add(record.key)
        elif record.owner_epoch == update.owner_epoch and not record.has_keeper(peers):
            record.change_role(RoleChange.COPIED, peer)

    def peers_changed(self, peers: PresentPeers) -> None:
        self._targets = {key: to for key, to in self._targets.items() if to in peers.mirrors}
        self._no_room.clear()

    def expire(self) -> None:
        self._no_room &= self._book.records.keys()


# Time for which an ending proxy waits before it hands over: proxies that are told to end within
# this time then know it of each other.
TOGETHER_S = 0.5
# Longest time for copies of records that no peer has, after the last stream or the end of the
# drain.
COPIED_WITHIN_S = 2.0
# Number of requests to a peer that seems to stay: a peer that was paused may answer the first one
# before it has read its own signal to end.
_ASKED = 2


class EndStep(Enum):
    """Next step of a proxy that ends. After each step but the last the proxy decides again."""

    WAIT = auto()  # Peers may have been told to end at the same time.
    ASK = auto()  # Ask each peer once whether it stays.
    HAND_OVER = auto()  # Hand streams and records over to staying peers, while clients are served.
    CLOSE = auto()


class Left(NamedTuple):
    """Streams and records of a proxy that ends, and the peers that could take them."""

    streams: int  # Number of streams of clients that are served here.
    away: int  # Number of streams whose clients may be about to resume them here.
    # Number of records that no live peer has, and that would be lost with this process.
    uncopied: int
    has_peers: bool
    staying: frozenset[str]  # Peers that are not known to end.


class Ending:
    """Decides the end of one proxy. `told_s`: time at which it told its peers; `until_s`: end of
    `proxy.drain_s`.
    """

    def __init__(self, told_s: float, until_s: float) -> None:
        self._together_until_s = told_s + TOGETHER_S
        self._until_s = until_s
        # Last time at which a client was waited for; None: not decided yet.
        self._used_s: float | None = None
        self._asked: Mapping[str, int] = {}  # Requests to each peer since it was last away.

    def next_step(self, left: Left, now_s: float) -> EndStep:
        """Return the next step, by the streams, records and peers that are left now."""
        if self._used_s is None and left.has_peers and now_s < self._together_until_s:
            return EndStep.WAIT
        if self._used_s is None:
            self._used_s = now_s
        asked = {peer: self._asked.get(peer, 0) for peer in left.staying}
        if min(asked.values(), default=_ASKED) < _ASKED:
            self._asked = {peer: count + 1 for peer, count in asked.items()}
            return EndStep.ASK
        self._asked = asked
        if (left.streams or left.away) and now_s < self._until_s:
            self._used_s = now_s
            return EndStep.HAND_OVER
        is_copying = left.staying and left.uncopied and now_s < self._used_s + COPIED_WITHIN_S
        return EndStep.HAND_OVER if is_copying else EndStep.CLOSE
