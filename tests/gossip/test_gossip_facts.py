"""Facts that nodes publish, as decisions read them."""

import math

import pytest

from kvrs.errors import GossipError
from kvrs.gossip.facts import (
    Fact,
    FactKind,
    Facts,
    FailureFact,
    HolderFact,
    InstanceFact,
    LinkFact,
    Report,
    SlotsFact,
    decode_fact,
    encode_fact,
    kind_of,
)
from kvrs.ids import NodeId
from kvrs.protocol.instance import Role

N0, N1 = NodeId("n0"), NodeId("n1")
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


@pytest.mark.parametrize("value", [b"", b"\x90", b"\x92\xa1x\x00", b"\x92\xff\x00"])
def test_a_malformed_value_is_counted_and_left_out(value: bytes) -> None:
    """A faulty writer does not affect readers."""
    facts = Facts()

    facts.put(N0, FactKind.SLOTS, "d0", value, 1.0)

    assert (facts.slots, facts.unread) == ({}, 1)


def test_a_malformed_value_replaces_the_one_before() -> None:
    """An old value must not pass for the present one."""
    facts = Facts()
    facts.put(N0, FactKind.SLOTS, "d0", encode_fact(SlotsFact(1, 0.0)), 1.0)

    facts.put(N0, FactKind.SLOTS, "d0", b"\x00", 2.0)

    assert facts.slots == {}


def test_a_kind_of_a_newer_release_is_left_out() -> None:
    """Mixed releases work together."""
    facts = Facts()

    facts.put(N0, 99, "d0", b"whatever", 1.0)

    assert facts.unread == 1


def test_facts_are_kept_by_publishing_node() -> None:
    """Two nodes may publish facts of one subject, and a dead one takes only its own along."""
    facts = Facts()
    for node in (N0, N1):
        facts.put(node, FactKind.FAILURE, "d7", encode_fact(FACTS[4]), 1.0)
    facts.put(N0, FactKind.INSTANCE, "d0", encode_fact(FACTS[0]), 1.0)

    facts.show(N0, None)

    assert facts.failures == {(N1, "d7"): Report(FACTS[4], 1.0)}
    assert facts.instances == {}
