"""Streams that can be resumed: what is kept of each, who may write it, and what its mirror has yet to be told.

Pure. The laws: an owner epoch is granted once by whoever keeps the record, and only rises; what an owner below it says is
refused; a record holds a prefix of the events of its stream, in order and each once, whatever is said twice or is left out.
Two proxies have each record: each knows who the other one is, and once that one is lost it is alone until it has found another.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

import msgspec

from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.protocol.mirror import Ack, Claim, ClaimAnswer, Opening, Refusal, Said, Seen, Standing, Update

CLAIM_S = 0.25  # Two who resume a stream within this time do so at once: the second is refused.
# A longer stream is not mirrored any more: it would not fit into one message.
_MOST_RECORD_BYTES = 32 << 20
_FIXED_BYTES = 512  # Of a record, beside its events and its prompt.
_BYTES_PER_ID = 8
_BYTES_PER_EVENT = 100
# An owner that has not heard from its mirror for so long may have been stopped, and its stream be another's by now: until it has
# asked it gives its client nothing that the mirror does not have.
_TRUST_S = 0.5


@dataclass(slots=True, eq=False)
class Record:
    """What there is of one stream, at its owner as at its mirror."""

    key: str
    stream: StreamId
    opening: Opening  # Its ages are those at `opened_s`.
    opened_s: float
    owner: str
    owner_epoch: int
    mirror_no: int = 0
    events: list[Said] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    head: bytes | None = None
    standing: Standing = field(default_factory=Standing)
    touched_s: float = 0.0
    other: str | None = None  # The peer that has it too.
    grants: bool = True  # Who asks us for it may get it; else who asks `other`.
    copied: int = 0  # Through how many hands it has gone.
    size_bytes: int = _FIXED_BYTES

    def is_young(self, now_s: float) -> bool:
        """Whether it has just been granted to somebody."""
        return self.owner_epoch > 0 and self.open_again(now_s).owned_s < CLAIM_S

    @property
    def seq(self) -> int:
        """Where a client stands that has all of it; -1: there is nothing to have."""
        return self.events[-1].seq if self.events else -1

    @property
    def output_ids(self) -> list[int]:
        return [token_id for event in self.events for token_id in event.ids]

    def add(self, event: Said) -> int:
        """One more event; by how many bytes that makes the record larger."""
        grown = _size_of(event)
        self.events.append(event)
        self.size_bytes += grown
        return grown

    def open_again(self, now_s: float) -> Opening:
        """The opening as it is to be told now."""
        passed_s = now_s - self.opened_s
        return msgspec.structs.replace(self.opening, age_s=self.opening.age_s + passed_s, owned_s=self.opening.owned_s + passed_s)

    def copy(self, now_s: float) -> Update:
        """The whole record, for somebody who is to keep it as well."""
        whole = self.update(now_s)
        whole.copied, whole.idle_s = self.copied + 1, now_s - self.touched_s
        return whole

    def update(self, now_s: float, *, from_event: int = 0, opening: bool = True) -> Update:
        events = self.events[from_event:]
        return Update(
            self.key,
            self.stream,
            self.owner,
            self.owner_epoch,
            self.mirror_no,
            from_event,
            events,
            self.standing,
            self.open_again(now_s) if opening else None,
            self.prompt_ids if from_event == 0 and events else None,
            self.head if from_event == 0 and events else None,
        )


def _size_of(event: Said) -> int:
    return len(event.data) + _BYTES_PER_ID * len(event.ids) + _BYTES_PER_EVENT


def size_of(update: Update) -> int:
    """About so many bytes it takes to say it, and to keep it."""
    return _FIXED_BYTES + _BYTES_PER_ID * len(update.prompt_ids or ()) + sum(map(_size_of, update.events))


def record_of(update: Update, now_s: float) -> Record:
    """What an update with an opening says."""
    assert update.opening is not None
    made = Record(update.key, update.stream, update.opening, now_s, update.owner, update.owner_epoch, update.mirror_no)
    made.prompt_ids, made.head, made.standing = update.prompt_ids, update.head, update.standing
    made.touched_s, made.copied = now_s - update.idle_s, update.copied
    made.size_bytes += _BYTES_PER_ID * len(update.prompt_ids or ())
    for event in update.events:
        made.add(event)
    return made


class RecordBook:
    """The records of one proxy: of its own streams, and of those whose mirror it is. Bounded in number, bytes and time.

    Those of `held` streams, which live here, are never dropped; where they leave no room, nothing new is taken.
    """

    def __init__(self, run: str, most_records: int = 8192, most_bytes: int = 256 << 20, keep_s: float = 300.0) -> None:
        self._run = run
        self._most_records = most_records
        self._most_bytes = most_bytes
        self._keep_s = keep_s
        self.records: dict[str, Record] = {}
        self.held: set[str] = set()
        self.size_bytes = 0

    # As an owner.

    def own(self, record: Record, now_s: float) -> bool:
        """It is ours from now on, and lives here; False: there is no room."""
        was_kept = record.key in self.records
        self._drop(record.key)
        if not self._make_room(now_s, 1, record.size_bytes) and not was_kept:
            return False
        self._put(record)
        self.held.add(record.key)
        return True

    def let_go(self, record: Record, now_s: float) -> None:
        """It does not live here any more, and is kept for a time."""
        if self.records.get(record.key) is record:
            self.held.discard(record.key)
            record.touched_s = now_s

    def add(self, record: Record, event: Said) -> None:
        grown = record.add(event)
        if self.records.get(record.key) is record:
            self.size_bytes += grown

    # As one of two.

    def lose(self, peer: str) -> None:
        """What it had is gone, or cannot be asked for: we are alone with it."""
        for record in self.records.values():
            if record.other == peer:
                record.other, record.grants = None, True

    def alone(self, live: Collection[str], now_s: float) -> list[Record]:
        """What nobody else has, and does not live here. What has just been granted its owner is about to tell of."""
        return [
            record
            for key, record in self.records.items()
            if record.other not in live and key not in self.held and not record.is_young(now_s)
        ]

    def keep(self, update: Update, sender: str, now_s: float) -> tuple[Ack, bool]:
        """Take a copy of what only the sender has, unless what is here is as good; what is returned is as of `apply`.

        Raises:
            RequestError: it is no copy.
        """
        if update.opening is None or update.first_event:
            raise RequestError("a copy of a record is all of it, from its opening on")
        record, lives_here = self.records.get(update.key), update.key in self.held
        if record is not None:
            if _is_behind(update, record):
                # Who hears this drops it.
                if record.other == sender and not lives_here:
                    record.other = None
                return Ack(len(record.events), superseded=True), False
            if lives_here and (update.stream, update.owner_epoch) == (record.stream, record.owner_epoch):
                return Ack(len(record.events)), False
            if not lives_here and not _is_ahead(update, record):
                record.other = sender
                return Ack(len(record.events)), False
        self._drop(update.key)
        made = record_of(update, now_s)
        if not self._make_room(now_s, 1, made.size_bytes):
            return Ack(-1, full=True), lives_here
        made.other, made.grants = sender, False
        self._put(made)
        return Ack(len(made.events)), lives_here

    # As a mirror.

    def apply(self, update: Update, sender: str, now_s: float) -> tuple[Ack, bool]:
        """Take in what an owner says; and whether a stream that lives here has found its master in it."""
        record = self.records.get(update.key)
        if record is not None and _outranks(record, update):
            return Ack(len(record.events), superseded=True), False
        if update.opening is not None and update.first_event == 0:
            return self._open(update, sender, record, now_s)
        if record is None or not _continues(record, update):
            return Ack(-1), False
        known = len(record.events)
        if update.first_event <= known:
            fresh = update.events[known - update.first_event :]
            if known == 0 and fresh:
                record.prompt_ids, record.head = update.prompt_ids, update.head
                self._grow(record, _BYTES_PER_ID * len(update.prompt_ids or ()))
            for event in fresh:
                self.add(record, event)
            if update.first_event + len(update.events) >= known:
                record.standing = update.standing
        record.touched_s, record.other = now_s, sender
        if not self._make_room(now_s) or update.key not in self.records:
            self._drop(update.key)  # A part of it would be taken for all of it.
            return Ack(-1, full=True), False
        return Ack(len(record.events)), False

    def _open(self, update: Update, sender: str, record: Record | None, now_s: float) -> tuple[Ack, bool]:
        if record is not None and update.mirror_no < record.mirror_no and _continues(record, update, any_mirror=True):
            return Ack(-1), False  # It was under way for long.
        ousts = update.key in self.held
        self._drop(update.key)
        made = record_of(update, now_s)
        if not self._make_room(now_s, 1, made.size_bytes):
            return Ack(-1, full=True), ousts
        made.other = sender
        self._put(made)
        return Ack(len(made.events)), ousts

    # As whoever is asked for a stream.

    def look(self, key: str) -> Seen | None:
        record = self.records.get(key)
        if record is None:
            return None
        return Seen(record.stream, record.owner_epoch, record.mirror_no, record.grants, record.copied)

    def claim(self, claim: Claim, now_s: float) -> ClaimAnswer:
        """Grant the stream to the claimant, as the next owner, or say why not. What is complete is for everybody."""
        record = self.records.get(claim.key)
        if record is None:
            return ClaimAnswer(refusal=Refusal.UNKNOWN)
        if (refusal := self._refusal(record, claim, now_s)) is not None:
            return ClaimAnswer(refusal=refusal)
        record.touched_s = now_s
        if record.standing.complete:
            return ClaimAnswer(granted=record.update(now_s))
        record.opening, record.opened_s = msgspec.structs.replace(record.open_again(now_s), owned_s=0.0), now_s
        record.owner_epoch, record.owner = record.owner_epoch + 1, claim.claimant
        record.standing = msgspec.structs.replace(record.standing, released=False)
        record.other, record.grants = None, True
        self.held.discard(claim.key)
        return ClaimAnswer(granted=record.update(now_s))

    def _refusal(self, record: Record, claim: Claim, now_s: float) -> Refusal | None:
        standing = record.standing
        if claim.digest != record.opening.digest:
            return Refusal.OTHER_BODY
        if claim.stream is not None and claim.stream != record.stream:
            return Refusal.OTHER_STREAM
        if claim.after > record.seq:
            if standing.complete:
                return Refusal.BEYOND
            if standing.inexact:
                return Refusal.INEXACT
        seen = self.look(claim.key)
        if standing.complete:
            return None
        if seen is None or seen != claim.seen or not seen.grants:
            return Refusal.BUSY
        return Refusal.BUSY if record.is_young(now_s) and not standing.released else None

    # Room.

    def expire(self, now_s: float) -> None:
        for key in [key for key, record in self.records.items() if record.touched_s + self._keep_s < now_s]:
            if key not in self.held:
                self._drop(key)
        self._make_room(now_s)

    def forget(self, key: str) -> None:
        """There is nothing of it to be resumed."""
        self._drop(key)

    def _make_room(self, now_s: float, more_records: int = 0, more_bytes: int = 0) -> bool:
        """Whether there is room, if need be in place of what has not been touched for longest, and not lately."""
        while len(self.records) + more_records > self._most_records or self.size_bytes + more_bytes > self._most_bytes:
            idle = (record for record in self.records.values() if record.key not in self.held)
            oldest = min(idle, key=lambda record: record.touched_s, default=None)
            is_live = oldest is not None and not oldest.standing.complete and oldest.touched_s + 5.0 > now_s
            if oldest is None or is_live:
                return False
            self._drop(oldest.key)
        return True

    def _put(self, record: Record) -> None:
        self.records[record.key] = record
        self.size_bytes += record.size_bytes

    def _grow(self, record: Record, size_bytes: int) -> None:
        record.size_bytes += size_bytes
        self.size_bytes += size_bytes

    def _drop(self, key: str) -> None:
        self.held.discard(key)
        if (record := self.records.pop(key, None)) is not None:
            self.size_bytes -= record.size_bytes


def _outranks(record: Record, update: Update) -> bool:
    """Whether the record has another owner than the one who speaks, and a better one.

    Of two that began under one key at once, or were cut off from each other, everybody prefers the same.
    """
    if record.owner_epoch != update.owner_epoch:
        return record.owner_epoch > update.owner_epoch
    return (record.stream, record.owner) < (update.stream, update.owner)


def _continues(record: Record, update: Update, *, any_mirror: bool = False) -> bool:
    same = (record.stream, record.owner, record.owner_epoch) == (update.stream, update.owner, update.owner_epoch)
    return same and (any_mirror or record.mirror_no == update.mirror_no)


def _number(said: Update | Record) -> tuple[int, int]:
    return said.owner_epoch, said.mirror_no


def _is_behind(update: Update, record: Record) -> bool:
    """Whether a copy is of a time before the record here; of another stream under the same key, whether nobody prefers it."""
    return _number(update) < _number(record) if update.stream == record.stream else _outranks(record, update)


def _is_ahead(update: Update, record: Record) -> bool:
    said, known = (update.standing.complete, len(update.events)), (record.standing.complete, len(record.events))
    return update.stream != record.stream or (_number(update), said) > (_number(record), known)


@dataclass(slots=True, eq=False)
class Outbox:
    """What the mirror of a stream that lives here knows of it, and what it is told next."""

    record: Record
    mirror: str | None = None
    acked: int = -1  # Events; -1: not even the opening.
    full: bool = False  # The mirror has no room.
    dirty: bool = True
    _asked_s: float = -math.inf  # When the last update went out,
    _heard_s: float = -math.inf  # and the last of those that were answered.

    def assign(self, mirror: str | None) -> None:
        """Another mirror, which knows nothing; or none."""
        self.full = self.record.size_bytes > _MOST_RECORD_BYTES
        mirror = None if self.full else mirror
        self.mirror, self.acked, self.dirty = mirror, -1, mirror is not None
        self.record.other, self.record.grants, self.record.copied = mirror, mirror is None, 0
        if mirror is not None:
            self.record.mirror_no += 1

    def next(self, now_s: float) -> Update:
        self.dirty, self._asked_s = False, now_s
        from_event = max(self.acked, 0)
        return self.record.update(now_s, from_event=from_event, opening=self.acked < 0)

    def take(self, ack: Ack) -> None:
        """The answer to the last update."""
        self.acked = min(ack.events, len(self.record.events))
        self._heard_s = self._asked_s
        self.full = ack.full or self.record.size_bytes > _MOST_RECORD_BYTES
        if self.full:
            self.mirror = self.record.other = None
            self.record.grants = True
            self.record.mirror_no += 1  # The mirror may stay behind with a part of it.
        elif self.acked < len(self.record.events):
            self.dirty = True

    @property
    def settled(self) -> bool:
        """Whether the mirror, if there is one, knows everything."""
        return self.mirror is None or (not self.dirty and self.acked == len(self.record.events))

    def waits(self, now_s: float, *, sync: bool) -> bool:
        """Whether the client gets only what the mirror has."""
        return self.mirror is not None and (sync or self.acked < 0 or now_s > self._heard_s + _TRUST_S)

    def sendable(self, now_s: float, *, sync: bool) -> int:
        """How many events may go to the client: none before the mirror knows of the stream at all."""
        return max(0, self.acked) if self.waits(now_s, sync=sync) else len(self.record.events)


class Fate(Enum):
    """What becomes of an event for a client that has everything up to some place."""

    SKIP = "skip"
    SEND = "send"
    TORN = "torn"  # The client has a part of it, which cannot be cut out.


def fate_of(before: int, event: Said, after: int) -> Fate:
    """`before` is where the client would stand without the event, `after` where it stands."""
    if event.seq <= after:
        return Fate.SKIP
    return Fate.TORN if max(before, 0) < after else Fate.SEND


def best_of(seen: Iterable[tuple[str, Seen]]) -> tuple[str, Seen] | None:
    """Whom to claim a stream from: whoever knows of the latest owner, and of its latest mirror."""
    return max(
        seen,
        key=lambda each: (each[1].owner_epoch, each[1].mirror_no, each[1].grants, -each[1].copied, each[1].stream, each[0]),
        default=None,
    )


def mirror_for(key: str, peers: Iterable[str]) -> str | None:
    """Rendezvous: everybody who knows the same peers finds the same one, and few keys move when one comes or goes."""
    return max(peers, key=lambda peer: (blake2b(f"{key}\0{peer}".encode(), digest_size=8).digest(), peer), default=None)


def merged(granted: Record, own: Record | None) -> Record:
    """What was granted, with what we have beyond it as the owner before."""
    if own is None or own.stream != granted.stream or own.owner_epoch != granted.owner_epoch - 1:
        return granted
    if own.events[: len(granted.events)] != granted.events:
        return granted
    for event in own.events[len(granted.events) :]:
        granted.add(event)
    granted.prompt_ids, granted.head = granted.prompt_ids or own.prompt_ids, granted.head or own.head
    granted.standing = msgspec.structs.replace(own.standing, released=False)
    return granted
