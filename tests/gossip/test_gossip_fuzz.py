"""Robustness against any decodable packet, from any sender, at any time, in any order."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrs.gossip import swim, wire
from kvrs.gossip.swim import Gossip
from kvrs.gossip.wire import Packet, Status, decode, encode
from kvrs.ids import NodeId
from kvrs_testkit.examples import examples

NAMES = [NodeId(name) for name in ("me", "a", "b", "c", "d")]
MEMBERS_MAX = 4


@pytest.fixture(autouse=True)
def _small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swim, "MEMBERS_MAX", MEMBERS_MAX)


nodes = st.sampled_from(NAMES)
numbers = st.sampled_from((0, 1, 2, 3, 4, 1 << 31, (1 << 63) - 1))
epochs = st.sampled_from((1, 2, 3, (1 << 63) - 1))
statuses = st.sampled_from(Status)
updates = st.lists(
    st.builds(
        wire.MemberUpdate,
        nodes,
        epochs,
        numbers,
        statuses,
        st.just("x:1"),
        st.lists(nodes, max_size=8).map(tuple),
    ),
    max_size=4,
).map(tuple)
digest_entries = st.lists(
    st.builds(wire.KnownMember, nodes, numbers, numbers, statuses, numbers, numbers), max_size=5
).map(tuple)
entries = st.builds(
    wire.Entry,
    st.integers(0, 6),
    st.sampled_from(("x", "y")),
    numbers,
    numbers,
    st.none() | st.binary(max_size=9),
)
records = st.lists(
    st.builds(
        wire.RecordDelta,
        nodes,
        epochs,
        numbers,
        numbers,
        numbers,
        st.lists(entries, max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)
packets = st.one_of(
    st.builds(wire.Ping, epochs, numbers, numbers, updates),
    st.builds(wire.Ack, epochs, numbers, numbers, updates),
    st.builds(wire.PingReq, epochs, numbers, numbers, nodes, updates),
    st.builds(wire.IndirectAck, epochs, numbers, numbers, nodes, epochs, numbers, updates),
    st.builds(wire.Nack, epochs, numbers, numbers, updates),
    st.builds(wire.Push, epochs, numbers, updates),
    st.builds(
        wire.Digest,
        epochs,
        numbers,
        st.sampled_from(("", "a", "zz")),
        st.sampled_from(("", "b")),
        digest_entries,
        updates,
    ),
    st.builds(wire.Delta, epochs, numbers, updates, records, digest_entries),
)
steps = st.lists(
    st.tuples(packets, st.sampled_from([*NAMES[1:], NodeId("stranger")]), st.floats(-5.0, 5.0)),
    max_size=30,
)

# An entry as old as a packet can state is passed on by one to whom it is older still.
OLD_ENTRY = wire.Entry(0, "x", 1, wire.MAX_NUMBER, None)
OLD_ENTRY_PASSED_ON: list[tuple[Packet, NodeId, float]] = [
    (
        wire.Ping(1, 0, 0, (wire.MemberUpdate(NAMES[1], 1, 0, Status.ALIVE, "x:1", ()),)),
        NAMES[1],
        0.0,
    ),
    (
        wire.Delta(
            1,
            0,
            (),
            (wire.RecordDelta(NAMES[1], 1, 0, 1, 0, (OLD_ENTRY,)),),
            (wire.KnownMember(NAMES[1], 0, 0, Status.ALIVE, 0, 0),),
        ),
        NAMES[1],
        0.0,
    ),
]


@given(steps, st.integers(0, 5))
@example(OLD_ENTRY_PASSED_ON, 0)
@examples(400)
def test_any_packets_in_any_order_are_survived(
    sequence: list[tuple[Packet, NodeId, float]], seed: int
) -> None:
    """No exception, a bounded table, and every packet that is sent can be decoded and fits."""
    node, now_s = Gossip(NAMES[0], "me:1", 1, 0.5, random.Random(seed).random, 0.0), 0.0
    for packet, sender, pause_s in sequence:
        now_s += pause_s
        for send in [*node.handle(decode(encode(packet)), sender, now_s), *node.tick(now_s)]:
            data = encode(send.packet)
            assert decode(data) == send.packet
            assert len(data) <= wire.MAX_PACKET_BYTES
        assert len(node.members) <= MEMBERS_MAX
        assert node.members[NAMES[0]].status is Status.ALIVE
        node.take_events()


@pytest.mark.parametrize("seed", range(3))
def test_ticks_go_on_after_any_updates(seed: int) -> None:
    """Each tick is at a later time than the one before."""
    draw = random.Random(seed)
    node = Gossip(NAMES[0], "me:1", 1, 0.5, draw.random, 0.0)
    for i in range(200):
        updates = tuple(
            wire.MemberUpdate(
                draw.choice(NAMES), 1, draw.randrange(4), draw.choice(list(Status)[:3]), "x:1"
            )
            for _ in range(3)
        )
        node.handle(wire.Push(1, 9, updates), NAMES[1], i * 0.01)

    ticks = [node.next_tick_s]
    for _ in range(2000):
        node.tick(ticks[-1])
        ticks.append(node.next_tick_s)

    assert ticks == sorted(ticks)
    assert ticks[-1] > ticks[0] + 20.0
