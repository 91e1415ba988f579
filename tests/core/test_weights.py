"""Which weights count as right, by the table and the rules of `self_tests.py`."""

import pytest

from kvrs.core.fleet.self_tests import Comparison, RightWeights, Standing, Vote, compare
from kvrs.core.fleet.tested import Continues, Generated
from kvrs.ids import InstanceId

A = Vote(Generated((1, 2, 3), (4, 5, 6), Continues.SEEDED))
B = Vote(Generated((1, 2, 9), (4, 5, 6), Continues.SEEDED))
C = Vote(Generated((7, 2, 3), (4, 5, 6), Continues.SEEDED))


def known(configured: int = 3, choice: RightWeights | None = None, **votes: Vote) -> Comparison:
    named = {InstanceId(name): vote for name, vote in votes.items()}
    return compare(named, choice or RightWeights(), configured)


def standings(compared: Comparison) -> str:
    """The standings of A, B, C and a process that has shown nothing, by their first letters."""
    return "".join(compared.standing(vote).value[0] for vote in (A, B, C, Vote()))


WAS_A, WAS_B = RightWeights(A.marks), RightWeights(B.marks)
ORDERED_B = RightWeights(B.marks, 1.0)


@pytest.mark.parametrize(
    ("configured", "choice", "votes", "found"),
    [
        (3, None, {}, "nnnn"),
        (3, None, {"d0": A}, "nnnn"),  # One of three is no majority.
        (1, None, {"d0": A}, "roou"),
        (2, None, {"d0": A, "d1": B}, "nnnn"),  # Each serves what begins there.
        (3, None, {"d0": A, "d1": A}, "roou"),
        (3, None, {"d0": A, "d1": A, "d2": B}, "roou"),
        (2, WAS_A, {"d0": A, "d1": B}, "roou"),  # One of two was changed.
        (2, WAS_A, {"d0": B, "d1": B}, "oro" + "u"),  # Both were.
        (3, WAS_A, {"d0": A, "d1": B, "d2": C}, "roou"),
        (4, WAS_A, {"d0": B, "d1": B, "d2": C, "d3": C}, "ruuu"),  # None has shown what was right.
        (5, WAS_A, {"d0": A, "d1": B, "d2": B}, "oro" + "u"),
        (3, ORDERED_B, {"d0": A, "d1": A, "d2": B}, "oro" + "u"),
        (3, ORDERED_B, {"d0": A, "d1": A}, "roou"),  # What was chosen is gone.
    ],
)
def test_the_weights_of_most_instances_are_right(
    configured: int, choice: RightWeights | None, votes: dict[str, Vote], found: str
) -> None:
    assert standings(known(configured, choice, **votes)) == found


def of(vote: Vote, digest: str, version: str = "0.32") -> Vote:
    return Vote(vote.generated, digest, version)


def test_equal_digests_stand_above_tokens_of_two_versions() -> None:
    """A newer engine that rounds otherwise has no other weights."""
    compared = known(d0=of(A, "x"), d1=of(A, "x"), d2=of(B, "x", "0.33"))

    assert compared.standing(of(B, "x", "0.33")) is Standing.RIGHT
    assert compared.differs
    assert known(d0=of(A, "x"), d1=of(A, "x"), d2=of(B, "x")).standing(of(B, "x")) is Standing.OTHER


def test_digests_that_differ_stand_above_equal_tokens() -> None:
    compared = known(d0=of(A, "x"), d1=of(A, "x"), d2=of(A, "y"))

    assert compared.standing(of(A, "y")) is Standing.OTHER
    assert compared.standing(Vote(digest="y")) is Standing.OTHER  # Before its first token.
    assert compared.standing(Vote(digest="x")) is Standing.RIGHT


def test_the_digests_of_engines_that_have_ended_still_count() -> None:
    """At a proxy that was started behind their end, and has seen none of their tokens."""
    compared = known(d0=Vote(digest="x"), d1=Vote(digest="x"), d2=of(B, "y"))

    assert compared.standing(of(B, "y")) is Standing.OTHER


def test_another_proxys_choice_decides_between_equally_many() -> None:
    assert standings(known(3, WAS_B, d0=A, d1=B)) == "orou"


def test_what_a_peer_knows_is_right_doubts_what_has_shown_nothing_yet() -> None:
    """At a proxy that was started a moment ago, and has tested no instance."""
    assert standings(known(3, WAS_A)) == "ruuu"
