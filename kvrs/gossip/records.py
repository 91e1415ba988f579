"""Scuttlebutt: every node writes only its own record, and versions say how much of it somebody else has.

    entries, by version     1 . 3 4 . . 7 . 9        version 9: the newest edit; what was overwritten leaves a gap
                                ^floor 4             tombstones up to here are forgotten

Whoever has all up to version v needs the entries above v. Only where v lies below the floor may something have been taken out
that he still has, so he begins anew, from 0. Until he has reached the floor again, he takes nothing from copies with a lower
one: they may still hold what was taken out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvrs.gossip.wire import MAX_ENTRIES, Entry, RecordDelta, entry_bytes, record_bytes
from kvrs.ids import NodeId

Key = tuple[int, str]  # Kind and name.


def start_for(version: int, floor: int, other_version: int, other_floor: int) -> int | None:
    """From which version somebody who knows that much needs the other's copy; None when that would not help."""
    if version < other_floor and floor < other_floor:
        return 0
    if version < floor and other_floor < floor:
        return None
    return version if version < other_version else None


@dataclass(slots=True, eq=False)
class Held:
    version: int
    written_s: float  # By the clock of whoever holds it.
    value: bytes | None  # None: a tombstone.


class Record:
    """One node's record, or what is known of it here."""

    __slots__ = ("entries", "floor", "version")

    def __init__(self) -> None:
        self.version = 0
        self.floor = 0
        self.entries: dict[Key, Held] = {}  # In the order of their versions.

    def write(self, key: Key, value: bytes | None, now_s: float) -> None:
        """For the owner: an edit; None takes the entry out. The caller has seen to it that there is room."""
        self.version += 1
        self.entries.pop(key, None)
        self.entries[key] = Held(self.version, now_s, value)

    def collect(self, before_s: float) -> None:
        """For the owner: forget tombstones that were written before `before_s`."""
        old = [key for key, held in self.entries.items() if held.value is None and held.written_s < before_s]
        for key in old:
            self.floor = max(self.floor, self.entries.pop(key).version)

    def delta(self, node: NodeId, epoch: int, start: int, room: int, now_s: float) -> tuple[RecordDelta, int] | None:
        """What changed since `start`, as much as fits, and its bound in bytes; None when not even one entry fits."""
        room -= record_bytes(node)
        entries, size, end = list[Entry](), 0, start
        for (kind, name), held in self._since(start):
            size += entry_bytes(name, held.version, held.value)
            if size > room or len(entries) == MAX_ENTRIES:
                size -= entry_bytes(name, held.version, held.value)
                break
            age_ms = max(0, int((now_s - held.written_s) * 1e3))
            entries.append(Entry(kind, name, held.version, age_ms, held.value))
            end = held.version
        else:
            end = self.version
        if end == start or room < 0:
            return None
        return RecordDelta(node, epoch, start, end, self.floor, tuple(entries)), size + record_bytes(node)

    def _since(self, start: int) -> Iterator[tuple[Key, Held]]:
        if start == 0:
            yield from self.entries.items()
            return
        found = []
        for key, held in reversed(self.entries.items()):
            if held.version <= start:
                break
            found.append((key, held))
        yield from reversed(found)

    def apply(self, delta: RecordDelta, now_s: float) -> list[Key]:
        """Take over what is new in it; returns the keys that changed."""
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
            for key in [key for key, held in self.entries.items() if held.value is None and held.version <= delta.floor]:
                del self.entries[key]
        for entry in delta.entries:
            key = (entry.kind, entry.name)
            # A record never has more entries than it may; whoever sends more is not one of ours.
            if self.version < entry.version <= delta.end and (key in self.entries or len(self.entries) < MAX_ENTRIES):
                self.entries.pop(key, None)
                self.entries[key] = Held(entry.version, now_s - entry.age_ms / 1e3, entry.value)
                self.version = entry.version
                changed.append(key)
        self.version = max(self.version, delta.end)
        return changed
