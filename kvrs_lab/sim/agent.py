"""The agent of a simulated node: its checkpoint book and the contents of its slots."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvrs.agent.slots import SlotTable
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import AgentInfo, AgentReport, SlotAnswer, SlotRequest, SlotUpdate
from kvrs.protocol.pages import CheckpointClaim, HeldPages, StoreCode, Tag
from kvrs.transfer.store.book import CheckpointBook, IncomingRange
from kvrs_lab.sim.process import require
from kvrs_lab.sim.site import LATENCY_S, OpenedPages, PageRequest, SimKeeper, Site

LOOK_S = 0.25  # Longest delay until the end of a lease is noticed.


@dataclass(slots=True, eq=False)
class Changes:
    """Changes since the last report to one proxy."""

    streams: dict[StreamId, None]
    denied: dict[StreamId, None] = field(default_factory=dict)


class SimAgent(SimKeeper):
    def __init__(self, name: InstanceId, node: NodeId, site: Site) -> None:
        super().__init__(name, node, site.clock)
        self._site = site
        self._page_bytes = site.geometry.page_bytes
        self._lease_s = site.config.transfer.lease_s
        # A restarted agent adopts pages in the order of their arrival. `_contents` and `_arrivals`
        # are indexed by slot: the tag, and the arrival number of its whole page (0: no whole page).
        self._contents: list[Tag] = []
        self._arrivals = array("I")
        self._whole_pages = self._arrived_pages = 0
        self._watchers: list[Changes] = []
        self.book = CheckpointBook(0)
        self.slots = SlotTable(site.config.policy.slots_max)
        self._connections = 0  # Connections that read or write pages.
        self.slot_ended: Callable[[SlotRequest], None] = lambda asked: None  # Set by the cluster.

    def start(self) -> None:
        super().start()
        self._watchers, self._connections = [], 0
        self.book = CheckpointBook(self._site.config.backup.capacity_bytes // self._page_bytes)
        whole = (slot for slot, arrival in enumerate(self._arrivals) if arrival)
        in_order = sorted(whole, key=self._arrivals.__getitem__)
        self.book.adopt([(slot, self._contents[slot]) for slot in in_order])
        self.slots = SlotTable(self._site.config.policy.slots_max, first_token=self.epoch << 32)
        self._look_at_slots()

    def lose_memory(self) -> None:
        """Clear the shared memory, which is lost with the node."""
        self._contents, self._arrivals, self._whole_pages = [], array("I"), 0

    # Calls of instances.

    def offer(
        self, claim: CheckpointClaim, reserved_bytes: int, tags: tuple[Tag, ...]
    ) -> HeldPages:
        self._expire()
        held = self.book.offer(
            claim, -(-reserved_bytes // self._page_bytes), tags, self.clock.now_s + self._lease_s
        )
        self._note(claim.stream, held)
        return held

    def begin(
        self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]
    ) -> IncomingRange:
        self._connections += 1
        run = self.book.begin(claim, first_page, tags)
        for slot in run.slots:
            if slot is not None and self._is_whole(slot):
                self._arrivals[slot] = 0
                self._whole_pages -= 1
        return run

    def commit(self, run: IncomingRange, index: int, content: Tag | None) -> None:
        if run.slots[index] is None:
            return
        if content != run.tags[index]:
            require(False, f"{self.id} is sent another page than it was promised")
        slot = self.book.commit(run, index)
        if slot is not None:
            if (more := slot + 1 - len(self._contents)) > 0:
                self._contents += [run.tags[index]] * more
                self._arrivals.extend([0] * more)
            self._arrived_pages += 1
            self._whole_pages += 1
            self._contents[slot], self._arrivals[slot] = run.tags[index], self._arrived_pages

    def end(self, run: IncomingRange) -> HeldPages:
        self._connections -= 1
        held = self.book.end(run)
        self._note(run.stream, held)
        return held

    def open(self, asked: PageRequest) -> OpenedPages:
        if asked.epoch is not None and asked.epoch != self.epoch:
            return OpenedPages([], False, lambda: None)
        slots = self.book.match(asked.tags)
        self._connections += 1

        def close() -> None:
            self._connections -= 1
            self.book.unpin(slots)

        return OpenedPages(
            [self._contents[slot] if self._is_whole(slot) else None for slot in slots], False, close
        )

    # Calls of proxies.

    def renew(self, streams: Iterable[StreamId]) -> list[StreamId]:
        self._expire()
        return self.book.renew(streams, self.clock.now_s + self._lease_s)

    def release(self, streams: Iterable[StreamId]) -> None:
        ended = list(streams)
        self.book.release(ended, self.clock.now_s + self._lease_s)
        for changes in self._watchers:
            changes.streams |= dict.fromkeys(ended)

    def update_slots(self, update: SlotUpdate) -> SlotAnswer:
        answer = self.slots.apply(update, self.clock.now_s)
        self.slots.check()
        return answer

    def info(self) -> AgentInfo:
        backup = self._site.config.backup
        return AgentInfo(
            self.id,
            self.node,
            self.epoch,
            self.life,
            0,
            backup.capacity_bytes,
            backup.host_to_device_bytes_per_s,
        )

    def _look_at_slots(self) -> None:
        for asked in self.slots.expire(self.clock.now_s):
            self.slot_ended(asked)
            engine = self._site.holders[asked.target]
            engine.call(
                LATENCY_S,
                partial(engine.end_transfer, asked.stream, (asked.owner_epoch, asked.attempt + 1)),
            )
        self.later(LOOK_S, self._look_at_slots)

    def watch(self) -> Changes:
        changes = Changes(dict.fromkeys(self.book.streams()))
        self._watchers.append(changes)
        return changes

    def report(self, changes: Changes) -> AgentReport:
        """Build the report of the changes since the last report to this proxy."""
        self._expire()
        pages = {stream: self.book.held(stream) for stream in changes.streams}
        denied = list(changes.denied)
        changes.streams, changes.denied = {}, {}
        return AgentReport(
            self.epoch,
            self.book.reserved_slots * self._page_bytes,
            self._whole_pages * self._page_bytes,
            self.book.reservations,
            pages,
            denied,
        )

    def check_at_rest(self) -> None:
        """Check, after the last stream, that nothing is reserved, written or read."""
        self._expire()
        self.book.check()
        require(not self._connections, f"{self.id} still reads or writes pages")
        require(
            not self.book.reservations and not self.book.reserved_slots, f"{self.id} still reserves"
        )
        self.slots.check()
        held = {target: count.held for target, count in self.slots.counts().items() if count.held}
        require(not held, f"{self.id} still has slots in use: {held}")

    def _is_whole(self, slot: int) -> bool:
        return slot < len(self._arrivals) and self._arrivals[slot] > 0

    def _expire(self) -> None:
        ended = self.book.expire(self.clock.now_s)
        for changes in self._watchers:
            changes.streams |= dict.fromkeys(ended)

    def _note(self, stream: StreamId, held: HeldPages) -> None:
        for changes in self._watchers:
            changes.streams[stream] = None
            if held.code is StoreCode.FULL:
                changes.denied[stream] = None
