"""Book of a host's checkpoint store: the slot of each page, and the streams with reserved room.

Pure: `now_s` is an argument and slots are numbers; `host.py` has the memory behind them.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrs.ids import StreamId
from kvrs.protocol.pages import CheckpointClaim, HeldPages, StoreCode, Tag
from kvrs.release_order import ReleaseOrder, shared

# A slot is in exactly one state. Its users are reservations, and connections that write or read it.
#
#   state      tag    users   can be taken for another page
#   free       none     0     first
#   incoming   none   >= 1    no: a connection writes it
#   used       yes    >= 1    no: it is reserved or read
#   cached     yes      0     second, least recently used first
#
# At most as many slots are reserved as there are, and each page of a reservation uses one of them.
# So a page of a reservation finds a slot, unless connections read or write as many pages that no
# reservation has. Then the page is not taken, and its writer sends it again a little later.

_Order = tuple[int, int]  # (owner epoch, attempt)
_NO_CLAIM: _Order = (-1, -1)
_ANY_CLAIM: _Order = (1 << 64, 0)


@dataclass(slots=True, eq=False)
class _Reservation:
    claim: _Order  # Owner epoch and attempt of the stream's present writer.
    need: int = 0  # Number of slots that the stream's pages may use.
    until_s: float = 0.0
    # Tags of the stream's pages from page 0, as far as the writer has named and reserved them.
    tags: list[Tag] = field(default_factory=list)
    # Slot of each of those pages, complete or arriving; None: the page is not here.
    slots: list[int | None] = field(default_factory=list)
    leading: int = 0  # Number of leading pages that are complete.


@dataclass(slots=True, eq=False)
class IncomingRange:
    """Pages of a stream that are arriving. The page of `tags[i]` goes to `slots[i]`; None: the page
    is dropped, or has arrived.
    """

    stream: StreamId
    first_page: int
    tags: tuple[Tag, ...]
    code: StoreCode
    slots: list[int | None]
    reservation: _Reservation | None


class _Slots:
    """Contents and users of every slot. Every operation costs O(1)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Tag of the page in each slot ever used; None: no complete page. Slots are first used in
        # the order of their numbers, so that memory grows as needed.
        self.tags: list[Tag | None] = []
        self.users = array("I")
        self.by_tag: dict[Tag, int] = {}
        self._free = array("I")
        self._cached = ReleaseOrder()

    def adopt(self, pages: Sequence[tuple[int, Tag]]) -> None:
        """Take over pages that an earlier process left, least recently used first."""
        assert not self.tags, "this store is in use"
        count = max((slot + 1 for slot, _ in pages), default=0)
        assert count <= self.capacity
        self.tags += [None] * count
        self.users.extend([0] * count)
        for number, tag in pages:
            slot = shared(number)
            if self.tags[slot] is None and self.register(slot, tag):
                self._cached.add(slot)
        self._free.extend(slot for slot in reversed(range(count)) if self.tags[slot] is None)

    def register(self, slot: int, tag: Tag) -> bool:
        """Register a complete page in a slot. Returns False if another slot already has an equal
        page.
        """
        own = self.by_tag.setdefault(tag, slot) == slot
        if own:
            self.tags[slot] = tag
        return own

    def find(self, tag: Tag) -> int | None:
        """Return the slot with the page of this tag, with one more user; None: no slot has the
        page.
        """
        slot = self.by_tag.get(tag)
        if slot is not None:
            if not self.users[slot]:
                self._cached.discard(slot)
            self.users[slot] += 1
        return slot

    def take(self) -> int | None:
        """Take a free slot, or the cached slot used least recently, for writing, with one user;
        None: every slot has users.
        """
        if self._free:
            slot = shared(self._free.pop())
        elif len(self.tags) < self.capacity:
            slot = shared(len(self.tags))
            self.tags.append(None)
            self.users.append(0)
        elif self._cached:
            slot = shared(self._cached.pop_first())
            tag, self.tags[slot] = self.tags[slot], None
            assert tag is not None
            del self.by_tag[tag]
        else:
            return None
        self.users[slot] = 1
        return slot

    def drop(self, slot: int) -> None:
        """Remove a user of a slot; without users the slot is free, or cached if it has a complete
        page.
        """
        assert self.users[slot] > 0, f"slot {slot} is unpinned once too often"
        self.users[slot] -= 1
        if not self.users[slot]:
            if self.tags[slot] is None:
                self._free.append(slot)
            else:
                self._cached.add(slot)

    def check(self, users: Sequence[int], *, are_all: bool) -> None:
        """Assert that every slot is in exactly one state and has these users, or more unless
        `are_all`. O(slots).
        """
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a slot is twice in the free list"
        assert len(cached) == len(self._cached), "the order of release is broken"
        for slot, tag in enumerate(self.tags):
            idle = not self.users[slot]
            assert users[slot] <= self.users[slot], f"slot {slot} has more users than it counts"
            assert not are_all or users[slot] == self.users[slot], f"slot {slot}: users"
            assert (slot in free) == (idle and tag is None), f"slot {slot}: free list is wrong"
            assert (slot in cached) == (idle and tag is not None), f"slot {slot}: cache is wrong"
            assert tag is None or self.by_tag[tag] == slot, f"slot {slot}: tag is wrong"
        assert len(self.by_tag) == sum(tag is not None for tag in self.tags)
        assert len(self.tags) <= self.capacity


class CheckpointBook:
    """All slots and reservations. Every operation costs O(1) per page that it touches; `expire`
    O(reservations).
    """

    def __init__(self, capacity_slots: int) -> None:
        self.capacity_slots = capacity_slots
        self.reserved_slots = 0
        self._reservations: dict[StreamId, _Reservation] = {}
        # Last claim of each released stream, and the time until which it fences late offers, which
        # would reserve room for nothing.
        self._ended: dict[StreamId, tuple[_Order, float]] = {}
        self._slots = _Slots(capacity_slots)

    @property
    def held_slots(self) -> int:
        """Number of complete pages, with or without a reservation."""
        return len(self._slots.by_tag)

    @property
    def used_slots(self) -> int:
        """Number of slots that were ever used: those below this number."""
        return len(self._slots.tags)

    @property
    def reservations(self) -> int:
        return len(self._reservations)

    def streams(self) -> dict[StreamId, int]:
        """Return the number of complete leading pages of every stream with a reservation."""
        return {stream: reservation.leading for stream, reservation in self._reservations.items()}

    def held(self, stream: StreamId) -> int:
        """Return the number of the stream's complete leading pages; 0: none, or no reservation."""
        reservation = self._reservations.get(stream)
        return 0 if reservation is None else reservation.leading

    # Writers and leases change reservations by the methods below.

    def offer(
        self, claim: CheckpointClaim, need: int, tags: Sequence[Tag], until_s: float
    ) -> HeldPages:
        """Reserve room for a stream of `need` pages, the first of which have these tags; pages of
        these tags that are here already belong to the reservation. Returns the number of complete
        leading pages, and whether there was room.

        A later claim of the same stream takes over the reservation; reserved room does not shrink.
        """
        reservation = self._reservations.get(claim.stream)
        if self._is_fenced(claim, reservation):
            return HeldPages(StoreCode.FENCED, self.held(claim.stream))
        more = max(0, need - (0 if reservation is None else reservation.need))
        full = more > 0 and self.reserved_slots + more > self.capacity_slots
        if reservation is None:
            if full:
                return HeldPages(StoreCode.FULL, 0)
            reservation = self._reservations[claim.stream] = _Reservation(_order(claim))
        reservation.until_s = max(reservation.until_s, until_s)
        if not full:
            self.reserved_slots += more
            reservation.need += more
        # The tags are set even without room, so that the stream's new writer fences the old one.
        self._name(reservation, claim, 0, tags)
        for index, tag in enumerate(reservation.tags):
            if reservation.slots[index] is None:
                reservation.slots[index] = self._slots.find(tag)
        self._advance(reservation)
        return HeldPages(StoreCode.FULL if full else StoreCode.OK, reservation.leading)

    def renew(self, streams: Iterable[StreamId], until_s: float) -> list[StreamId]:
        """Extend reservations to at least `until_s`; return the streams without one."""
        unknown = []
        for stream in streams:
            if (reservation := self._reservations.get(stream)) is None:
                unknown.append(stream)
            else:
                reservation.until_s = max(reservation.until_s, until_s)
        return unknown

    def release(self, streams: Iterable[StreamId], until_s: float) -> None:
        """End reservations; late offers of their writers are fenced until `until_s`. Pages stay
        while there is room.
        """
        for stream in streams:
            if (reservation := self._reservations.get(stream)) is not None:
                claim = reservation.claim
            else:
                claim, _ = self._ended.get(stream, (_ANY_CLAIM, until_s))
            self._ended[stream] = (claim, until_s)
            self._end(stream)

    def expire(self, now_s: float) -> list[StreamId]:
        """End every expired reservation; return their streams."""
        for stream in [stream for stream, (_, until_s) in self._ended.items() if until_s <= now_s]:
            del self._ended[stream]
        ended = [stream for stream, each in self._reservations.items() if each.until_s <= now_s]
        for stream in ended:
            self._end(stream)
        return ended

    # Each range of arriving pages begins and ends by the methods below.

    def begin(
        self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]
    ) -> IncomingRange:
        """Find slots for those of the arriving pages that are reserved, and neither here nor
        arriving already.

        Without a reservation no page gets a slot, and the answer counts 0 pages: the writer must
        make an offer first.
        """
        reservation = self._reservations.get(claim.stream)
        incoming = IncomingRange(
            claim.stream, first_page, tags, StoreCode.OK, [None] * len(tags), reservation
        )
        if self._is_fenced(claim, reservation):
            incoming.code = StoreCode.FENCED
        elif reservation is not None:
            self._expect(reservation, claim, incoming)
        return incoming

    def commit(self, incoming: IncomingRange, position: int) -> int | None:
        """Commit a complete, correct page of the range, so that it is found by its tag. Returns its
        slot; None: an equal page came first, and is found instead.
        """
        slot, tag = incoming.slots[position], incoming.tags[position]
        assert slot is not None, "the page has no slot to be written into"
        own = self._slots.register(slot, tag)
        self._written(incoming, position)
        return slot if own else None

    def refuse(self, incoming: IncomingRange) -> None:
        """Refuse the range's uncommitted pages, because no memory could be allocated behind the
        slots found for them; free these slots, and let `end` answer FULL.
        """
        incoming.code = StoreCode.FULL
        self._give_up(incoming)

    def end(self, incoming: IncomingRange) -> HeldPages:
        """End the range, and free the slots of uncommitted pages. Returns the range's code, and the
        number of the stream's complete leading pages.
        """
        self._give_up(incoming)
        return HeldPages(incoming.code, self.held(incoming.stream))

    # Readers pin pages by the methods below.

    def match(self, tags: Iterable[Tag]) -> list[int]:
        """Pin and return the slots of the longest held prefix of `tags`."""
        found: list[int] = []
        for tag in tags:
            if (slot := self._slots.find(tag)) is None:
                break
            found.append(slot)
        return found

    def unpin(self, numbers: Sequence[int]) -> None:
        """Unpin the slots that `match` returned, the last one first, so that under pressure a
        history loses its last pages first.
        """
        for number in reversed(numbers):
            self._slots.drop(number)

    def adopt(self, pages: Sequence[tuple[int, Tag]]) -> None:
        """Adopt pages that an earlier process left in these slots, least recently used first. The
        book must be new.
        """
        self._slots.adopt(pages)

    # The methods below assign tags and slots to the pages of a reservation.

    def _is_fenced(self, claim: CheckpointClaim, reservation: _Reservation | None) -> bool:
        # A stream with a reservation accepts its last claim again, a released stream only a later
        # one.
        if reservation is not None:
            return _order(claim) < reservation.claim
        return _order(claim) <= self._ended.get(claim.stream, (_NO_CLAIM, 0.0))[0]

    def _name(
        self, reservation: _Reservation, claim: CheckpointClaim, first: int, tags: Sequence[Tag]
    ) -> None:
        """Set the tags of the writer's pages from index `first` on. If they differ from those of
        the reservation, all pages from the first difference on are forgotten; so are all pages
        behind these tags if the writer is new, because it has yet to compute them.
        """
        named = tags[: max(0, reservation.need - first)]
        known = reservation.tags[first : first + len(named)]
        same = 0
        while same < len(known) and known[same] == named[same]:
            same += 1
        if same < len(known) or reservation.claim != _order(claim):
            for slot in reversed(reservation.slots[first + same :]):
                if slot is not None:
                    self._slots.drop(slot)
            del reservation.tags[first + same :], reservation.slots[first + same :]
            reservation.leading = min(reservation.leading, first + same)
        reservation.claim = _order(claim)
        reservation.tags += named[same:]
        reservation.slots += [None] * (len(reservation.tags) - len(reservation.slots))

    def _expect(
        self, reservation: _Reservation, claim: CheckpointClaim, incoming: IncomingRange
    ) -> None:
        """Find a slot for every page of the range that is reserved and has none."""
        first = incoming.first_page
        if reservation.claim != _order(claim):
            # A new writer must make an offer before its pages get slots.
            self._name(reservation, claim, 0, ())
        if first > len(reservation.tags):
            return  # Pages before these are not named yet, so that a gap would remain.
        self._name(reservation, claim, first, incoming.tags)
        if first + len(incoming.tags) > reservation.need:
            incoming.code = StoreCode.FULL
        for position, tag in enumerate(incoming.tags[: max(0, reservation.need - first)]):
            index = first + position
            if reservation.slots[index] is None:
                slot = self._slots.find(tag)
                if slot is None:
                    if (slot := self._slots.take()) is None:
                        break
                    incoming.slots[position] = slot
                    self._slots.users[slot] += 1
                reservation.slots[index] = slot
        self._advance(reservation)

    def _written(self, incoming: IncomingRange, position: int) -> None:
        """Note that the page at `position` of the range has arrived or was given up: its slot is no
        longer written.
        """
        slot, reservation = incoming.slots[position], incoming.reservation
        assert slot is not None
        assert reservation is not None
        incoming.slots[position] = None
        index = incoming.first_page + position
        # The reservation may have ended, or its pages may have other tags by now.
        if index < len(reservation.slots) and reservation.slots[index] == slot:
            if self._slots.tags[slot] is None:
                reservation.slots[index] = self._slots.find(reservation.tags[index])
                self._slots.drop(slot)
            self._advance(reservation)
        self._slots.drop(slot)

    def _give_up(self, incoming: IncomingRange) -> None:
        for position, slot in enumerate(incoming.slots):
            if slot is not None:
                self._written(incoming, position)

    def _advance(self, reservation: _Reservation) -> None:
        slots, leading = reservation.slots, reservation.leading
        while leading < len(slots) and (slot := slots[leading]) is not None:
            if self._slots.tags[slot] is None:
                break
            leading += 1
        reservation.leading = leading

    def _end(self, stream: StreamId) -> None:
        reservation = self._reservations.pop(stream, None)
        if reservation is not None:
            self.reserved_slots -= reservation.need
            for slot in reversed(reservation.slots):
                if slot is not None:
                    self._slots.drop(slot)
            reservation.slots.clear()

    def check(self, connections: Iterable[int] | None = None) -> None:
        """Assert that every slot is in exactly one state and that all indexes agree. With
        `connections`, which names each slot once for each connection that uses it, assert also that
        slots have no further users. O(slots).
        """
        users = [0] * self.used_slots
        for each in self._reservations.values():
            assert len(each.tags) == len(each.slots) <= each.need
            whole = [slot is not None and self._slots.tags[slot] is not None for slot in each.slots]
            assert each.leading == (whole.index(False) if False in whole else len(whole))
            for tag, slot in zip(each.tags, each.slots, strict=True):
                if slot is not None:
                    assert self._slots.tags[slot] in (None, tag), f"slot {slot}: another page"
                    users[slot] += 1
        for slot in connections or ():
            users[slot] += 1
        self._slots.check(users, are_all=connections is not None)
        assert self.reserved_slots == sum(each.need for each in self._reservations.values())
        assert self.reserved_slots <= self.capacity_slots, "more is reserved than there is"


def _order(claim: CheckpointClaim) -> _Order:
    return claim.owner_epoch, claim.attempt
