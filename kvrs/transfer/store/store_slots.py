"""Slots of a host's checkpoint store: what each holds, and which one is taken next.

Pure: slots are numbers; `segments.py` has the memory behind them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvrs.protocol.tags import Tag

# A slot is in exactly one state. References are held by reservations, pins by connections that
# write or read the slot.
#
#   state      tag    references   pins    can be taken for another page
#   free       none       0         0      first
#   incoming   none      0, 1       1      no: being written (0: its reservation ended)
#   cached     yes        0         0      second, least recently used first
#   read       yes        0        >= 1    no: a connection reads it
#   reserved   yes       >= 1      any     no


@dataclass(slots=True, eq=False)
class StoreSlot:
    number: int
    tag: Tag | None = None
    references: int = 0
    pins: int = 0

    @property
    def is_idle(self) -> bool:
        """The slot may be taken for another page."""
        return self.references == 0 and self.pins == 0


class StoreSlots:
    """All slots of a store. Every operation costs O(1); it keeps the count of strays: slots that
    are pinned and of no reservation.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Those that were ever used; low numbers first, so that memory grows as needed.
        self.slots: list[StoreSlot] = []
        self.strays = 0
        self._by_tag: dict[Tag, StoreSlot] = {}
        self._free: list[StoreSlot] = []
        self._cached: OrderedDict[StoreSlot, None] = OrderedDict()  # In order of last use.

    @property
    def held(self) -> int:
        """How many whole pages are here."""
        return len(self._by_tag)

    def find(self, tag: Tag) -> StoreSlot | None:
        return self._by_tag.get(tag)

    def register(self, slot: StoreSlot, tag: Tag) -> bool:
        """The slot holds that page whole. Returns False where an equal page came first."""
        own = self._by_tag.setdefault(tag, slot) is slot
        if own:
            slot.tag = tag
        return own

    def adopt(self, pages: Sequence[tuple[int, Tag]]) -> None:
        """Take over pages that an earlier process left, least recently used first."""
        assert not self.slots, "this store is in use"
        self.slots = [
            StoreSlot(number)
            for number in range(max((number + 1 for number, _ in pages), default=0))
        ]
        assert len(self.slots) <= self._capacity
        for number, tag in pages:
            slot = self.slots[number]
            if slot.tag is None and self.register(slot, tag):
                self._settle(slot)
        self._free = [slot for slot in reversed(self.slots) if slot.tag is None]

    def take_for_writing(self) -> StoreSlot:
        if self._free:
            slot = self._free.pop()
        elif len(self.slots) < self._capacity:
            slot = StoreSlot(len(self.slots))
            self.slots.append(slot)
        else:
            assert self._cached, "a reserved page finds no slot"
            slot, _ = self._cached.popitem(last=False)
            assert slot.tag is not None
            del self._by_tag[slot.tag]
            slot.tag = None
        slot.references = slot.pins = 1
        return slot

    def hold(self, slot: StoreSlot) -> None:
        if slot.references == 0:
            self.strays -= slot.pins > 0
            self._cached.pop(slot, None)
        slot.references += 1

    def drop(self, slot: StoreSlot) -> None:
        slot.references -= 1
        if slot.references == 0:
            if slot.pins:
                self.strays += 1
            else:
                self._settle(slot)

    def pin(self, slot: StoreSlot) -> None:
        if slot.pins == 0:
            self.strays += slot.references == 0
            self._cached.pop(slot, None)
        slot.pins += 1

    def unpin(self, slot: StoreSlot) -> None:
        assert slot.pins > 0, f"slot {slot.number} is unpinned once too often"
        slot.pins -= 1
        if slot.references == 0 == slot.pins:
            self.strays -= 1
            self._settle(slot)

    def _settle(self, slot: StoreSlot) -> None:
        """The slot is idle from now on."""
        if slot.tag is None:
            self._free.append(slot)
        else:
            self._cached[slot] = None

    def is_stray(self, tag: Tag) -> bool:
        slot = self._by_tag.get(tag)
        return slot is not None and slot.references == 0 and slot.pins > 0

    def check(self, references: Sequence[int]) -> None:
        """Assert that every slot is in exactly one state and has these references. O(slots)."""
        assert references == [slot.references for slot in self.slots], "references do not add up"
        free = {slot.number for slot in self._free}
        assert len(free) == len(self._free), "a slot is twice in the free list"
        for slot in self.slots:
            idle = slot.is_idle
            assert (slot.number in free) == (idle and slot.tag is None), (
                f"slot {slot.number}: free list is wrong"
            )
            assert (slot in self._cached) == (idle and slot.tag is not None), (
                f"slot {slot.number}: cache list is wrong"
            )
            assert slot.tag is None or self._by_tag[slot.tag] is slot, (
                f"slot {slot.number}: tag is wrong"
            )
        assert len(self._by_tag) == sum(slot.tag is not None for slot in self.slots), (
            "a tag leads nowhere"
        )
        assert self.strays == sum(slot.references == 0 and slot.pins > 0 for slot in self.slots), (
            "strays do not add up"
        )
        assert len(self.slots) <= self._capacity
