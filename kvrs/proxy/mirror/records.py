"""The record of a resumable stream, and the comparison of two versions of it. Pure.

A record holds a prefix of its stream's events, in order and each once. From ids alone a proxy would
need a tokenizer, and could not repeat log probabilities or tool calls. The owner epoch rises by one
with each grant, the mirror number whenever the owner takes another mirror.

Events of one stream are nearly equal, and small objects in memory. A record whose stream does not
run here has them in compressed blocks, a small part of their size.

Roles of a proxy towards a record, and the effect of each message on a record in each role. Pure.

A record is kept at two proxies. Claims are granted only in the roles UNMIRRORED and MIRROR; the
protocol makes the pairs MIRRORED + MIRROR and MIRROR + COPY, so one proxy of a pair grants.

    role        the stream           the peer of the record           grants claims
    UNMIRRORED  runs at this proxy   none                             yes
    MIRRORED    runs at this proxy   its mirror                       no
    MIRROR      runs elsewhere, or   its owner, or the holder of its  yes
                waits for a client   copy; none: it has to be copied
    COPY        runs elsewhere, or   the proxy that grants claims     no
                waits for a client
"""

import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.protocol.mirror import (
    BYTES_PER_ID,
    RecordVersion,
    StreamEvent,
    StreamHeader,
    StreamState,
    Update,
    unpack_ids,
)


class RecordRole(Enum):
    UNMIRRORED = "unmirrored"
    MIRRORED = "mirrored"
    MIRROR = "mirror"
    COPY = "copy"

    @property
    def is_owner(self) -> bool:
        return self in (RecordRole.UNMIRRORED, RecordRole.MIRRORED)

    @property
    def grants(self) -> bool:
        return ROLE_AFTER[RoleChange.GRANTED][self] is not None


class RoleChange(Enum):
    """Events of this proxy that change the role of a record in place."""

    MIRROR_ASSIGNED = "mirror_assigned"  # The owner has chosen a mirror.
    PEER_LOST = "peer_lost"  # The peer died, or dropped or refused the record.
    ENDED = "ended"  # The stream has stopped running here.
    GRANTED = "granted"  # The stream goes to another owner.
    COPIED = "copied"  # A peer has stored the copy that this proxy sent.


_UNMIRRORED, _MIRRORED, _MIRROR, _COPY = RecordRole

# Role of a record after each change, by its role before; None: the change does not occur in this
# role, or the claim is refused.
ROLE_AFTER: dict[RoleChange, dict[RecordRole, RecordRole | None]] = {
    change: dict(zip(RecordRole, row, strict=True))
    for change, row in {
        # from:                     UNMIRRORED    MIRRORED     MIRROR   COPY
        RoleChange.MIRROR_ASSIGNED: (_MIRRORED, _MIRRORED, None, None),
        RoleChange.PEER_LOST: (_UNMIRRORED, _UNMIRRORED, _MIRROR, _MIRROR),
        RoleChange.ENDED: (_MIRROR, _COPY, None, None),
        RoleChange.GRANTED: (_MIRROR, None, _MIRROR, None),
        RoleChange.COPIED: (None, None, _MIRROR, _MIRROR),
    }.items()
}


class Message(Enum):
    """Kinds of `Update` by their content."""

    HEADER = "header"  # An owner's record from its header on, for a new mirror.
    EVENTS = "events"  # An owner's further events.
    COPY = "copy"  # A whole record, from the only proxy that has the record.


class Relation(Enum):
    """Relation of an update's version to the version of the record under the same key."""

    OUTRANKED = "outranked"  # The record has a later owner.
    STALE = "stale"  # Same owner; the update belongs to an earlier mirror.
    CURRENT = "current"  # Same owner and mirror; a copy has nothing that the record lacks.
    AHEAD = "ahead"  # Same owner, later mirror; or a copy with more of the stream.
    NEWER = "newer"  # The update has a later owner.


class UpdateStep(Enum):
    """Steps of a proxy that receives an update; a table chooses them."""

    STORE = "store"  # Replace the record, in role MIRROR or COPY; a stream that runs here stops.
    APPEND = "append"
    ACKNOWLEDGE = "acknowledge"  # Keep the record, and accept the update.
    PAIR = "pair"  # Keep the record, and note the sender as its peer.
    ASK_HEADER = "ask_header"
    SUPERSEDE = "supersede"  # The sender must drop its record, or stop its stream.


_STORE, _APPEND, _ACK, _PAIR = (
    UpdateStep.STORE,
    UpdateStep.APPEND,
    UpdateStep.ACKNOWLEDGE,
    UpdateStep.PAIR,
)
_ASK, _SUPERSEDE = UpdateStep.ASK_HEADER, UpdateStep.SUPERSEDE

STEP_WITHOUT_RECORD: dict[Message, UpdateStep] = {
    Message.HEADER: _STORE,
    Message.EVENTS: _ASK,
    Message.COPY: _STORE,
}
STEPS: dict[tuple[Message, Relation], dict[RecordRole, UpdateStep]] = {
    key: dict(zip(RecordRole, row, strict=True))
    for key, row in {
        # role:                                UNMIRRORED  MIRRORED    MIRROR      COPY
        (Message.HEADER, Relation.OUTRANKED): (_SUPERSEDE, _SUPERSEDE, _SUPERSEDE, _SUPERSEDE),
        (Message.HEADER, Relation.STALE): (_ASK, _ASK, _ASK, _ASK),
        (Message.HEADER, Relation.CURRENT): (_STORE, _STORE, _STORE, _STORE),
        (Message.HEADER, Relation.AHEAD): (_STORE, _STORE, _STORE, _STORE),
        (Message.HEADER, Relation.NEWER): (_STORE, _STORE, _STORE, _STORE),
        (Message.EVENTS, Relation.OUTRANKED): (_SUPERSEDE, _SUPERSEDE, _SUPERSEDE, _SUPERSEDE),
        (Message.EVENTS, Relation.STALE): (_ASK, _ASK, _ASK, _ASK),
        (Message.EVENTS, Relation.CURRENT): (_ASK, _ASK, _APPEND, _APPEND),
        (Message.EVENTS, Relation.AHEAD): (_ASK, _ASK, _ASK, _ASK),
        (Message.EVENTS, Relation.NEWER): (_ASK, _ASK, _ASK, _ASK),
        # A copy does not come from an owner: a copy of the same owner never stops a stream that
        # runs here.
        (Message.COPY, Relation.OUTRANKED): (_SUPERSEDE, _SUPERSEDE, _SUPERSEDE, _SUPERSEDE),
        (Message.COPY, Relation.STALE): (_SUPERSEDE, _SUPERSEDE, _SUPERSEDE, _SUPERSEDE),
        (Message.COPY, Relation.CURRENT): (_ACK, _ACK, _PAIR, _PAIR),
        (Message.COPY, Relation.AHEAD): (_ACK, _ACK, _STORE, _STORE),
        (Message.COPY, Relation.NEWER): (_STORE, _STORE, _STORE, _STORE),
    }.items()
}


# Time after a grant for which a second claim is refused, because both may have been made at once.
CLAIM_S = 0.25
# Sizes of objects in CPython. A test compares their sums with the memory that is allocated.
_FIXED_BYTES = 1024  # Memory of a record without its events and its prompt.
_BYTES_PER_EVENT = 160  # Memory of an event without its data and its ids.

_PACKED_EVENTS = msgspec.msgpack.Decoder(list[StreamEvent])


class PresentPeers(NamedTuple):
    """Ids of the live peers, and of those among them that records are sent to."""

    live: frozenset[str]
    mirrors: frozenset[str]


@dataclass(slots=True, eq=False)
class Record:
    """A resumable stream, as known by its owner, its mirror or the holder of a copy."""

    key: str
    stream: StreamId
    header: StreamHeader  # Header of the stream; its ages are those at `header_s`.
    header_s: float
    owner: str
    owner_epoch: int
    mirror_no: int = 0
    _events: list[StreamEvent] = field(default_factory=list, init=False)
    # Compressed blocks of the first events; `_events` has the others.
    _packed: list[bytes] = field(default_factory=list, init=False)
    # Ids of the prompt, packed; None: not known yet, or not sent yet.
    prompt_ids: bytes | None = None
    reserved_bytes: int = 0  # Number of bytes counted for the prompt until its ids are known.
    head: bytes | None = None
    state: StreamState = field(default_factory=StreamState)
    touched_s: float = 0.0
    role: RecordRole = RecordRole.UNMIRRORED
    # The other proxy that has the record, as far as known here; None: none.
    peer: str | None = None
    copy_hops: int = 0
    size_bytes: int = _FIXED_BYTES

    def __post_init__(self) -> None:
        self.size_bytes += len(self.header.request)

    @property
    def tenant(self) -> str:
        return self.header.tenant

    def change_role(self, change: RoleChange, peer: str | None) -> None:
        role = ROLE_AFTER[change][self.role]
        assert role is not None, f"{change} in role {self.role}"
        self.role, self.peer = role, peer

    def has_keeper(self, peers: PresentPeers) -> bool:
        """Return whether a live peer has the record, and makes further copies if this proxy grants
        no claims to it. If this proxy grants claims, a peer that is about to end does not count.
        """
        return self.peer in (peers.mirrors if self.role.grants else peers.live)

    @property
    def is_kept(self) -> bool:
        """Return whether the record may be evicted, because the stream does not run here."""
        return not self.role.is_owner

    def is_just_granted(self, now_s: float) -> bool:
        return self.owner_epoch > 0 and self.header_at(now_s).owned_s < CLAIM_S

    @property
    def events(self) -> list[StreamEvent]:
        """The events; a packed record decodes them for each call."""
        return [*self._unpacked(), *self._events] if self._packed else self._events

    def _unpacked(self) -> Iterator[StreamEvent]:
        for block in self._packed:
            yield from _PACKED_EVENTS.decode(zlib.decompress(block))

    @property
    def is_packed(self) -> bool:
        """Return whether no event is left to be packed."""
        return not self._events

    def pack(self, most_bytes: int) -> tuple[int, int]:
        """Compress the next events, up to these bytes and at least one, into a block. Return the
        bytes of these events, and the bytes by which the record has grown, which are less than
        zero.
        """
        size_bytes = count = 0
        for event in self._events:
            count, size_bytes = count + 1, size_bytes + _size_of(event)
            if size_bytes >= most_bytes:
                break
        if not count:
            return 0, 0
        block = zlib.compress(msgspec.msgpack.encode(self._events[:count]), level=1)
        self._packed.append(block)
        self._events = self._events[count:]
        self.size_bytes += len(block) - size_bytes
        return size_bytes, len(block) - size_bytes

    @property
    def seq(self) -> int:
        """Position of a client that has every event of the record; -1: the record has no event."""
        events = self._events
        if not events and self._packed:
            events = _PACKED_EVENTS.decode(zlib.decompress(self._packed[-1]))
        return events[-1].seq if events else -1

    @property
    def output_ids(self) -> "array[int]":
        return unpack_ids(b"".join(event.ids for event in self.events))

    @property
    def version(self) -> RecordVersion:
        return RecordVersion(
            self.stream, self.owner_epoch, self.mirror_no, self.role.grants, self.copy_hops
        )

    def add(self, event: StreamEvent) -> int:
        """Append an event; return the bytes by which the record has grown."""
        grown = _size_of(event)
        if self._packed:
            unpacked = [*self._unpacked()]
            grown += sum(map(_size_of, unpacked)) - sum(map(len, self._packed))
            self._events, self._packed = unpacked + self._events, []
        self._events.append(event)
        self.size_bytes += grown
        return grown

    def reserve_prompt(self, tokens: int) -> None:
        self.reserved_bytes = tokens * BYTES_PER_ID
        self.size_bytes += self.reserved_bytes

    def set_prompt(self, prompt_ids: bytes | None) -> int:
        """Store the packed prompt; return the bytes by which the record has grown."""
        before, self.prompt_ids = self.reserved_bytes + len(self.prompt_ids or b""), prompt_ids
        self.reserved_bytes = 0
        grown = len(prompt_ids or b"") - before
        self.size_bytes += grown
        return grown

    def header_at(self, now_s: float) -> StreamHeader:
        """Return the header with its ages at `now_s`."""
        passed_s = now_s - self.header_s
        return msgspec.structs.replace(
            self.header,
            age_s=self.header.age_s + passed_s,
            owned_s=self.header.owned_s + passed_s,
        )

    def copy(self, now_s: float) -> Update:
        """Make an update with the whole record, for another proxy to keep too."""
        whole = self.update(now_s)
        whole.copy_hops, whole.idle_s = self.copy_hops + 1, now_s - self.touched_s
        return whole

    def update(self, now_s: float, *, from_event: int = 0, with_header: bool = True) -> Update:
        events = self.events[from_event:]
        return Update(
            self.key,
            self.stream,
            self.owner,
            self.owner_epoch,
            self.mirror_no,
            from_event,
            events,
            self.state,
            self.header_at(now_s) if with_header else None,
            self.prompt_ids if from_event == 0 and events else None,
            self.head if from_event == 0 and events else None,
        )


def record_from(
    update: Update,
    now_s: float,
    *,
    role: RecordRole = RecordRole.UNMIRRORED,
    peer: str | None = None,
) -> Record:
    """Make a record from an update that has a header."""
    assert update.header is not None
    record = Record(
        update.key,
        update.stream,
        update.header,
        now_s,
        update.owner,
        update.owner_epoch,
        update.mirror_no,
        role=role,
        peer=peer,
    )
    record.set_prompt(update.prompt_ids)
    record.head, record.state = update.head, update.state
    record.touched_s, record.copy_hops = now_s - update.idle_s, update.copy_hops
    for event in update.events:
        record.add(event)
    return record


def merged(granted: Record, own: Record | None) -> Record:
    """Return the granted record, extended by later events that this proxy has as
    its former owner.
    """
    if own is None or own.stream != granted.stream or own.owner_epoch != granted.owner_epoch - 1:
        return granted
    if own.events[: len(granted.events)] != granted.events:
        return granted
    for event in own.events[len(granted.events) :]:
        granted.add(event)
    granted.set_prompt(granted.prompt_ids or own.prompt_ids)
    granted.head = granted.head or own.head
    granted.state = msgspec.structs.replace(own.state, released=False)
    return granted


def size_of(update: Update) -> int:
    """Estimate the bytes of an update, on the wire and in memory."""
    header_bytes = 0 if update.header is None else len(update.header.request)
    fixed_bytes = _FIXED_BYTES + header_bytes + len(update.prompt_ids or b"")
    return fixed_bytes + sum(map(_size_of, update.events))


def _size_of(event: StreamEvent) -> int:
    return len(event.data) + len(event.ids) + _BYTES_PER_EVENT


def message_of(update: Update) -> Message:
    """Return the kind of an update. Raises RequestError: an incomplete copy."""
    is_whole = update.header is not None and update.first_event == 0
    if update.copy_hops:
        if not is_whole:
            raise RequestError("a copy of a record must be whole: with a header, from event 0 on")
        return Message.COPY
    return Message.HEADER if is_whole else Message.EVENTS


def relation_of(update: Update, record: Record) -> Relation:
    """Compare an update's version with that of the record that this proxy has."""
    is_copy = update.copy_hops > 0
    same = (update.stream, update.owner_epoch) == (record.stream, record.owner_epoch)
    if not same or (update.owner != record.owner and not is_copy):
        return Relation.OUTRANKED if _outranks(record, update) else Relation.NEWER
    if update.mirror_no != record.mirror_no:
        return Relation.STALE if update.mirror_no < record.mirror_no else Relation.AHEAD
    if is_copy and _content(update) > _content(record):
        return Relation.AHEAD
    return Relation.CURRENT


def _outranks(record: Record, update: Update) -> bool:
    """Return whether the record's owner takes precedence over the update's.

    Owners of one epoch (two streams that began at once under one key, or on both sides of a cut
    link) are ordered by stream and name, so that all proxies prefer the same owner.
    """
    if record.owner_epoch != update.owner_epoch:
        return record.owner_epoch > update.owner_epoch
    return (record.stream, record.owner) < (update.stream, update.owner)


def _content(one: Update | Record) -> tuple[bool, int]:
    return one.state.complete, len(one.events)


def best_of(versions: Iterable[tuple[str, RecordVersion]]) -> tuple[str, RecordVersion] | None:
    """Return the proxy from which to claim a stream, and its version: the version of the latest
    owner, then with the latest mirror; None: no versions.
    """
    return max(
        versions,
        key=lambda each: (
            each[1].owner_epoch,
            each[1].mirror_no,
            each[1].grants,
            -each[1].copy_hops,
            each[1].stream,
            each[0],
        ),
        default=None,
    )


def mirror_for(key: str, peers: Iterable[str]) -> str | None:
    """Return the mirror of a key by rendezvous hashing: proxies with the same peers choose the same
    mirror, and a peer that comes or goes moves few keys. None: no peers.
    """
    return max(
        peers,
        key=lambda peer: (blake2b(f"{key}\0{peer}".encode(), digest_size=8).digest(), peer),
        default=None,
    )
