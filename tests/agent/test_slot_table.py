"""Slots of one node's instances, between any number of proxies."""

from kvrs.agent.slots import PATIENCE_S, SHORTEST_WAIT_S, SlotTable
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Slot, SlotAsked

D, D1 = InstanceId("d"), InstanceId("d1")
A, B = "proxy a", "proxy b"
LEASE_S = 10.0


def asked(stream: str, attempt: int = 1, target: InstanceId = D, owner_epoch: int = 0) -> SlotAsked:
    return SlotAsked(target, StreamId(stream), attempt, owner_epoch)


class Desk:
    """A table, and a clock that is set by hand."""

    def __init__(self, slots_max: int) -> None:
        self.table = SlotTable(slots_max)
        self.now_s = 0.0

    def ask(self, owner: str, wanted: SlotAsked, at_s: float | None = None) -> Slot:
        self.now_s = self.now_s if at_s is None else at_s
        slot = self.table.acquire(owner, wanted, LEASE_S, self.now_s)
        self.table.check()
        return slot

    def has(self, owner: str, wanted: SlotAsked, at_s: float | None = None) -> bool:
        return self.ask(owner, wanted, at_s).token > 0

    def release(self, owner: str, wanted: SlotAsked, at_s: float | None = None) -> None:
        self.now_s = self.now_s if at_s is None else at_s
        self.table.release(owner, wanted, self.now_s)
        self.table.check()

    def renew(self, owner: str, wanted: SlotAsked, at_s: float | None = None) -> bool:
        self.now_s = self.now_s if at_s is None else at_s
        kept = self.table.renew(owner, wanted, LEASE_S, self.now_s)
        self.table.check()
        return kept

    def pass_time(self, until_s: float) -> list[SlotAsked]:
        """In small steps, as an agent that runs looks at its table."""
        ended = []
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.5)
            ended += self.table.expire(self.now_s)
            self.table.check()
        return ended


def test_a_target_has_so_many_slots_for_all_proxies_together() -> None:
    """And another target has its own."""
    desk = Desk(2)

    got = [desk.has(owner, asked(stream)) for owner, stream in ((A, "a1"), (B, "b1"), (A, "a2"), (B, "b2"))]

    assert got == [True, True, False, False]
    assert desk.has(B, asked("b3", target=D1))
    assert {name: (count.held, count.waiting, count.most) for name, count in desk.table.counts().items()} == {
        D: (2, 2, 2),
        D1: (1, 0, 1),
    }


def test_tokens_rise() -> None:
    """Whatever was granted later has the higher one, at any target, and also after a restart."""
    desk, again = Desk(1), SlotTable(1, first_token=1000)

    first = desk.ask(A, asked("s")).token
    desk.release(A, asked("s"))
    tokens = [first, desk.ask(B, asked("t")).token, desk.ask(B, asked("u", target=D1)).token]

    assert tokens == [1, 2, 3]
    assert again.acquire(A, asked("s"), LEASE_S, 0.0).token == 1000


def test_who_asks_twice_has_one_slot() -> None:
    """An answer may get lost: the same attempt of the same owner gets the same token, and a whole lease from now on."""
    desk = Desk(2)

    first, second = desk.ask(A, asked("s")), desk.ask(A, asked("s"), at_s=6.0)

    assert first == second
    assert desk.table.counts()[D].held == 1
    assert desk.pass_time(15.5) == []
    assert desk.pass_time(16.0) == [asked("s")]


def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    """A stream has one writer, so its former transfer is over; nothing that still comes of it counts."""
    desk = Desk(1)
    desk.ask(A, asked("s", 1))

    second = desk.ask(A, asked("s", 2))
    late = desk.ask(A, asked("s", 1))
    desk.release(A, asked("s", 1))

    assert second.token == 2
    assert late.token == 0
    assert not desk.renew(A, asked("s", 1))
    assert desk.renew(A, asked("s", 2))
    assert desk.table.expire(desk.now_s) == [], "its owner has ended it himself"


def test_another_owner_of_the_stream_takes_over() -> None:
    """His epoch is higher, though he counts attempts from 1; the old owner may not know, so its transfer is ended for it."""
    desk = Desk(2)
    desk.ask(A, asked("s", 5))

    assert desk.has(B, asked("s", 1, owner_epoch=1, target=D1))
    assert not desk.renew(A, asked("s", 5))
    assert not desk.has(A, asked("s", 6))
    assert desk.table.expire(desk.now_s) == [asked("s", 5)]
    assert desk.table.counts()[D].held == 0


def test_a_release_that_overtakes_its_request_holds() -> None:
    """They come on different connections: whoever asks for what has ended gets nothing, or nobody would give it back."""
    desk = Desk(1)

    desk.release(A, asked("s", 3))

    assert not desk.has(A, asked("s", 3))
    assert not desk.table.counts()
    assert desk.has(A, asked("s", 4))


def test_who_is_silent_for_a_lease_loses_its_slots() -> None:
    """Its transfers are named, once, so that they are ended; what it still says of them comes too late."""
    desk = Desk(2)
    desk.ask(A, asked("dead"))
    desk.ask(B, asked("alive"))
    desk.pass_time(7.0)
    desk.renew(B, asked("alive"))

    assert desk.pass_time(9.5) == []
    assert desk.pass_time(16.5) == [asked("dead")]
    assert not desk.renew(A, asked("dead"))
    assert not desk.has(A, asked("dead"))
    assert desk.table.counts()[D].expired == 1
    assert desk.pass_time(17.0) == [asked("alive")]


def test_a_table_that_nobody_looked_at_ends_no_lease_at_once() -> None:
    """An agent that was stopped has renewals to read first."""
    desk = Desk(1)
    desk.ask(A, asked("s"))
    desk.pass_time(1.0)

    desk.now_s = 60.0
    assert desk.table.expire(60.0) == []
    assert desk.renew(A, asked("s"), at_s=60.1)
    assert desk.pass_time(70.0) == []
    assert desk.pass_time(70.5) == [asked("s")]


def test_a_transfer_that_an_earlier_life_of_the_agent_granted_is_counted_again() -> None:
    """With its first renewal, where there is room. Never above the most."""
    desk = Desk(1)

    first = desk.renew(A, asked("s"))
    second = desk.renew(A, asked("t"))

    assert (first, second) == (True, False)
    assert not desk.has(B, asked("b"))


def test_a_denial_tells_how_long_the_wait_is() -> None:
    """As transfers usually take; as long as none has ended, one that has lasted so long may last as long again."""
    desk = Desk(2)
    desk.ask(A, asked("a1"))
    desk.ask(A, asked("a2"))

    at_once = desk.ask(B, asked("b1"))
    desk.ask(B, asked("b1"), at_s=2.0)
    later = desk.ask(B, asked("b2"), at_s=3.0)
    desk.release(A, asked("a1"), at_s=4.0)
    desk.ask(B, asked("b1"))
    known = desk.ask(B, asked("b2"), at_s=4.0)

    assert at_once.wait_s == SHORTEST_WAIT_S
    assert later.wait_s == 3.0 + 1 * 6.0 / 2, "behind another one"
    assert known.wait_s == SHORTEST_WAIT_S, "the oldest has taken as long as the one before it"


def test_what_comes_free_is_kept_for_those_who_were_first() -> None:
    """From the moment on at which they were told to come again: until then nobody keeps a slot idle for them."""
    desk = Desk(1)
    desk.ask(A, asked("a1"))
    wait_s = desk.ask(B, asked("b1"), at_s=2.0).wait_s
    desk.release(A, asked("a1"), at_s=2.5)
    taken = desk.has(A, asked("a2"))
    desk.release(A, asked("a2"), at_s=2.0 + wait_s)

    overtakes = desk.has(A, asked("a3"))

    assert wait_s == 2.0
    assert taken
    assert not overtakes
    assert desk.has(B, asked("b1"))


def test_a_place_in_line_is_kept_while_one_comes_back() -> None:
    """Whoever is denied again is not put behind those who came after it."""
    desk = Desk(1)
    desk.ask(A, asked("a1"))
    for at_s, stream, attempt in ((1.0, "b1", 1), (1.0, "b2", 1), (2.0, "b1", 2), (4.0, "b2", 2), (4.0, "b1", 2)):
        assert not desk.has(B, asked(stream, attempt), at_s=at_s)
    desk.release(A, asked("a1"), at_s=4.5)

    assert not desk.has(B, asked("b2", 3))
    assert desk.has(B, asked("b1", 3))


def test_who_does_not_come_back_loses_its_place() -> None:
    """It has gone another way, and nobody is to wait for it."""
    desk = Desk(1)
    desk.ask(A, asked("a1"))
    wait_s = desk.ask(B, asked("b1"), at_s=1.0).wait_s
    desk.release(A, asked("a1"))

    assert not desk.has(A, asked("a2"), at_s=1.0 + wait_s)
    assert desk.has(A, asked("a2"), at_s=1.0 + wait_s + PATIENCE_S)


def test_who_ends_leaves_the_line_at_once() -> None:
    """Its client has left, or another way was quicker."""
    desk = Desk(1)
    desk.ask(A, asked("a1"))
    wait_s = desk.ask(B, asked("b1"), at_s=1.0).wait_s
    desk.release(A, asked("a1"))
    desk.release(B, asked("b1"))

    assert desk.has(A, asked("a2"), at_s=1.0 + wait_s)


def test_nothing_is_left_when_all_is_over() -> None:
    """A daemon of a node lives long."""
    desk = Desk(1)
    desk.ask(A, asked("a1"))
    desk.ask(B, asked("b1"))
    desk.release(A, asked("a1"))
    desk.pass_time(100.0)

    assert not desk.table._over
    assert not desk.table._leased
    assert not desk.table._lined_up
