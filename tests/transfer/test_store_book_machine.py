"""The book of a checkpoint store over random histories, against what may be in the memory behind
it.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrs.ids import StreamId
from kvrs.protocol.page_messages import CheckpointClaim, StoreCode
from kvrs.protocol.tags import Tag, page_tags, root_tag
from kvrs.transfer.store.book import CheckpointBook, IncomingRange
from kvrs_testkit.examples import examples

STREAMS = [StreamId(name) for name in "abcd"]
LONGEST = 6
# Two ways that a stream may go; the first two pages of all streams are alike.
WAYS = {
    stream: [
        tuple(page_tags(root_tag("model"), [0, 0, name, name + way, name, name], 1))
        for name, way in ((number, 10), (number, 20))
    ]
    for number, stream in enumerate(STREAMS, 1)
}

streams = st.sampled_from(STREAMS)
attempts = st.integers(1, 3)


class BookMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.probes = 0
        self.memory: dict[int, Tag | None] = {}  # What whole page was last written into a slot.
        self.ranges: list[IncomingRange] = []
        self.reading: list[list[int]] = []
        self.promised: dict[StreamId, tuple[int, float]] = {}  # Slots, until when.
        self.claims: dict[StreamId, tuple[int, int]] = {}

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.book = CheckpointBook(capacity)

    # What engines do.

    @rule(
        stream=streams,
        attempt=attempts,
        way=st.integers(0, 1),
        pages=st.integers(0, LONGEST),
        need=st.integers(0, 7),
    )
    def offer(self, stream: StreamId, attempt: int, way: int, pages: int, need: int) -> None:
        held = self.book.offer(
            CheckpointClaim(stream, 0, attempt), need, WAYS[stream][way][:pages], self.now_s + 5
        )

        known = self.claims.get(stream)
        if held.code is StoreCode.FENCED:
            assert known is None or attempt < known[1] or stream not in self.promised
            return
        had, until_s = self.promised.get(stream, (0, 0.0))
        if held.code is StoreCode.OK:
            self.promised[stream] = (max(need, had), max(until_s, self.now_s + 5))
        else:
            # Refused because there is less than what is asked for, besides what others were
            # reserved or being read.
            busy = {slot for incoming in self.reading for slot in incoming} | {
                slot for incoming in self.ranges for slot in incoming.slots if slot
            }
            assert (
                sum(slots for slots, _ in self.promised.values()) + need - had + len(busy)
                >= self.book.capacity_slots
            )
            if stream in self.promised:
                self.promised[stream] = (had, max(until_s, self.now_s + 5))
        if stream in self.promised:
            assert known is None or attempt >= known[1]
            self.claims[stream] = (0, attempt)
        assert held.pages <= max(pages, self.book.held(stream))

    @rule(
        stream=streams,
        attempt=attempts,
        way=st.integers(0, 1),
        first=st.integers(0, LONGEST - 1),
        count=st.integers(1, 4),
    )
    def begin(self, stream: StreamId, attempt: int, way: int, first: int, count: int) -> None:
        held_before = self.book.held(stream)
        incoming = self.book.begin(
            CheckpointClaim(stream, 0, attempt), first, WAYS[stream][way][first : first + count]
        )
        self.ranges.append(incoming)

        taken = [slot for slot in incoming.slots if slot is not None]
        reading = {slot for slots in self.reading for slot in slots}
        writing = {slot for other in self.ranges[:-1] for slot in other.slots}
        assert not set(taken) & (reading | writing), "a slot in use is given away"
        for slot in taken:
            self.memory[slot] = None
        if incoming.code is StoreCode.FENCED or stream not in self.promised:
            assert not taken
        else:
            self.claims[stream] = (0, attempt)
            # What is reserved and right behind what is there is received, unless it is on its way
            # already or is being read.
            idle = (
                not any(other.stream == stream for other in self.ranges[:-1]) and not self.reading
            )
            if idle and first == held_before < self.promised[stream][0]:
                assert incoming.slots[0] is not None or self.book.held(stream) > held_before

    @precondition(lambda self: self.ranges)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        incoming = data.draw(st.sampled_from(self.ranges))
        waiting = [position for position, slot in enumerate(incoming.slots) if slot is not None]
        if waiting:
            slot = incoming.slots[waiting[0]]
            assert slot is not None
            self.memory[slot] = incoming.tags[waiting[0]]
            own = self.book.commit(incoming, waiting[0])
            assert own in (slot, None)
            if own is None:
                self.memory[slot] = None

    @precondition(lambda self: self.ranges)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        incoming = data.draw(st.sampled_from(self.ranges))
        self.ranges.remove(incoming)
        held = self.book.end(incoming)

        assert held.pages <= self.book.held(incoming.stream)

    @rule(stream=streams, way=st.integers(0, 1), pages=st.integers(1, LONGEST))
    def read(self, stream: StreamId, way: int, pages: int) -> None:
        wanted = WAYS[stream][way][:pages]
        found = self.book.match(wanted)
        self.reading.append(found)

        assert [self.memory[slot] for slot in found] == list(wanted[: len(found)])

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.book.unpin(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    # What proxies and time do.

    @rule(stream=streams)
    def release(self, stream: StreamId) -> None:
        self.book.release([stream], self.now_s + 5)
        self.promised.pop(stream, None)
        self.claims.pop(stream, None)

    @rule(some=st.sets(streams))
    def renew(self, some: set[StreamId]) -> None:
        assert set(self.book.renew(sorted(some), self.now_s + 8)) == some - self.promised.keys()
        for stream in some & self.promised.keys():
            slots, until_s = self.promised[stream]
            self.promised[stream] = (slots, max(until_s, self.now_s + 8))

    @rule(seconds=st.floats(0, 6))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        ended = self.book.expire(self.now_s)

        assert sorted(ended) == sorted(
            s for s, (_, until_s) in self.promised.items() if until_s <= self.now_s
        )
        for stream in ended:
            del self.promised[stream]
            self.claims.pop(stream, None)

    @precondition(lambda self: not self.ranges and not self.reading)
    @rule()
    def idle(self) -> None:
        """Without readers and writers, everything that is not reserved can be had."""
        if self.book.capacity_slots > self.book.reserved_slots:
            free = self.book.capacity_slots - self.book.reserved_slots
            self.probes += 1
            probe = StreamId(f"probe {self.probes}")
            assert (
                self.book.offer(CheckpointClaim(probe, 0, 1), free + 1, (), self.now_s + 1).code
                is StoreCode.FULL
            )
            assert (
                self.book.offer(CheckpointClaim(probe, 0, 1), free, (), self.now_s + 1).code
                is StoreCode.OK
            )
            self.book.release([probe], self.now_s + 1)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.check()
        assert self.book.reserved_slots == sum(slots for slots, _ in self.promised.values())
        for stream, leading in self.book.streams().items():
            ways = [self.book.match(way[:leading]) for way in WAYS.get(stream, [()])]
            # Every page that a stream counts as held is there, whole.
            assert leading == 0 or any(
                len(found) == leading
                and [self.memory[slot] for slot in found] == list(way[:leading])
                for found, way in zip(ways, WAYS[stream], strict=True)
            ), f"{stream}: {leading} pages are not all there"
            for found in ways:
                self.book.unpin(found)


BookMachine.TestCase.settings = examples(150, stateful_step_count=40)
TestBook = BookMachine.TestCase
