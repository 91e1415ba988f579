"""Which page lies in which slot of a host's checkpoint store, and who was promised room.

Pure: `now_s` is an argument and slots are numbers; who owns the memory behind them asks here what may be written where.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrs.ids import StreamId
from kvrs.protocol.frames import Claim, Held, StoreCode
from kvrs.protocol.tags import Tag

# A slot is in exactly one state. References are held by reservations, pins by connections that write or read the slot.
#
#   state      tag    references   pins    can be taken for another page
#   free       none       0         0      first
#   incoming   none      0, 1       1      no: a connection writes into it; 0 when its reservation has ended meanwhile
#   cached     yes        0         0      second, least recently used first
#   read       yes        0        >= 1    no: a connection reads it
#   reserved   yes       >= 1      any     no
#
# The promise: a page of a reservation always finds a slot. It is kept by one inequality, which `check` asserts:
#
#     sum of what is reserved  +  slots that are pinned and of no reservation  <=  capacity
#
# Every page index of a reservation uses at most one slot of what it reserved (reserved or incoming); so as long as one
# index has none, fewer slots than there are can neither be taken nor evicted. Whatever would break it is refused: an
# offer is answered FULL, a page that nobody reserved counts as gone for a reader.

_ANY = (1 << 64, 0)  # Above every (owner epoch, attempt).
_ALL_PAGES = 1 << 32  # More than any stream has.


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    tag: Tag | None = None
    references: int = 0
    pins: int = 0


@dataclass(slots=True, eq=False)
class _Reservation:
    claim: tuple[int, int]
    need: int  # Slots.
    until_s: float
    tags: list[Tag] = field(default_factory=list)  # Of the stream's pages from page 0 on, as far as told and reserved.
    slots: list[_Slot | None] = field(default_factory=list)  # Where those pages are; None: not here.
    incoming: dict[int, _Slot] = field(default_factory=dict)  # By page index: being written, by whomever.
    leading: int = 0
    told: int = 0  # So many of the tags the writer of that claim has named; what lies behind is an earlier attempt's.


@dataclass(slots=True, eq=False)
class Run:
    """Pages of a stream that arrive now. `slots[i]` is where to put the page of `tags[i]`, None: nowhere."""

    stream: StreamId
    first_page: int
    tags: tuple[Tag, ...]
    code: StoreCode
    slots: list[_Slot | None]
    reservation: _Reservation | None
    agreed: int = _ALL_PAGES  # Below this index the reservation and the writer mean the same pages.

    @property
    def numbers(self) -> list[int | None]:
        return [None if slot is None else slot.number for slot in self.slots]


class CheckpointBook:
    """Every operation costs O(1) per page that it touches; `expire` O(reservations)."""

    def __init__(self, capacity_slots: int) -> None:
        self.capacity_slots = capacity_slots
        self.reserved_slots = 0
        self._reservations: dict[StreamId, _Reservation] = {}
        # The last claims of streams that were released, until a time: their late offers would reserve room for nobody.
        self._ended: dict[StreamId, tuple[tuple[int, int], float]] = {}
        self._by_tag: dict[Tag, _Slot] = {}
        self._slots: list[_Slot] = []  # Those that were ever used; low numbers first, so that memory grows as needed.
        self._free: list[_Slot] = []
        self._cached: OrderedDict[_Slot, None] = OrderedDict()  # In order of last use.
        self._strays = 0  # Slots that are pinned and of no reservation.

    @property
    def held_slots(self) -> int:
        """Whole pages, reserved and not."""
        return len(self._by_tag)

    @property
    def used_slots(self) -> int:
        """Slots that were ever used are those below this number."""
        return len(self._slots)

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

    def offer(self, claim: Claim, need: int, tags: Sequence[Tag], until_s: float) -> Held:
        """Promise room for `need` pages, which begin with those of `tags`; pages that are here already are kept.

        A later claim of the same stream takes the reservation over; one that asks for less than before keeps what it had.
        """
        reservation = self._reservations.get(claim.stream)
        if self._is_fenced(claim, reservation):
            return Held(StoreCode.FENCED, self.held(claim.stream))
        more = need - (0 if reservation is None else reservation.need)
        # Pages that are being read count once, as reserved.
        strays = self._strays - sum(self._is_stray(tag) for tag in set(tags[:need]))
        full = more > 0 and self.reserved_slots + more + strays > self.capacity_slots
        if reservation is None:
            if full:
                return Held(StoreCode.FULL, 0)
            reservation = self._reservations[claim.stream] = _Reservation(_order(claim), 0, until_s)
        # The stream's new writer shuts out the old one even if there is no more room for it.
        self._hand_to(reservation, claim)
        reservation.until_s = max(reservation.until_s, until_s)
        if not full:
            self.reserved_slots += max(0, more)
            reservation.need += max(0, more)
        agreed = self._learn(reservation, 0, tags)
        for index in range(len(reservation.tags)):
            self._attach(reservation, index)
        return Held(StoreCode.FULL if full else StoreCode.OK, min(self._advance(reservation), reservation.told, agreed))

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
        """End those reservations; offers of their writers that come late are fenced until then. Pages stay as long as there
        is room.
        """
        for stream in streams:
            if (reservation := self._reservations.get(stream)) is not None:
                claim = reservation.claim
            else:
                claim, _ = self._ended.get(stream, (_ANY, until_s))
            self._ended[stream] = (claim, until_s)
            self._end(stream)

    def expire(self, now_s: float) -> list[StreamId]:
        """End every reservation whose time has come; returns their streams."""
        for stream in [stream for stream, (_, until_s) in self._ended.items() if until_s <= now_s]:
            del self._ended[stream]
        ended = [stream for stream, reservation in self._reservations.items() if reservation.until_s <= now_s]
        for stream in ended:
            self._end(stream)
        return ended

    # Pages that arrive.

    def begin(self, claim: Claim, first_page: int, tags: tuple[Tag, ...]) -> Run:
        """Pages of a stream are about to arrive: a slot for each that is reserved, not here and not arriving already.

        A stream without a reservation is answered like one of which nothing is held: its writer has to make an offer first.
        """
        reservation = self._reservations.get(claim.stream)
        run = Run(claim.stream, first_page, tags, StoreCode.OK, [None] * len(tags), reservation)
        if self._is_fenced(claim, reservation):
            run.code = StoreCode.FENCED
        elif reservation is not None:
            self._hand_to(reservation, claim)
            if first_page <= self._extent(reservation):
                self._expect(reservation, run)
        return run

    def commit(self, run: Run, position: int) -> int | None:
        """The page is whole and right. Returns the slot that is found under its tag from now on, if it is the page's own;
        None: an equal page came first.
        """
        slot, tag = run.slots[position], run.tags[position]
        assert slot is not None, "nobody was asked to write this page"
        own = self._by_tag.setdefault(tag, slot) is slot
        if own:
            slot.tag = tag
        self._written(run, position)
        return slot.number if own else None

    def end(self, run: Run) -> Held:
        """Nothing more arrives; slots of pages that were not committed are free again."""
        for position in range(len(run.slots)):
            if run.slots[position] is not None:
                self._written(run, position)
        reservation = self._reservations.get(run.stream)
        return Held(run.code, min(self.held(run.stream), run.agreed, reservation.told if reservation is not None else 0))

    # Pages that are read.

    def match(self, tags: Iterable[Tag]) -> list[int]:
        """The slots of the longest leading run of `tags` that is here; each gets a pin."""
        found = []
        for tag in tags:
            slot = self._by_tag.get(tag)
            if slot is None:
                break
            if slot.references == 0 and slot.pins == 0 and self.reserved_slots + self._strays >= self.capacity_slots:
                break
            self._pin(slot)
            found.append(slot.number)
        return found

    def unpin(self, numbers: Sequence[int]) -> None:
        """One pin less to each. The last page goes first, so that under pressure a run loses its tail first."""
        for number in reversed(numbers):
            self._unpin(self._slots[number])

    def adopt(self, pages: Sequence[tuple[int, Tag]]) -> None:
        """Pages that another life of this store left in those slots, least recently used first. Only a new book adopts."""
        assert not self._slots, "this store is in use"
        self._slots = [_Slot(number) for number in range(max((number + 1 for number, _ in pages), default=0))]
        assert len(self._slots) <= self.capacity_slots
        for number, tag in pages:
            slot = self._slots[number]
            if slot.tag is None and self._by_tag.setdefault(tag, slot) is slot:
                slot.tag = tag
                self._settle(slot)
        self._free = [slot for slot in reversed(self._slots) if slot.tag is None]

    # What a reservation knows.

    def _is_fenced(self, claim: Claim, reservation: _Reservation | None) -> bool:
        latest = reservation.claim if reservation is not None else self._ended.get(claim.stream, ((-1, -1), 0.0))[0]
        # The last claim of a stream that lives may come again; of one that was released it may not.
        return _order(claim) < latest if reservation is not None else _order(claim) <= latest

    def _hand_to(self, reservation: _Reservation, claim: Claim) -> None:
        if reservation.claim != _order(claim):
            reservation.claim, reservation.told = _order(claim), 0

    def _learn(self, reservation: _Reservation, first: int, tags: Sequence[Tag]) -> int:
        """The writer's pages from index `first` on. Returns below which index the reservation goes by what the writer says."""
        for index, tag in enumerate(tags[: max(0, reservation.need - first)], first):
            if index < len(reservation.tags) and reservation.tags[index] != tag:
                # Pages that are being read would be dropped, but not free: their room is not there for others yet.
                if any(slot is not None and slot.pins for slot in reservation.slots[index:]):
                    return index
                self._forget_from(reservation, index)
            if index == len(reservation.tags):
                reservation.tags.append(tag)
                reservation.slots.append(None)
            reservation.told = max(reservation.told, index + 1)
        return _ALL_PAGES

    def _forget_from(self, reservation: _Reservation, first: int) -> None:
        # An attempt that samples afresh writes other pages than the one before, from where its client stood.
        for slot in reversed(reservation.slots[first:]):
            if slot is not None:
                self._drop(slot)
        del reservation.tags[first:], reservation.slots[first:]
        reservation.leading = min(reservation.leading, first)

    def _attach(self, reservation: _Reservation, index: int) -> None:
        """Keep the page of that index if it is here. While one is being written for it, that one uses up its room."""
        if reservation.slots[index] is None and index not in reservation.incoming:
            slot = self._by_tag.get(reservation.tags[index])
            if slot is not None:
                self._hold(slot)
                reservation.slots[index] = slot

    def _advance(self, reservation: _Reservation) -> int:
        slots = reservation.slots
        while reservation.leading < len(slots) and slots[reservation.leading] is not None:
            reservation.leading += 1
        return reservation.leading

    def _extent(self, reservation: _Reservation) -> int:
        """Up to here pages are here or arriving: what begins later leaves a gap."""
        index = reservation.leading
        while index < len(reservation.slots) and (reservation.slots[index] is not None or index in reservation.incoming):
            index += 1
        return index

    def _end(self, stream: StreamId) -> None:
        reservation = self._reservations.pop(stream, None)
        if reservation is not None:
            self.reserved_slots -= reservation.need
            for slot in [*reservation.incoming.values(), *reversed(reservation.slots)]:
                if slot is not None:
                    self._drop(slot)

    def _written(self, run: Run, position: int) -> None:
        """Nobody writes into that slot any more."""
        slot, reservation = run.slots[position], run.reservation
        assert slot is not None
        run.slots[position] = None
        if reservation is not None and self._reservations.get(run.stream) is reservation:
            index = run.first_page + position
            del reservation.incoming[index]
            if index < len(reservation.tags):
                self._attach(reservation, index)
                self._advance(reservation)
            self._drop(slot)
        self._unpin(slot)

    def _expect(self, reservation: _Reservation, run: Run) -> None:
        """Find a slot for every page of the run that needs one."""
        run.agreed = self._learn(reservation, run.first_page, run.tags)
        for position in range(len(run.tags)):
            index = run.first_page + position
            if index >= reservation.need:
                run.code = StoreCode.FULL
            if index >= min(run.agreed, reservation.need):
                break
            self._attach(reservation, index)
            if reservation.slots[index] is None and index not in reservation.incoming:
                run.slots[position] = reservation.incoming[index] = self._take_for_writing()
        self._advance(reservation)

    # Who keeps a slot.

    def _take_for_writing(self) -> _Slot:
        if self._free:
            slot = self._free.pop()
        elif len(self._slots) < self.capacity_slots:
            slot = _Slot(len(self._slots))
            self._slots.append(slot)
        else:
            assert self._cached, "a reserved page finds no slot"
            slot, _ = self._cached.popitem(last=False)
            assert slot.tag is not None
            del self._by_tag[slot.tag]
            slot.tag = None
        slot.references = slot.pins = 1
        return slot

    def _hold(self, slot: _Slot) -> None:
        if slot.references == 0:
            self._strays -= slot.pins > 0
            self._cached.pop(slot, None)
        slot.references += 1

    def _drop(self, slot: _Slot) -> None:
        slot.references -= 1
        self._strays += slot.references == 0 and slot.pins > 0
        self._settle(slot)

    def _pin(self, slot: _Slot) -> None:
        if slot.pins == 0:
            self._strays += slot.references == 0
            self._cached.pop(slot, None)
        slot.pins += 1

    def _unpin(self, slot: _Slot) -> None:
        assert slot.pins > 0, f"slot {slot.number} is unpinned once too often"
        slot.pins -= 1
        self._strays -= slot.references == 0 and slot.pins == 0
        self._settle(slot)

    def _settle(self, slot: _Slot) -> None:
        if slot.references == 0 and slot.pins == 0:
            if slot.tag is None:
                self._free.append(slot)
            else:
                self._cached[slot] = None

    def _is_stray(self, tag: Tag) -> bool:
        slot = self._by_tag.get(tag)
        return slot is not None and slot.references == 0 and slot.pins > 0

    def check(self) -> None:
        """Assert that every slot is in exactly one state, that all books agree and that the promise is kept. O(slots)."""
        references = [0] * len(self._slots)
        for reservation in self._reservations.values():
            assert len(reservation.tags) == len(reservation.slots) <= reservation.need
            used = {index for index, slot in enumerate(reservation.slots) if slot is not None}
            assert not used & reservation.incoming.keys(), "one page uses two slots"
            assert all(index < reservation.need for index in reservation.incoming)
            assert reservation.leading == next((i for i, slot in enumerate(reservation.slots) if slot is None), len(used))
            for index in used:
                slot = reservation.slots[index]
                assert slot is not None
                assert slot.tag == reservation.tags[index], f"slot {slot.number} holds another page"
                references[slot.number] += 1
            for slot in reservation.incoming.values():
                assert slot.tag is None
                assert slot.pins == 1
                references[slot.number] += 1
        assert references == [slot.references for slot in self._slots], "references do not add up"
        free = {slot.number for slot in self._free}
        assert len(free) == len(self._free), "a slot is twice in the free list"
        for slot in self._slots:
            idle = slot.references == 0 and slot.pins == 0
            assert (slot.number in free) == (idle and slot.tag is None), f"slot {slot.number}: free list is wrong"
            assert (slot in self._cached) == (idle and slot.tag is not None), f"slot {slot.number}: cache list is wrong"
            assert slot.tag is None or self._by_tag[slot.tag] is slot, f"slot {slot.number}: tag is wrong"
        assert len(self._by_tag) == sum(slot.tag is not None for slot in self._slots), "a tag leads nowhere"
        assert self._strays == sum(slot.references == 0 and slot.pins > 0 for slot in self._slots), "strays do not add up"
        assert self.reserved_slots == sum(reservation.need for reservation in self._reservations.values())
        assert self.reserved_slots + self._strays <= self.capacity_slots, "more is promised than there is"
        assert len(self._slots) <= self.capacity_slots


def _order(claim: Claim) -> tuple[int, int]:
    return claim.owner_epoch, claim.attempt
