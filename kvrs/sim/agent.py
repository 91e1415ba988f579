"""The agent of a simulated node: the book of its checkpoint store, and what lies in the slots."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrs.agent.slots import SlotTable
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.frames import Claim, Held, StoreCode
from kvrs.protocol.instance import Slot, SlotAsked
from kvrs.protocol.tags import Tag
from kvrs.sim.process import require
from kvrs.sim.site import LATENCY_S, Asked, Holder, Opened, Site
from kvrs.transfer.store.book import CheckpointBook, Run

LOOK_S = 0.25  # How late the end of a lease may be noticed.


@dataclass(slots=True, eq=False)
class Changes:
    """What one proxy has not been told yet."""

    streams: dict[StreamId, None]
    denied: dict[StreamId, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holdings:
    """One line of an agent's report."""

    epoch: int
    reserved_bytes: int
    checkpoints: int
    pages: dict[StreamId, int]
    denied: tuple[StreamId, ...]


class SimAgent(Holder):
    def __init__(self, name: InstanceId, node: NodeId, site: Site) -> None:
        super().__init__(name, node, site.clock)
        self._site = site
        self._page_bytes = site.geometry.page_bytes
        self._lease_s = site.config.transfer.lease_s
        self._contents: dict[int, Tag] = {}  # Of slots whose page is whole: what a restarted agent adopts.
        self._watchers: list[Changes] = []
        self.book = CheckpointBook(0)
        self.slots = SlotTable(site.config.policy.slots_max)
        self._connections = 0  # That read or write pages.

    def start(self) -> None:
        super().start()
        self._watchers, self._connections = [], 0
        self.book = CheckpointBook(self._site.config.backup.capacity_bytes // self._page_bytes)
        self.book.adopt(list(self._contents.items()))
        self.slots = SlotTable(self._site.config.policy.slots_max, first_token=self.epoch << 32)
        self._look_at_slots()

    def lose_memory(self) -> None:
        """The node is gone, and its shared memory with it."""
        self._contents.clear()

    # What instances ask.

    def offer(self, claim: Claim, reserved_bytes: int, tags: tuple[Tag, ...]) -> Held:
        self._expire()
        held = self.book.offer(claim, -(-reserved_bytes // self._page_bytes), tags, self.clock.now_s + self._lease_s)
        self._note(claim.stream, held)
        return held

    def begin(self, claim: Claim, first_page: int, tags: tuple[Tag, ...]) -> Run:
        self._connections += 1
        run = self.book.begin(claim, first_page, tags)
        for slot in run.numbers:
            if slot is not None:
                self._contents.pop(slot, None)
        return run

    def commit(self, run: Run, index: int, content: Tag | None) -> None:
        """A page has arrived and its checksum is right."""
        if run.slots[index] is None:
            return
        require(content == run.tags[index], f"{self.id} is sent another page than it was promised")
        slot = self.book.commit(run, index)
        if slot is not None:
            self._contents[slot] = run.tags[index]

    def end(self, run: Run) -> Held:
        self._connections -= 1
        held = self.book.end(run)
        self._note(run.stream, held)
        return held

    def open(self, asked: Asked) -> Opened:
        if asked.epoch is not None and asked.epoch != self.epoch:
            return Opened([], False, lambda: None)
        slots = self.book.match(asked.tags)
        self._connections += 1

        def close() -> None:
            self._connections -= 1
            self.book.unpin(slots)

        return Opened([self._contents.get(slot) for slot in slots], False, close)

    # What proxies ask.

    def renew(self, streams: Iterable[StreamId]) -> list[StreamId]:
        self._expire()
        return self.book.renew(streams, self.clock.now_s + self._lease_s)

    def release(self, streams: Iterable[StreamId]) -> None:
        ended = list(streams)
        self.book.release(ended, self.clock.now_s + self._lease_s)
        for changes in self._watchers:
            changes.streams |= dict.fromkeys(ended)

    def acquire(self, owner: str, asked: SlotAsked) -> Slot:
        slot = self.slots.acquire(owner, asked, self._lease_s, self.clock.now_s)
        self.slots.check()
        return slot

    def give_back(self, owner: str, asked: SlotAsked) -> None:
        self.slots.release(owner, asked, self.clock.now_s)
        self.slots.check()

    def renew_slots(self, owner: str, held: Sequence[SlotAsked]) -> None:
        for asked in held:
            self.slots.renew(owner, asked, self._lease_s, self.clock.now_s)
        self.slots.check()

    def _look_at_slots(self) -> None:
        for asked in self.slots.expire(self.clock.now_s):
            engine = self._site.holders[asked.target]
            engine.call(LATENCY_S, partial(engine.end_transfer, asked.stream, (asked.owner_epoch, asked.attempt + 1)))
        self.later(LOOK_S, self._look_at_slots)

    def watch(self) -> Changes:
        changes = Changes(dict.fromkeys(self.book.streams()))
        self._watchers.append(changes)
        return changes

    def report(self, changes: Changes) -> Holdings:
        """What has changed for this proxy."""
        self._expire()
        pages = {stream: self.book.held(stream) for stream in changes.streams}
        denied = tuple(changes.denied)
        changes.streams, changes.denied = {}, {}
        return Holdings(self.epoch, self.book.reserved_slots * self._page_bytes, self.book.reservations, pages, denied)

    def check_at_rest(self) -> None:
        """No stream is left, so nothing is reserved, written or read."""
        self._expire()
        self.book.check()
        require(not self._connections, f"{self.id} still reads or writes pages")
        require(not self.book.reservations and not self.book.reserved_slots, f"{self.id} still reserves")
        self.slots.check()
        held = {target: count.held for target, count in self.slots.counts().items() if count.held}
        require(not held, f"{self.id} still has slots in use: {held}")

    def _expire(self) -> None:
        ended = self.book.expire(self.clock.now_s)
        for changes in self._watchers:
            changes.streams |= dict.fromkeys(ended)

    def _note(self, stream: StreamId, held: Held) -> None:
        for changes in self._watchers:
            changes.streams[stream] = None
            if held.code is StoreCode.FULL:
                changes.denied[stream] = None
