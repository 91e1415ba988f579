"""Facts that nodes publish about themselves: their records, the tables that decisions read, and the
events of changes.

A node's record is a set of entries, each with a kind and a name; the kind determines the encoding
of the value. Records are replicated by scuttlebutt (van Renesse et al., LADIS 2008): every node
writes only its own record, and a version states how much of it another node has.

    entries, by version     1 . 3 4 . . 7 . 9     version 9: the newest edit; overwritten ones leave
                                                  gaps
                                ^floor 4          tombstones up to here are forgotten

A copy that is complete up to version v needs the entries above v. If v lies below the floor, the
copy may have entries that were removed since, so it starts again from 0. Until it has reached the
floor again, it accepts nothing from copies with a lower floor, which may have removed entries too.
"""

from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec

from kvrs.errors import GossipError
from kvrs.gossip.wire import (
    MAX_ENTRIES,
    MAX_NUMBER,
    MAX_VALUE_BYTES,
    Entry,
    Natural,
    RecordDelta,
    Status,
    encoded_bytes,
)
from kvrs.ids import NodeId
from kvrs.protocol.instance import GpuHealth, Role, Seconds

Rate = Annotated[float, msgspec.Meta(ge=0)]
Cause = Annotated[str, msgspec.Meta(max_length=128)]
Key = tuple[int, str]  # Kind and name of an entry.


class FactKind(IntEnum):
    INSTANCE = 1  # Load of an instance; the entry's name is the instance.
    LINK = 2  # Bandwidth of the link into this node; name: the node at the other end.
    SLOTS = 3  # Slots of a target; name: the target instance.
    HOLDER = 4  # Room for checkpoints; name: the agent.
    FAILURE = 5  # Death of a process; name: the failed instance or agent.
    GPU = 6  # Health of a GPU; name: the board's uuid.


class InstanceFact(msgspec.Struct, frozen=True, array_like=True):
    role: Role
    epoch: Natural
    queued: Natural
    running: Natural
    queue_delay_s: Seconds
    free_pages: Natural


class LinkFact(msgspec.Struct, frozen=True, array_like=True):
    bytes_per_s: Rate  # Moving average of the bandwidth.
    spread: Rate  # Mean absolute deviation of the bandwidth, in bytes per second.
    age_s: Seconds  # Time from the last measured transfer to the writing of the fact.


class SlotsFact(msgspec.Struct, frozen=True, array_like=True):
    free: Natural
    wait_s: Seconds  # Expected time until a slot is free; 0: one is.


class HolderFact(msgspec.Struct, frozen=True, array_like=True):
    capacity_bytes: Natural
    reserved_bytes: Natural


class FailureFact(msgspec.Struct, frozen=True, array_like=True):
    """A death, observed by the node whose record contains the fact."""

    epoch: Natural  # Epoch of the dead process.
    cause: Cause
    age_s: Seconds  # Time from the death to the writing of the fact.


Fact = InstanceFact | LinkFact | SlotsFact | HolderFact | FailureFact | GpuHealth
_KINDS: dict[type[Fact], FactKind] = {
    InstanceFact: FactKind.INSTANCE,
    LinkFact: FactKind.LINK,
    SlotsFact: FactKind.SLOTS,
    HolderFact: FactKind.HOLDER,
    FailureFact: FactKind.FAILURE,
    GpuHealth: FactKind.GPU,
}
_decoders = {kind: msgspec.msgpack.Decoder(cls) for cls, kind in _KINDS.items()}
_encoder = msgspec.msgpack.Encoder()


def kind_of(fact: Fact) -> FactKind:
    return _KINDS[type(fact)]


def encode_fact(fact: Fact) -> bytes:
    """Return the fact's encoded value. Raises GossipError: the fact is too long, or out of its
    bounds.
    """
    value = _encoder.encode(fact)
    if len(value) > MAX_VALUE_BYTES:
        raise GossipError(f"a fact of {len(value)} bytes; allowed: at most {MAX_VALUE_BYTES}")
    decode_fact(kind_of(fact), value)
    return value


def decode_fact(kind: FactKind, value: bytes) -> Fact:
    """Return the fact of this kind that the value encodes. Raises GossipError: the value has
    another shape.
    """
    try:
        fact: Fact = _decoders[kind].decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GossipError(f"a fact of kind {kind.name.lower()}: {error}") from None
    return fact


# A node reports the events below to its process.


class MemberChanged(NamedTuple):
    """Another node has joined, left, become suspect, dead or alive again, or was restarted (a new
    `epoch`).
    """

    id: NodeId
    epoch: int
    incarnation: int
    status: Status
    # Nodes that could not reach the member, if it is suspect or dead.
    suspectors: tuple[NodeId, ...]


class RecordChanged(NamedTuple):
    """An entry of a reachable node's record was written or removed; `Gossip.facts` reflects it."""

    node: NodeId
    kind: int
    name: str


class Superseded(NamedTuple):
    """A newer process runs under this node's name, with this epoch; this one sends nothing more."""

    epoch: int


Event = MemberChanged | RecordChanged | Superseded


# Below are the records in which facts are kept and replicated.


def start_for(version: int, floor: int, other_version: int, other_floor: int) -> int | None:
    """Return the version from which on a copy of a record needs the entries of another copy; None:
    these add nothing, or may not be taken.
    """
    if version < other_floor and floor < other_floor:
        return 0
    if version < floor and other_floor < floor:
        return None
    return version if version < other_version else None


@dataclass(slots=True, eq=False)
class VersionedValue:
    version: int
    written_s: float  # Time of writing by this node's clock.
    value: bytes | None  # Value; None: a tombstone.
    # Decoded value; None: a tombstone, or the value is malformed or of a newer release.
    fact: Fact | None


class FactRecord:
    """One node's record, or a copy of it."""

    def __init__(self) -> None:
        self.version = 0
        self.floor = 0
        self.entries: dict[Key, VersionedValue] = {}  # Entries in the order of their versions.

    def write(self, key: Key, value: bytes | None, now_s: float) -> None:
        """Write an entry of this node's own record; the value None makes it a tombstone. The caller
        has checked that it fits.
        """
        self._put(key, self.version + 1, now_s, value)

    def collect(self, before_s: float) -> None:
        """Forget the tombstones of this node's own record that were written before `before_s`."""
        for key, entry in list(self.entries.items()):
            if entry.value is None and entry.written_s < before_s:
                self.floor = max(self.floor, entry.version)
                del self.entries[key]

    def delta(
        self, node: NodeId, epoch: int, start: int, room: int, now_s: float
    ) -> RecordDelta | None:
        """Return the changes after version `start`, as many as fit into `room` bytes; None: there
        is none, or the first does not fit.
        """
        whole = RecordDelta(node, epoch, start, self.version, self.floor, ())
        # MessagePack's header of a long list takes two bytes more than that of an empty one.
        room -= encoded_bytes(whole) + 2
        entries, end = list[Entry](), start
        for (kind, name), held in self._since(start):
            age_ms = min(max(0, int((now_s - held.written_s) * 1e3)), MAX_NUMBER)
            entry = Entry(kind, name, held.version, age_ms, held.value)
            room -= encoded_bytes(entry)
            if room < 0 or len(entries) == MAX_ENTRIES:
                break
            entries.append(entry)
            end = held.version
        else:
            end = self.version
        if end == start or (room < 0 and not entries):
            return None
        return RecordDelta(node, epoch, start, end, self.floor, tuple(entries))

    def _since(self, start: int) -> list[tuple[Key, VersionedValue]]:
        found = []
        for key, entry in reversed(self.entries.items()):
            if entry.version <= start:
                break
            found.append((key, entry))
        return found[::-1]

    def apply(self, delta: RecordDelta, now_s: float) -> list[Key]:
        """Apply the changes that are new to this copy; return their keys. A delta that would leave
        a gap is ignored.
        """
        if delta.start > self.version or (delta.floor < self.floor and self.version < self.floor):
            return []
        changed = list[Key]()
        if delta.floor > self.floor:
            if self.version < delta.floor:
                if delta.start != 0:
                    return []
                changed += self.entries
                self.entries.clear()
                self.version = 0
            self.floor = delta.floor
            for key, held in list(self.entries.items()):
                if held.value is None and held.version <= delta.floor:
                    del self.entries[key]
        for entry in delta.entries:
            key = (entry.kind, entry.name)
            # The number of entries is bounded, whatever a peer sends.
            if self.version < entry.version <= delta.end and (
                key in self.entries or len(self.entries) < MAX_ENTRIES
            ):
                written_s = now_s - entry.age_ms / 1e3
                self._put(key, entry.version, written_s, entry.value)
                changed.append(key)
        self.version = max(self.version, delta.end)
        return changed

    def _put(self, key: Key, version: int, written_s: float, value: bytes | None) -> None:
        fact = None
        if value is not None:
            with suppress(GossipError, ValueError):
                fact = decode_fact(FactKind(key[0]), value)
        self.entries.pop(key, None)
        self.entries[key] = VersionedValue(version, written_s, value, fact)
        self.version = version
