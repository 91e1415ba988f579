"""The book of a checkpoint store over random histories, against what may be in the memory behind
it.
"""

from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrs.ids import StreamId
from kvrs.protocol.pages import CheckpointClaim, HeldPages, StoreCode, Tag, page_tags, root_tag
from kvrs.transfer.store.book import CheckpointBook, IncomingRange
from kvrs_testkit.examples import examples

STREAMS = [StreamId(name) for name in "abc"]
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
attempts = st.sampled_from([1, 1, 1, 2, 3])


def way_of(stream: StreamId, attempt: int) -> tuple[Tag, ...]:
    """An attempt may sample other tokens than the one before."""
    return WAYS[stream][attempt % 2]


class BookMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.memory: dict[int, Tag | None] = {}  # What whole page was last written into a slot.
        self.ranges: list[IncomingRange] = []
        self.reading: list[list[int]] = []
        self.promised: dict[StreamId, tuple[int, float]] = {}  # Slots, until when.
        self.writers: dict[StreamId, int] = {}  # The attempt that writes.
        self.named: dict[StreamId, int] = {}  # How many pages it has told of.
        self.ended: dict[StreamId, tuple[float, float]] = {}  # The last attempt, and until when.

    @initialize(capacity=st.integers(1, 8))
    def start(self, capacity: int) -> None:
        self.book = CheckpointBook(capacity)

    def is_fenced(self, stream: StreamId, attempt: int) -> bool:
        if stream in self.promised:
            return attempt < self.writers[stream]
        return attempt <= self.ended.get(stream, (0, 0.0))[0]

    def in_use(self) -> list[int]:
        read = [slot for found in self.reading for slot in found]
        return read + [slot for each in self.ranges for slot in each.slots if slot is not None]

    # What engines do.

    @rule(
        stream=streams,
        attempt=attempts,
        pages=st.integers(0, LONGEST),
        need=st.integers(0, 7),
    )
    def offer(self, stream: StreamId, attempt: int, pages: int, need: int) -> None:
        claim, tags = CheckpointClaim(stream, 0, attempt), way_of(stream, attempt)[:pages]
        fenced = self.is_fenced(stream, attempt)

        held = self.book.offer(claim, need, tags, self.now_s + 5)

        assert (held.code is StoreCode.FENCED) == fenced
        if fenced:
            return
        had, until_s = self.promised.get(stream, (0, 0.0))
        others = sum(slots for slots, _ in self.promised.values()) - had
        fits = need <= had or others + need <= self.book.capacity_slots
        assert (held.code is StoreCode.OK) == fits
        if fits or stream in self.promised:
            self.promised[stream] = max(need, had) if fits else had, max(until_s, self.now_s + 5)
            self.write(stream, attempt, min(pages, self.promised[stream][0]))
        assert held.pages <= self.named.get(stream, 0)

    def write(self, stream: StreamId, attempt: int, named: int) -> None:
        if self.writers.get(stream) != attempt:
            self.named[stream] = 0
        self.writers[stream] = attempt
        self.named[stream] = max(self.named[stream], named)

    @rule(
        stream=streams,
        attempt=attempts,
        first=st.integers(0, LONGEST - 1),
        count=st.integers(1, 4),
    )
    def begin(self, stream: StreamId, attempt: int, first: int, count: int) -> None:
        tags = way_of(stream, attempt)[first : first + count]
        fenced, in_use = self.is_fenced(stream, attempt), self.in_use()
        here = {self.memory[slot] for slot in self.memory}
        need, _ = self.promised.get(stream, (0, 0.0))

        incoming = self.book.begin(CheckpointClaim(stream, 0, attempt), first, tags)

        self.ranges.append(incoming)
        taken = [slot for slot in incoming.slots if slot is not None]
        assert not set(taken) & set(in_use), "a slot in use is given away"
        assert (incoming.code is StoreCode.FENCED) == fenced
        if fenced or stream not in self.promised:
            assert not taken
            return
        self.write(stream, attempt, 0)
        if first > self.named[stream]:
            assert not taken, "there is a gap"
            return
        self.write(stream, attempt, min(first + len(tags), need))
        assert (incoming.code is StoreCode.FULL) == (first + len(tags) > need)
        arrives = {each.tags[at] for each in self.ranges[:-1] for at in range(len(each.tags))}
        for index, (tag, slot) in enumerate(zip(tags, incoming.slots, strict=True), first):
            assert slot is None or index < need
            assert slot is None or tag not in here, "a page that is here is received again"
            # What is reserved is received, unless others use more than their reservations.
            if not in_use and index < need and tag not in here | arrives:
                assert slot is not None
        for slot in taken:
            self.memory[slot] = None

    @precondition(lambda self: self.ranges)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        incoming = data.draw(st.sampled_from(self.ranges))
        waiting = [position for position, slot in enumerate(incoming.slots) if slot is not None]
        if waiting:
            position = data.draw(st.sampled_from(waiting))
            slot, tag = incoming.slots[position], incoming.tags[position]
            assert slot is not None
            is_new = tag not in self.memory.values()

            assert self.book.commit(incoming, position) == (slot if is_new else None)

            self.memory[slot] = tag if is_new else None

    @precondition(lambda self: self.ranges)
    @rule(data=st.data(), refused=st.booleans())
    def end(self, data: st.DataObject, refused: bool) -> None:
        incoming = data.draw(st.sampled_from(self.ranges))
        self.ranges.remove(incoming)
        if refused:
            self.book.refuse(incoming)

        held = self.book.end(incoming)

        assert held == HeldPages(incoming.code, self.book.held(incoming.stream))
        assert not refused or held.code is StoreCode.FULL

    @rule(stream=streams, way=st.integers(0, 1), pages=st.integers(1, LONGEST))
    def read(self, stream: StreamId, way: int, pages: int) -> None:
        wanted = WAYS[stream][way][:pages]
        found = self.book.match(wanted)
        self.reading.append(found)

        assert [self.memory[slot] for slot in found] == list(wanted[: len(found)])
        assert len(found) == pages or wanted[len(found)] not in self.memory.values()

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.book.unpin(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    # What proxies and time do.

    @rule(stream=streams)
    def release(self, stream: StreamId) -> None:
        last, _ = self.ended.get(stream, (inf, 0.0))

        self.book.release([stream], self.now_s + 5)

        if stream in self.promised:
            last = self.writers[stream]
        self.ended[stream] = last, self.now_s + 5
        self.forget(stream)

    def forget(self, stream: StreamId) -> None:
        for each in (self.promised, self.writers, self.named):
            each.pop(stream, None)

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
            self.forget(stream)
        self.ended = {s: each for s, each in self.ended.items() if each[1] > self.now_s}

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.check(self.in_use())
        assert self.book.reserved_slots == sum(slots for slots, _ in self.promised.values())
        assert self.book.held_slots == sum(tag is not None for tag in self.memory.values())
        assert self.book.streams().keys() == self.promised.keys()
        # Every page that a stream counts as held is there, whole, and its writer's own.
        for stream, leading in self.book.streams().items():
            own = way_of(stream, self.writers[stream])[:leading]
            found = self.book.match(own)
            assert leading <= self.named[stream]
            assert [self.memory[slot] for slot in found] == list(own), f"{stream}: {leading}"
            self.book.unpin(found)


BookMachine.TestCase.settings = examples(400, stateful_step_count=40)
TestBook = BookMachine.TestCase
