"""Slots of a host's checkpoint store: what each holds, and which one is taken next.

Pure: slots are numbers; `segments.py` has the memory behind them.
"""

from array import array
from collections.abc import Sequence

from kvrs.protocol.tags import Tag
from kvrs.release_order import ReleaseOrder, shared

# A slot is in exactly one state. References are held by reservations, pins by connections that
# write or read the slot.
#
#   state      tag    references   pins    can be taken for another page
#   free       none       0         0      first
#   incoming   none      0, 1       1      no: being written (0: its reservation ended)
#   cached     yes        0         0      second, least recently used first
#   read       yes        0        >= 1    no: a connection reads it
#   reserved   yes       >= 1      any     no


class StoreSlots:
    """All slots of a store, by number. Every operation costs O(1); it keeps the count of strays:
    slots that are pinned and of no reservation.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Of those that were ever used; low numbers first, so that memory grows as needed.
        self.tags: list[Tag | None] = []
        self.references = array("I")
        self.pins = array("I")
        self.strays = 0
        self._by_tag: dict[Tag, int] = {}
        self._free = array("I")
        self._cached = ReleaseOrder()

    @property
    def used(self) -> int:
        """Slots that were ever used are those below this number."""
        return len(self.tags)

    @property
    def held(self) -> int:
        """How many whole pages are here."""
        return len(self._by_tag)

    def find(self, tag: Tag) -> int | None:
        return self._by_tag.get(tag)

    def is_idle(self, slot: int) -> bool:
        """The slot may be taken for another page."""
        return not self.references[slot] and not self.pins[slot]

    def register(self, slot: int, tag: Tag) -> bool:
        """The slot holds that page whole. Returns False where an equal page came first."""
        own = self._by_tag.setdefault(tag, slot) == slot
        if own:
            self.tags[slot] = tag
        return own

    def adopt(self, pages: Sequence[tuple[int, Tag]]) -> None:
        """Take over pages that an earlier process left, least recently used first."""
        assert not self.used, "this store is in use"
        count = max((number + 1 for number, _ in pages), default=0)
        assert count <= self._capacity
        self.tags += [None] * count
        self.references.extend([0] * count)
        self.pins.extend([0] * count)
        for slot, tag in pages:
            if self.tags[slot] is None and self.register(slot, tag):
                self._cached.add(slot)
        self._free.extend(slot for slot in reversed(range(self.used)) if self.tags[slot] is None)

    def take_for_writing(self) -> int:
        if self._free:
            slot = shared(self._free.pop())
        elif (slot := shared(len(self.tags))) < self._capacity:
            self.tags.append(None)
            self.references.append(1)
            self.pins.append(1)
            return slot
        else:
            assert self._cached, "a reserved page finds no slot"
            slot = shared(self._cached.pop_first())
            tag, self.tags[slot] = self.tags[slot], None
            assert tag is not None
            del self._by_tag[tag]
        self.references[slot] = self.pins[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        if not self.references[slot]:
            self.strays -= self.pins[slot] > 0
            self._cached.discard(slot)
        self.references[slot] += 1

    def drop(self, slot: int) -> None:
        self.references[slot] -= 1
        if not self.references[slot]:
            if self.pins[slot]:
                self.strays += 1
            else:
                self._settle(slot)

    def pin(self, slot: int) -> None:
        if not self.pins[slot]:
            self.strays += self.references[slot] == 0
            self._cached.discard(slot)
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        assert self.pins[slot] > 0, f"slot {slot} is unpinned once too often"
        self.pins[slot] -= 1
        if not self.pins[slot] and not self.references[slot]:
            self.strays -= 1
            self._settle(slot)

    def _settle(self, slot: int) -> None:
        """The slot is idle from now on."""
        if self.tags[slot] is None:
            self._free.append(slot)
        else:
            self._cached.add(slot)

    def is_stray(self, tag: Tag) -> bool:
        slot = self._by_tag.get(tag)
        return slot is not None and self.references[slot] == 0 and self.pins[slot] > 0

    def check(self, references: Sequence[int]) -> None:
        """Assert that every slot is in exactly one state and has these references. O(slots)."""
        assert list(references) == self.references.tolist(), "references do not add up"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a slot is twice in the free list"
        assert len(cached) == len(self._cached), "the order of release is broken"
        strays = 0
        for slot, tag in enumerate(self.tags):
            idle = self.is_idle(slot)
            assert (slot in free) == (idle and tag is None), f"slot {slot}: free list is wrong"
            assert (slot in cached) == (idle and tag is not None), (
                f"slot {slot}: cache list is wrong"
            )
            assert tag is None or self._by_tag[tag] == slot, f"slot {slot}: tag is wrong"
            strays += self.references[slot] == 0 and self.pins[slot] > 0
        assert len(self._by_tag) == sum(tag is not None for tag in self.tags), "a tag leads nowhere"
        assert self.strays == strays, "strays do not add up"
        assert self.used <= self._capacity
