"""Slots and reservations of a host's checkpoint store: where each page lies, and for which streams
room is reserved.

Pure: `now_s` is an argument and slots are numbers; the owner of the memory behind them acts on what
is decided here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from kvrs.ids import StreamId
from kvrs.protocol.page_messages import CheckpointClaim, HeldPages, StoreCode
from kvrs.protocol.tags import Tag
from kvrs.transfer.store.store_slots import StoreSlots

# The states of a slot stand in `store_slots.py`; references are held by reservations.
#
# Invariant: a page of a reservation always finds a slot. It follows from one inequality, which
# `check` asserts:
#
#     sum of what is reserved  +  slots that are pinned and of no reservation  <=  capacity
#
# Every page index of a reservation uses at most one slot of what it reserved (reserved or
# incoming); so as long as one index has none, fewer slots than there are can neither be taken nor
# evicted. A step that would break it is refused: an offer is answered FULL, a page without a
# reservation counts as gone for a reader.

_ANY = (1 << 64, 0)  # Above every (owner epoch, attempt).
_ALL_PAGES = 1 << 32  # More than any stream has.


@dataclass(slots=True, eq=False)
class _Reservation:
    claim: tuple[int, int]
    need: int  # Slots.
    until_s: float
    # Tags of the stream's pages from page 0 on, as far as named by a writer and reserved.
    tags: list[Tag] = field(default_factory=list)
    # Slots of those pages; None: not here.
    slots: list[int | None] = field(default_factory=list)
    # By page index: being written by a connection.
    incoming: dict[int, int] = field(default_factory=dict)
    leading: int = 0  # Pages that are here, up to the first gap.
    # How many of the tags the writer of that claim has named; those behind are of an earlier
    # attempt.
    named: int = 0

    @property
    def extent(self) -> int:
        """The index up to which pages are here or arriving; a later range would leave a gap."""
        index = self.leading
        while index < len(self.slots) and (self.slots[index] is not None or index in self.incoming):
            index += 1
        return index

    def agreed(self, first: int, tags: Sequence[Tag], pins: Sequence[int]) -> int:
        """The index below which it can have a writer's tags from index `first` on; `pins` are
        those of each slot.
        """
        known = self.tags[first : first + len(tags)]
        if known == list(tags[: len(known)]):
            return _ALL_PAGES
        for index, (own, tag) in enumerate(zip(known, tags, strict=False), first):
            if own != tag:
                # Dropped pages that are being read would not be free: their room cannot be used
                # yet.
                is_read = any(slot is not None and pins[slot] for slot in self.slots[index:])
                return index if is_read else _ALL_PAGES
        return _ALL_PAGES

    def hand_to(self, claim: CheckpointClaim) -> None:
        """Let that claim be the writer from now on."""
        if self.claim != _order(claim):
            self.claim, self.named = _order(claim), 0

    def advance(self) -> int:
        """Update `leading` after a page has arrived."""
        while self.leading < len(self.slots) and self.slots[self.leading] is not None:
            self.leading += 1
        return self.leading


@dataclass(slots=True, eq=False)
class IncomingRange:
    """Pages of a stream that are arriving. The page of `tags[i]` goes into `slots[i]`; None: it is
    dropped.
    """

    stream: StreamId
    first_page: int
    tags: tuple[Tag, ...]
    code: StoreCode
    slots: list[int | None]
    reservation: _Reservation | None
    agreed: int = _ALL_PAGES  # Below this index the reservation has the writer's pages.


class CheckpointBook:
    """All slots and reservations. Every operation costs O(1) per page that it touches; `expire`
    O(reservations).
    """

    def __init__(self, capacity_slots: int) -> None:
        self.capacity_slots = capacity_slots
        self.reserved_slots = 0
        self._reservations: dict[StreamId, _Reservation] = {}
        # The last claims of streams that were released, until a time: late offers of theirs would
        # reserve room for nothing.
        self._ended: dict[StreamId, tuple[tuple[int, int], float]] = {}
        self._slots = StoreSlots(capacity_slots)
        self._first_end_s = inf  # No reservation and no fence ends before.

    @property
    def held_slots(self) -> int:
        """Whole pages, reserved and not."""
        return self._slots.held

    @property
    def used_slots(self) -> int:
        """Slots that were ever used are those below this number."""
        return self._slots.used

    @property
    def reservations(self) -> int:
        return len(self._reservations)

    def streams(self) -> dict[StreamId, int]:
        """Leading pages held, of every reservation."""
        return {stream: reservation.leading for stream, reservation in self._reservations.items()}

    def held(self, stream: StreamId) -> int:
        """Leading pages of the stream that its reservation keeps here."""
        reservation = self._reservations.get(stream)
        return 0 if reservation is None else reservation.leading

    # Reservations.

    def offer(
        self, claim: CheckpointClaim, need: int, tags: Sequence[Tag], until_s: float
    ) -> HeldPages:
        """Reserve room for `need` pages, which begin with those of `tags`; pages that are here
        already are kept.

        A later claim of the same stream takes the reservation over; one that needs less than
        before keeps what was reserved.
        """
        reservation = self._reservations.get(claim.stream)
        if self._is_fenced(claim, reservation):
            return HeldPages(StoreCode.FENCED, self.held(claim.stream))
        more = need - (0 if reservation is None else reservation.need)
        # Pages that are being read count once, as reserved, where the reservation will have them.
        agreed = (
            _ALL_PAGES if reservation is None else reservation.agreed(0, tags, self._slots.pins)
        )
        if strays := self._slots.strays:
            own = set(tags[: min(need, agreed)])
            strays -= sum(self._slots.is_stray(tag) for tag in own)
        full = more > 0 and self.reserved_slots + more + strays > self.capacity_slots
        if reservation is None:
            if full:
                return HeldPages(StoreCode.FULL, 0)
            reservation = self._reservations[claim.stream] = _Reservation(_order(claim), 0, until_s)
        # The stream's new writer fences the old one even if there is no more room for it.
        reservation.hand_to(claim)
        reservation.until_s = max(reservation.until_s, until_s)
        self._first_end_s = min(self._first_end_s, until_s)
        if not full:
            self.reserved_slots += max(0, more)
            reservation.need += max(0, more)
        agreed = self._adopt_tags(reservation, 0, tags)
        self._attach(reservation, range(len(reservation.tags)))
        return HeldPages(
            StoreCode.FULL if full else StoreCode.OK,
            min(reservation.advance(), reservation.named, agreed),
        )

    def renew(self, streams: Iterable[StreamId], until_s: float) -> list[StreamId]:
        """Let those reservations last at least until then. Returns the streams that have none."""
        unknown = []
        for stream in streams:
            if (reservation := self._reservations.get(stream)) is None:
                unknown.append(stream)
            else:
                reservation.until_s = max(reservation.until_s, until_s)
        return unknown

    def release(self, streams: Iterable[StreamId], until_s: float) -> None:
        """End those reservations; offers of their writers that come late are fenced until then.
        Pages stay as long as there is room.
        """
        for stream in streams:
            if (reservation := self._reservations.get(stream)) is not None:
                claim = reservation.claim
            else:
                claim, _ = self._ended.get(stream, (_ANY, until_s))
            self._ended[stream] = (claim, until_s)
            self._first_end_s = min(self._first_end_s, until_s)
            self._end(stream)

    def expire(self, now_s: float) -> list[StreamId]:
        """End every reservation that has expired; returns their streams."""
        if now_s < self._first_end_s:
            return []
        for stream in [stream for stream, (_, until_s) in self._ended.items() if until_s <= now_s]:
            del self._ended[stream]
        ended = [
            stream
            for stream, reservation in self._reservations.items()
            if reservation.until_s <= now_s
        ]
        for stream in ended:
            self._end(stream)
        ends_s = [until_s for _, until_s in self._ended.values()]
        ends_s += [reservation.until_s for reservation in self._reservations.values()]
        self._first_end_s = min(ends_s, default=inf)
        return ended

    # Pages that arrive.

    def begin(
        self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]
    ) -> IncomingRange:
        """Find slots for arriving pages: for each that is reserved, not here and not arriving
        already.

        A stream without a reservation is answered as if nothing of it were held: its writer has to
        make an offer first.
        """
        reservation = self._reservations.get(claim.stream)
        incoming = IncomingRange(
            claim.stream, first_page, tags, StoreCode.OK, [None] * len(tags), reservation
        )
        if self._is_fenced(claim, reservation):
            incoming.code = StoreCode.FENCED
        elif reservation is not None:
            reservation.hand_to(claim)
            if first_page <= reservation.extent:
                self._expect(reservation, incoming)
        return incoming

    def commit(self, incoming: IncomingRange, position: int) -> int | None:
        """The page is whole and right. Returns the slot that is found under its tag from now on, if
        it is the page's own; None: an equal page came first.
        """
        slot, tag = incoming.slots[position], incoming.tags[position]
        assert slot is not None, "the page has no slot to be written into"
        own = self._slots.register(slot, tag)
        self._written(incoming, position)
        return slot if own else None

    def end(self, incoming: IncomingRange) -> HeldPages:
        """End the range; slots of pages that were not committed are free again."""
        for position in range(len(incoming.slots)):
            if incoming.slots[position] is not None:
                self._written(incoming, position)
        reservation = self._reservations.get(incoming.stream)
        return HeldPages(
            incoming.code,
            min(
                self.held(incoming.stream),
                incoming.agreed,
                reservation.named if reservation is not None else 0,
            ),
        )

    # Pages that are read.

    def match(self, tags: Iterable[Tag]) -> list[int]:
        """The slots of the longest held prefix of `tags`; each gets a pin."""
        found: list[int] = []
        for tag in tags:
            slot = self._slots.find(tag)
            if slot is None or (
                self._slots.is_idle(slot)
                and self.reserved_slots + self._slots.strays >= self.capacity_slots
            ):
                break
            self._slots.pin(slot)
            found.append(slot)
        return found

    def unpin(self, numbers: Sequence[int]) -> None:
        """One pin less to each. The last page goes first, so that under pressure a history
        loses its tail first.
        """
        for number in reversed(numbers):
            self._slots.unpin(number)

    def adopt(self, pages: Sequence[tuple[int, Tag]]) -> None:
        """Take over pages that an earlier process left in those slots, least recently used first.
        Only for a new book.
        """
        self._slots.adopt(pages)

    # Reservations and their pages.

    def _is_fenced(self, claim: CheckpointClaim, reservation: _Reservation | None) -> bool:
        latest = (
            reservation.claim
            if reservation is not None
            else self._ended.get(claim.stream, ((-1, -1), 0.0))[0]
        )
        # The last claim is valid again for a stream with a reservation, not for a released one.
        return _order(claim) < latest if reservation is not None else _order(claim) <= latest

    def _adopt_tags(self, reservation: _Reservation, first: int, tags: Sequence[Tag]) -> int:
        """Take over the writer's tags from index `first` on. Returns the index below which the
        reservation has them.
        """
        agreed = reservation.agreed(first, tags, self._slots.pins)
        taken = list(tags[: max(0, min(reservation.need, agreed) - first)])
        known = reservation.tags[first : first + len(taken)]
        if known != taken[: len(known)]:
            count = next(at for at, tag in enumerate(known) if tag != taken[at])
            self._forget_from(reservation, first + count)
            del known[count:]
        reservation.tags += taken[len(known) :]
        reservation.slots += [None] * (len(taken) - len(known))
        if taken:
            reservation.named = max(reservation.named, first + len(taken))
        return agreed if agreed < reservation.need else _ALL_PAGES

    def _forget_from(self, reservation: _Reservation, first: int) -> None:
        # A new attempt that samples anew writes other pages than the one before, from where its
        # output begins.
        for slot in reversed(reservation.slots[first:]):
            if slot is not None:
                self._slots.drop(slot)
        del reservation.tags[first:], reservation.slots[first:]
        reservation.leading = min(reservation.leading, first)

    def _attach(self, reservation: _Reservation, indexes: Iterable[int]) -> None:
        """Hold the pages of those indexes that are here, unless a slot is being written for one,
        which uses its room.
        """
        slots, tags, incoming = reservation.slots, reservation.tags, reservation.incoming
        for index in indexes:
            if slots[index] is None and index not in incoming:
                slot = self._slots.find(tags[index])
                if slot is not None:
                    self._slots.hold(slot)
                    slots[index] = slot

    def _end(self, stream: StreamId) -> None:
        reservation = self._reservations.pop(stream, None)
        if reservation is not None:
            self.reserved_slots -= reservation.need
            for slot in [*reservation.incoming.values(), *reversed(reservation.slots)]:
                if slot is not None:
                    self._slots.drop(slot)

    def _written(self, incoming: IncomingRange, position: int) -> None:
        """The slot is not written any more."""
        slot, reservation = incoming.slots[position], incoming.reservation
        assert slot is not None
        incoming.slots[position] = None
        if reservation is not None and self._reservations.get(incoming.stream) is reservation:
            index = incoming.first_page + position
            del reservation.incoming[index]
            if index < len(reservation.tags) and self._slots.tags[slot] == reservation.tags[index]:
                # It keeps the reference that it had while it was written.
                reservation.slots[index] = slot
                reservation.advance()
                self._slots.unpin(slot)
                return
            if index < len(reservation.tags):
                self._attach(reservation, (index,))
                reservation.advance()
            self._slots.drop(slot)
        self._slots.unpin(slot)

    def _expect(self, reservation: _Reservation, incoming: IncomingRange) -> None:
        """Find a slot for every page of the range that needs one."""
        first, need = incoming.first_page, reservation.need
        end = first + len(incoming.tags)
        incoming.agreed = self._adopt_tags(reservation, first, incoming.tags)
        if end > need <= incoming.agreed:
            incoming.code = StoreCode.FULL
        indexes = range(first, min(end, need, incoming.agreed))
        self._attach(reservation, indexes)
        for index in indexes:
            if reservation.slots[index] is None and index not in reservation.incoming:
                incoming.slots[index - first] = reservation.incoming[index] = (
                    self._slots.take_for_writing()
                )
        reservation.advance()

    def check(self) -> None:
        """Assert that every slot is in exactly one state, that all indexes agree and that the
        invariant holds. O(slots).
        """
        references = [0] * self._slots.used
        for reservation in self._reservations.values():
            assert len(reservation.tags) == len(reservation.slots) <= reservation.need
            used = {index for index, slot in enumerate(reservation.slots) if slot is not None}
            assert not used & reservation.incoming.keys(), "one page uses two slots"
            assert all(index < reservation.need for index in reservation.incoming)
            assert reservation.leading == next(
                (i for i, slot in enumerate(reservation.slots) if slot is None), len(used)
            )
            for index in used:
                slot = reservation.slots[index]
                assert slot is not None
                right = self._slots.tags[slot] == reservation.tags[index]
                assert right, f"slot {slot} holds another page"
                references[slot] += 1
            for slot in reservation.incoming.values():
                assert self._slots.tags[slot] is None
                assert self._slots.pins[slot] == 1
                references[slot] += 1
        self._slots.check(references)
        assert self.reserved_slots == sum(
            reservation.need for reservation in self._reservations.values()
        )
        assert self.reserved_slots + self._slots.strays <= self.capacity_slots, (
            "more is reserved than there is"
        )


def _order(claim: CheckpointClaim) -> tuple[int, int]:
    return claim.owner_epoch, claim.attempt
