"""Slots of one node's instances, shared by any number of proxies."""

from kvrs.agent.slots import QUEUE_TIMEOUT_S, SHORTEST_WAIT_S, SlotTable
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Slot, SlotRequest

D, D1 = InstanceId("d"), InstanceId("d1")
A, B = "proxy a", "proxy b"
LEASE_S = 10.0


def asked(
    stream: str, attempt: int = 1, target: InstanceId = D, owner_epoch: int = 0
) -> SlotRequest:
    return SlotRequest(target, StreamId(stream), attempt, owner_epoch)


class TableAndClock:
    """A table, and a clock that the test sets."""

    def __init__(self, slots_max: int) -> None:
        self.table = SlotTable(slots_max)
        self.now_s = 0.0

    def ask(self, owner: str, wanted: SlotRequest, at_s: float | None = None) -> Slot:
        self.now_s = self.now_s if at_s is None else at_s
        slot = self.table.acquire(owner, wanted, LEASE_S, self.now_s)
        self.table.check()
        return slot

    def has(self, owner: str, wanted: SlotRequest, at_s: float | None = None) -> bool:
        return self.ask(owner, wanted, at_s).token > 0

    def release(self, owner: str, wanted: SlotRequest, at_s: float | None = None) -> None:
        self.now_s = self.now_s if at_s is None else at_s
        self.table.release(owner, wanted, self.now_s)
        self.table.check()

    def renew(self, owner: str, wanted: SlotRequest, at_s: float | None = None) -> bool:
        self.now_s = self.now_s if at_s is None else at_s
        kept = self.table.renew(owner, wanted, LEASE_S, self.now_s)
        self.table.check()
        return kept

    def pass_time(self, until_s: float) -> list[SlotRequest]:
        """In small steps, as an agent that runs calls its table."""
        ended = []
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.5)
            ended += self.table.expire(self.now_s)
            self.table.check()
        return ended


def test_another_owner_of_a_stream_replaces_the_lease() -> None:
    """Its epoch is higher, although its attempts begin at 1; the transfer of the old owner is
    fenced.
    """
    slots = TableAndClock(2)
    slots.ask(A, asked("s", 5))

    assert slots.has(B, asked("s", 1, owner_epoch=1, target=D1))
    assert not slots.renew(A, asked("s", 5))
    assert not slots.has(A, asked("s", 6))
    assert slots.table.expire(slots.now_s) == [asked("s", 5)]
    assert slots.table.counts()[D].held == 0


def test_a_lease_that_is_not_renewed_expires() -> None:
    """Its transfers are returned once, to be fenced; late renewals fail."""
    slots = TableAndClock(2)
    slots.ask(A, asked("dead"))
    slots.ask(B, asked("alive"))
    slots.pass_time(7.0)
    slots.renew(B, asked("alive"))

    assert slots.pass_time(9.5) == []
    assert slots.pass_time(16.5) == [asked("dead")]
    assert not slots.renew(A, asked("dead"))
    assert not slots.has(A, asked("dead"))
    assert slots.table.counts()[D].expired == 1
    assert slots.pass_time(17.0) == [asked("alive")]


def test_a_denial_has_the_expected_wait() -> None:
    """By the mean duration of transfers; before the first has ended, one that has lasted so long is
    expected to last as long again.
    """
    slots = TableAndClock(2)
    slots.ask(A, asked("a1"))
    slots.ask(A, asked("a2"))

    at_once = slots.ask(B, asked("b1"))
    slots.ask(B, asked("b1"), at_s=2.0)
    later = slots.ask(B, asked("b2"), at_s=3.0)
    slots.release(A, asked("a1"), at_s=4.0)
    slots.ask(B, asked("b1"))
    known = slots.ask(B, asked("b2"), at_s=4.0)

    assert at_once.wait_s == SHORTEST_WAIT_S
    assert later.wait_s == 3.0 + 1 * 6.0 / 2, "behind another one"
    assert known.wait_s == SHORTEST_WAIT_S, "the oldest has taken as long as the one before it"


def test_free_slots_are_reserved_for_the_head_of_the_queue() -> None:
    """From the time of its next request; before that no slot is idle for it."""
    slots = TableAndClock(1)
    slots.ask(A, asked("a1"))
    wait_s = slots.ask(B, asked("b1"), at_s=2.0).wait_s
    slots.release(A, asked("a1"), at_s=2.5)
    taken = slots.has(A, asked("a2"))
    slots.release(A, asked("a2"), at_s=2.0 + wait_s)

    overtakes = slots.has(A, asked("a3"))

    assert wait_s == 2.0
    assert taken
    assert not overtakes
    assert slots.has(B, asked("b1"))


def test_a_place_in_the_queue_is_kept_by_asking_again() -> None:
    """An attempt that is denied again is not put behind later ones."""
    slots = TableAndClock(1)
    slots.ask(A, asked("a1"))
    for at_s, stream, attempt in (
        (1.0, "b1", 1),
        (1.0, "b2", 1),
        (2.0, "b1", 2),
        (3.0, "b1", 2),
        (4.0, "b2", 2),
        (4.0, "b1", 2),
    ):
        assert not slots.has(B, asked(stream, attempt), at_s=at_s)
    slots.release(A, asked("a1"), at_s=4.5)

    assert not slots.has(B, asked("b2", 3))
    assert slots.has(B, asked("b1", 3))


def test_an_attempt_that_does_not_ask_again_loses_its_place() -> None:
    """It was recovered otherwise, and none must wait for it."""
    slots = TableAndClock(1)
    slots.ask(A, asked("a1"))
    wait_s = slots.ask(B, asked("b1"), at_s=1.0).wait_s
    slots.release(A, asked("a1"))

    assert not slots.has(A, asked("a2"), at_s=1.0 + wait_s)
    assert slots.has(A, asked("a2"), at_s=1.0 + wait_s + QUEUE_TIMEOUT_S)


def test_a_due_attempt_asks_again_soon() -> None:
    """The slot that is kept for it would be idle until then, however long transfers were before."""
    slots = TableAndClock(1)
    slots.ask(A, asked("a1"))
    wait_s = slots.ask(B, asked("b1"), at_s=300.0).wait_s
    early_s = slots.ask(B, asked("b1"), at_s=500.0).wait_s
    again_s = slots.ask(B, asked("b1"), at_s=600.0).wait_s
    slots.release(A, asked("a1"))

    assert (wait_s, early_s) == (300.0, 100.0)
    assert again_s <= QUEUE_TIMEOUT_S
    assert not slots.has(A, asked("a2")), "it is kept for b1"
    assert slots.has(A, asked("a2"), at_s=600.0 + again_s + QUEUE_TIMEOUT_S), "b1 did not ask"


def test_an_attempt_that_ends_leaves_the_queue_at_once() -> None:
    """Its client has left, or another way was quicker."""
    slots = TableAndClock(1)
    slots.ask(A, asked("a1"))
    wait_s = slots.ask(B, asked("b1"), at_s=1.0).wait_s
    slots.release(A, asked("a1"))
    slots.release(B, asked("b1"))

    assert slots.has(A, asked("a2"), at_s=1.0 + wait_s)


def test_the_table_is_empty_when_all_has_ended() -> None:
    """A daemon of a node runs for long."""
    slots = TableAndClock(1)
    slots.ask(A, asked("a1"))
    slots.ask(B, asked("b1"))
    slots.release(A, asked("a1"))
    slots.pass_time(100.0)

    assert not slots.table._ended
    assert not slots.table._leased
    assert not slots.table._queued
