"""Victims of one event share the compute time of the target that they go to."""

from kvrs.config.policy import PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import NodeId
from tests.core.policy_harness import PolicyHarness, instance_up, of

PROMPT_TOKENS = 321
# A token takes as long on the link as in a prefill: to compute the front meanwhile halves the time.
BYTES_PER_S = 2e6


def recoveries(
    victims: int, *targets: str, name: PolicyName = PolicyName.AUTO, gather_s: float = 0.0
) -> list[act.Recovered]:
    """`d0` is lost with so many streams, whose KV is at `p0` across a slow link."""
    harness = PolicyHarness("p0", "d0", name=name, gather_s=gather_s)
    for number in range(victims):
        harness.decoding(f"s{number}", PROMPT_TOKENS)
    for target in targets:
        harness.handle(instance_up(target))
        harness.handle(ev.LinkMeasured(NodeId("n0"), instance_up(target).info.node, BYTES_PER_S))
    harness.lose("d0")
    return of(harness.actions, act.Recovered)


def test_one_victim_splits_and_the_first_of_many_does_not() -> None:
    """The other victims all wait for what the target computes for the first."""
    assert recoveries(1, "d1")[0].option is Option.SPLIT
    assert recoveries(8, "d1")[0].option is Option.MIGRATE


def test_victims_that_have_a_target_each_are_decided_as_if_alone() -> None:
    """Only those that come to the same target wait for each other: two of them, and 8 targets."""
    targets = [f"d{number}" for number in range(1, 9)]

    assert [each.option for each in recoveries(2, *targets)] == [Option.SPLIT, Option.SPLIT]
