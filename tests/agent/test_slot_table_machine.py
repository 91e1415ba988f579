"""The slot table against a simple model of it, for any requests, however late they arrive."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrs.agent.slots import SHORTEST_WAIT_S, SlotTable
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import SlotRequest
from kvrs_testkit.examples import examples

TARGETS = [InstanceId("d0"), InstanceId("d1")]
STREAMS = [StreamId(name) for name in "stuvw"]
OWNERS = ["a", "b"]

messages = st.builds(
    SlotRequest,
    st.sampled_from(TARGETS),
    st.sampled_from(STREAMS),
    st.integers(1, 4),
    st.sampled_from([0, 0, 0, 1]),
)
owners = st.sampled_from(OWNERS)
leases = st.sampled_from([0.5, 3.0, 10.0])

Lease = tuple[SlotRequest, str, int, float]  # With the token, and until when.


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.leases: dict[StreamId, Lease] = {}
        self.over: dict[StreamId, tuple[int, int]] = {}
        self.to_end: list[SlotRequest] = []
        self.last_token = 0

    @initialize(slots_max=st.integers(1, 3))
    def start(self, slots_max: int) -> None:
        self.slots_max = slots_max
        self.table = SlotTable(slots_max)

    def number(self, asked: SlotRequest) -> tuple[int, int]:
        return asked.owner_epoch, asked.attempt

    def is_over(self, asked: SlotRequest) -> bool:
        return self.number(asked) <= self.over.get(asked.stream, (0, 0))

    def end(self, stream: StreamId, number: tuple[int, int]) -> None:
        self.over[stream] = max(number, self.over.get(stream, (0, 0)))

    def held(self, target: InstanceId) -> int:
        return sum(asked.target == target for asked, *_ in self.leases.values())

    @rule(owner=owners, asked=messages, lease_s=leases)
    def acquire(self, owner: str, asked: SlotRequest, lease_s: float) -> None:
        slot = self.table.acquire(owner, asked, lease_s, self.now_s)

        known = self.leases.get(asked.stream)
        if known is not None and known[:2] == (asked, owner):
            assert slot.token == known[2], "the same lease"
            self.leases[asked.stream] = (*known[:3], max(known[3], self.now_s + lease_s))
            return
        if self.is_over(asked) or (
            known is not None and self.number(known[0]) >= self.number(asked)
        ):
            assert slot.token == 0, "it has ended, or has a successor"
            return
        if known is not None:
            del self.leases[asked.stream]
            self.end(asked.stream, self.number(known[0]))
            if known[1] != owner:
                self.to_end.append(known[0])
        if slot.token:
            assert self.held(asked.target) < self.slots_max
            assert slot.token > self.last_token
            self.last_token = slot.token
            self.leases[asked.stream] = (asked, owner, slot.token, self.now_s + lease_s)
        else:
            assert slot.wait_s >= SHORTEST_WAIT_S
            waiting = self.table.counts()[asked.target].waiting
            assert self.held(asked.target) + waiting - 1 >= self.slots_max, (
                "denied, although there is room for all that wait"
            )

    @rule(owner=owners, asked=messages, lease_s=leases)
    def renew(self, owner: str, asked: SlotRequest, lease_s: float) -> None:
        kept = self.table.renew(owner, asked, lease_s, self.now_s)

        known = self.leases.get(asked.stream)
        if known is not None:
            assert kept == (known[:2] == (asked, owner))
            if kept:
                self.leases[asked.stream] = (*known[:3], max(known[3], self.now_s + lease_s))
        elif kept:
            assert not self.is_over(asked)
            assert self.held(asked.target) < self.slots_max
            self.last_token += 1
            self.leases[asked.stream] = (asked, owner, self.last_token, self.now_s + lease_s)
        else:
            assert self.is_over(asked) or self.held(asked.target) == self.slots_max

    @rule(owner=owners, asked=messages)
    def release(self, owner: str, asked: SlotRequest) -> None:
        self.table.release(owner, asked, self.now_s)

        known = self.leases.get(asked.stream)
        if known is not None and known[1] == owner and self.number(known[0]) <= self.number(asked):
            del self.leases[asked.stream]
        self.end(asked.stream, self.number(asked))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Release an existing lease; other releases are drawn too, but seldom."""
        asked, owner, _, _ = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        self.release(owner, asked)

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.9]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        ended = self.table.expire(self.now_s)

        due = [asked for asked, _, _, until_s in self.leases.values() if until_s <= self.now_s]
        key = lambda each: (each.stream, each.owner_epoch, each.attempt)  # noqa: E731 - for both sides.
        assert sorted(ended, key=key) == sorted([*due, *self.to_end], key=key)
        self.to_end = []
        for asked in due:
            del self.leases[asked.stream]
            self.end(asked.stream, self.number(asked))

    @precondition(lambda self: hasattr(self, "table"))
    @rule()
    def stall(self) -> None:
        """A minute without a call of `expire`, after which renewals are read before anything
        else.
        """
        self.pass_time(0.0)
        self.now_s += 60.0
        assert self.table.expire(self.now_s) == [], "nothing ends before it could be renewed"
        self.over.clear()
        for stream, (asked, owner, token, until_s) in self.leases.items():
            self.leases[stream] = asked, owner, token, max(until_s, self.now_s + 2.0)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        counts = self.table.counts()
        for target in TARGETS:
            held = self.held(target)
            assert held <= self.slots_max
            assert held == (counts[target].held if target in counts else 0)

    def teardown(self) -> None:
        """Everything ends, and an attempt that keeps asking is granted, whatever else is
        requested.
        """
        if not hasattr(self, "table"):
            return
        for number in range(200):
            self.now_s += 1.0
            self.table.expire(self.now_s)
            newcomer = SlotRequest(TARGETS[0], StreamId(f"newcomer {number}"), 1)
            if number % 2:
                self.table.acquire("c", newcomer, 1.0, self.now_s)
            slot = self.table.acquire(
                "b", SlotRequest(TARGETS[0], StreamId("patient"), 1 + number), 1.0, self.now_s
            )
            if slot.token:
                return
            self.table.acquire("c", newcomer, 1.0, self.now_s)
        raise AssertionError("it was overtaken for ever")


TableMachine.TestCase.settings = examples(150, stateful_step_count=40)
TestTable = TableMachine.TestCase
