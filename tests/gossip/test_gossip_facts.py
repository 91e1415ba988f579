"""Facts that nodes publish, as decisions read them."""

import math

import pytest

from kvrs.errors import GossipError
from kvrs.gossip.facts import (
    Fact,
    FactKind,
    FailureFact,
    HolderFact,
    InstanceFact,
    LinkFact,
    SlotsFact,
    decode_fact,
    encode_fact,
    kind_of,
)
from kvrs.gossip.wire import Delta, Entry, RecordDelta
from kvrs.ids import NodeId
from kvrs.protocol.instance import Role
from tests.gossip.gossip_cluster import B, C, GossipCluster

SLOTS = encode_fact(SlotsFact(1, 0.0))
FACTS = (
    InstanceFact(Role.DECODE, 3, 2, 7, 0.25, 900),
    LinkFact(1.25e9, 2e7, 0.5),
    SlotsFact(31, 0.0),
    HolderFact(256 << 20, 1 << 20),
    FailureFact(3, "CUDA error", 1.5),
)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_a_fact_comes_back_as_it_was(fact: Fact) -> None:
    """Encoding loses nothing."""
    assert decode_fact(kind_of(fact), encode_fact(fact)) == fact


@pytest.mark.parametrize(
    "fact",
    [
        SlotsFact(-1, 0.0),
        LinkFact(math.nan, 0.0, 0.0),
        FailureFact(1, "x" * 129, 0.0),
        FailureFact(1, "\u20ac" * 200, 0.0),
    ],
)
def test_an_invalid_fact_is_not_published(fact: Fact) -> None:
    """The writer gets the error."""
    with pytest.raises(GossipError):
        encode_fact(fact)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((FactKind.SLOTS, value) for value in (b"", b"\x90", b"\x92\xa1x\x00", b"\x92\xff\x00")),
        (99, b"of a newer release"),
    ],
)
def test_a_value_that_cannot_be_read_is_counted_and_left_out(kind: int, value: bytes) -> None:
    """A faulty writer does not affect readers, an old value does not pass for the present one, and
    mixed releases work together.
    """
    system = GossipCluster(B, C)
    receive(system, B, 1, Entry(kind, "d0", 1, 0, SLOTS))
    receive(system, B, 2, Entry(kind, "d0", 2, 0, value))
    receive(system, C, 1, Entry(FactKind.SLOTS, "d0", 1, 0, SLOTS))

    assert list(system.node.facts.of(SlotsFact)) == [(C, "d0")]
    assert system.node.facts.unread == (2 if kind == 99 else 1)
    assert {kind for kind, *_ in system.node.facts.all()} == {FactKind.SLOTS}


def receive(system: GossipCluster, owner: NodeId, end: int, entry: Entry) -> None:
    system.handle(B, Delta(1, 0, (), (RecordDelta(owner, 1, end - 1, end, 0, (entry,)),)))
