"""Records by scuttlebutt (van Renesse et al., LADIS 2008): every node writes only its own record,
and a version states how much of it another node has.

    entries, by version     1 . 3 4 . . 7 . 9     version 9: the newest edit; overwritten ones leave
                                                  gaps
                                ^floor 4          tombstones up to here are forgotten

A copy that is complete up to version v needs the entries above v. If v lies below the floor, the
copy may have entries that were removed since, so it starts again from 0. Until it has reached the
floor again, it accepts nothing from copies with a lower floor, which may have removed entries too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvrs.gossip.wire import MAX_ENTRIES, Entry, RecordDelta, entry_bytes, record_bytes
from kvrs.ids import NodeId

Key = tuple[int, str]  # Kind and name.


def start_for(version: int, floor: int, other_version: int, other_floor: int) -> int | None:
    """The version from which a copy needs the other's entries; None: they would not help it."""
    if version < other_floor and floor < other_floor:
        return 0
    if version < floor and other_floor < floor:
        return None
    return version if version < other_version else None


@dataclass(slots=True, eq=False)
class VersionedValue:
    version: int
    written_s: float  # By the clock of this node.
    value: bytes | None  # None: a tombstone.


class FactRecord:
    """One node's record, or a copy of it."""

    __slots__ = ("entries", "floor", "version")

    def __init__(self) -> None:
        self.version = 0
        self.floor = 0
        self.entries: dict[Key, VersionedValue] = {}  # In the order of their versions.

    def write(self, key: Key, value: bytes | None, now_s: float) -> None:
        """Write an entry as the owner; None removes it. The caller has checked that it fits."""
        self.version += 1
        self.entries.pop(key, None)
        self.entries[key] = VersionedValue(self.version, now_s, value)

    def collect(self, before_s: float) -> None:
        """Forget tombstones that were written before `before_s`, as the owner."""
        old = [
            key
            for key, entry in self.entries.items()
            if entry.value is None and entry.written_s < before_s
        ]
        for key in old:
            self.floor = max(self.floor, self.entries.pop(key).version)

    def delta(
        self, node: NodeId, epoch: int, start: int, room: int, now_s: float
    ) -> tuple[RecordDelta, int] | None:
        """Changes since `start`, as many as fit, and a bound of their bytes; None: none fits."""
        room -= record_bytes(node)
        entries, size, end = list[Entry](), 0, start
        for (kind, name), entry in self._since(start):
            size += entry_bytes(name, entry.version, entry.value)
            if size > room or len(entries) == MAX_ENTRIES:
                size -= entry_bytes(name, entry.version, entry.value)
                break
            age_ms = max(0, int((now_s - entry.written_s) * 1e3))
            entries.append(Entry(kind, name, entry.version, age_ms, entry.value))
            end = entry.version
        else:
            end = self.version
        if end == start or room < 0:
            return None
        return RecordDelta(
            node, epoch, start, end, self.floor, tuple(entries)
        ), size + record_bytes(node)

    def _since(self, start: int) -> Iterator[tuple[Key, VersionedValue]]:
        if start == 0:
            yield from self.entries.items()
            return
        found = []
        for key, entry in reversed(self.entries.items()):
            if entry.version <= start:
                break
            found.append((key, entry))
        yield from reversed(found)

    def apply(self, delta: RecordDelta, now_s: float) -> list[Key]:
        """Apply the changes that are new; return their keys."""
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
            for key in [
                key
                for key, entry in self.entries.items()
                if entry.value is None and entry.version <= delta.floor
            ]:
                del self.entries[key]
        for entry in delta.entries:
            key = (entry.kind, entry.name)
            # Bounds the record, whatever a peer sends.
            if self.version < entry.version <= delta.end and (
                key in self.entries or len(self.entries) < MAX_ENTRIES
            ):
                self.entries.pop(key, None)
                self.entries[key] = VersionedValue(
                    entry.version, now_s - entry.age_ms / 1e3, entry.value
                )
                self.version = entry.version
                changed.append(key)
        self.version = max(self.version, delta.end)
        return changed
