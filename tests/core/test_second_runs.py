"""Second runs of a request at instances without the processor: where, at which price, how often."""

from typing import Any

import pytest

from kvrs.config.policy import PolicyName
from kvrs.core.books.learning import Differences
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.options.replay import REPLAY_S_MAX
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

A = StreamId("A")
EQUAL, OTHER = "greedy:seeded", "other:seeded"


def cut(
    generates: dict[str, str],
    *,
    tokens: int = 40,
    token_s: float = 0.01,
    only_replay: bool = True,
    name: PolicyName = PolicyName.AUTO,
    **resumed: Any,
) -> PolicyHarness:
    """A stream of 100 tokens of prompt has lost d0 with so many tokens of output, of `token_s`
    each; self-tests of the others generate what `generates` says.
    """
    harness = PolicyHarness(name=name)
    for instance, found in {"p0": "", "d0": EQUAL, **generates}.items():
        harness.handle(instance_up(instance, generates=found, capabilities=[]))
    harness.decoding("A", resumed=False)
    harness.handle(ev.StreamResumed(A, 1, needs_replay=True, only_replay=only_replay, **resumed))
    harness.actions.clear()
    harness.lose("d0", at_s=tokens * token_s, A=tokens)
    return harness


def differ(harness: PolicyHarness, same_tokens: int = 5) -> list[act.Action]:
    """The current run generates other output behind so many known tokens."""
    start = of(harness.actions, act.Start)[-1]
    harness.handle(ev.PrefillDone(A, start.attempt, 100))
    harness.actions.clear()
    failed = ev.AttemptFailed(
        *(A, start.attempt, start.plan.decode, "replayed other tokens", 40),
        failure=ev.FailureKind.DIFFERS,
        same_tokens=same_tokens,
    )
    harness.handle(failed)
    harness.look_until(harness.now_s + 2.0)
    return harness.actions


@pytest.mark.parametrize(
    ("theirs", "is_sampled", "runs"),
    [
        (EQUAL, False, True),
        (EQUAL, True, True),
        ("greedy:other", False, True),
        ("greedy:other", True, False),
        (OTHER, False, False),
        ("", False, False),
    ],
    ids=["equal", "equal, sampled", "other seeds", "other seeds, sampled", "other", "untested"],
)
def test_only_an_instance_that_generates_the_same_tokens_runs_again(
    theirs: str, is_sampled: bool, runs: bool
) -> None:
    """By the part of its self-test that the stream depends on."""
    harness = cut({"d1": theirs}, is_sampled=is_sampled)

    started = of(harness.actions, act.Start)
    assert bool(started) is runs
    assert all(start.plan.replays for start in started)


def test_a_stream_that_nothing_may_continue_otherwise_waits_and_ends() -> None:
    """It is given up as inexact after `recovery.wait_s`, and never goes on as text."""
    harness = cut({"d1": OTHER})

    actions = harness.look_until(40.0)

    assert not of(actions, act.Start)
    assert only(actions, act.GiveUp).reason is act.Reason.INEXACT


@pytest.mark.parametrize("name", [PolicyName.AUTO, PolicyName.ALWAYS_RECOMPUTE])
def test_an_equal_instance_is_taken_before_a_nearer_one_that_is_not(name: PolicyName) -> None:
    """Also by a policy that weighs one target alone."""
    harness = cut({"d1": OTHER, "d2": EQUAL, "d3": OTHER}, name=name)

    assert only(harness.actions, act.Start).plan.decode == InstanceId("d2")


def test_a_run_that_differs_is_tried_once_more_elsewhere_and_charges_no_instance() -> None:
    """A near-tie is nobody's fault; two of them end the stream."""
    harness = cut({"d1": EQUAL, "d2": EQUAL})
    first = only(harness.actions, act.Start).plan.decode

    again = only(differ(harness), act.Start)
    assert again.plan.replays
    assert again.plan.decode != first
    assert not of(harness.actions, act.Ejected)

    gave_up = only(differ(harness), act.GiveUp)
    assert gave_up.reason is act.Reason.INEXACT
    for name in ("d1", "d2"):
        assert harness.policy.members[InstanceId(name)].answers.until_s is None


def test_the_only_equal_instance_gets_the_second_try_too() -> None:
    """Another batch may round in another way."""
    harness = cut({"d1": EQUAL})

    assert only(differ(harness), act.Start).plan.decode == InstanceId("d1")


def test_what_may_go_on_inexactly_does_so_behind_two_differences() -> None:
    """Its head is marked: penalties, for example."""
    harness = cut({"d1": EQUAL, "d2": EQUAL}, only_replay=False)
    differ(harness)

    last = only(differ(harness), act.Start)

    assert not last.plan.replays


def test_text_that_is_not_that_of_its_ids_leaves_only_a_second_run() -> None:
    """The shell finds that out when it would continue from the ids."""
    harness = PolicyHarness()
    for name in ("p0", "d0", "d1"):
        generates = "" if name == "p0" else EQUAL
        harness.handle(instance_up(name, generates=generates, capabilities=[]))
    harness.decoding("A")
    harness.actions.clear()
    harness.lose("d0", at_s=0.4, A=40)
    assert not only(harness.actions, act.Start).plan.replays

    assert only(differ(harness), act.Start).plan.replays


def test_a_run_that_takes_too_long_is_not_tried() -> None:
    """`REPLAY_S_MAX` bounds the steps, whatever their number."""
    tokens = 100

    for factor, runs in ((0.9, True), (1.1, False)):
        harness = cut({"d1": EQUAL}, tokens=tokens, token_s=factor * REPLAY_S_MAX / tokens)
        assert bool(of(harness.actions, act.Start)) is runs


def test_a_difference_is_learned_and_raises_the_price() -> None:
    """By the tokens that came again before it; the processor's runs cannot differ."""
    harness = cut({"d1": EQUAL, "d2": EQUAL})
    before = only(harness.actions, act.Recovered)
    chance = harness.policy.state.differences.chance(40)
    found = min(
        (each for each in before.estimates if each.option is Option.REPLAY),
        key=lambda each: each.total_s,
    )
    alone_s = found.queue_s + found.compute_s + found.transfer_s + found.step_s + 40 * 0.01
    assert found.total_s == pytest.approx(alone_s * (1 + chance))

    differ(harness)

    differences = harness.policy.state.differences
    assert (differences.tokens, differences.found) == (6, 1)
    assert differences.chance(40) == pytest.approx(21 * chance, rel=0.01)  # 1.05 for 0.05.


def test_the_chance_of_a_difference_follows_what_was_seen() -> None:
    """A run without one lowers it, and a longer run has a higher one."""
    learned = Differences()
    first = learned.chance(1000)

    learned.note(1_000_000, differed=False)

    assert 0 < learned.chance(1000) < first < learned.chance(1000) + first
    assert learned.chance(0) == 0
    for _ in range(20_000):
        learned.note(1, differed=True)
    assert learned.chance(1000) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("theirs", "is_repeatable", "moves"),
    [(EQUAL, True, True), (OTHER, True, False), (EQUAL, False, False)],
    ids=["equal", "other", "drawn tokens"],
)
def test_a_drain_moves_a_stream_only_where_it_can_go_on(
    theirs: str, is_repeatable: bool, moves: bool
) -> None:
    """The drained instance lives, so a stream that no other one continues ends there."""
    harness = PolicyHarness()
    for instance, found in {"p0": "", "d0": EQUAL, "d1": theirs}.items():
        harness.handle(instance_up(instance, generates=found, capabilities=[]))
    home = harness.decoding("A", resumed=False).plan.decode
    resumed = ev.StreamResumed(
        A, 1, needs_replay=True, only_replay=True, is_repeatable=is_repeatable
    )
    harness.handle(resumed)
    harness.actions.clear()

    harness.handle(ev.DrainOrdered(home, True, {A: 40}, cause="an operator"), at_s=1.0)
    harness.look_until(40.0)

    moved = {start.stream: start.plan for start in of(harness.actions, act.Start)}
    assert (A in moved) is moves
    assert not moves or moved[A].replays
    assert not of(harness.actions, act.GiveUp)
    assert (A in {halt.stream for halt in of(harness.actions, act.Halt)}) is moves
