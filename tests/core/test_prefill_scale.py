"""The scale of guessed prefill tables, learned from prefills."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.core.books.prefills import ENOUGH_PREFILLS, MOST, PrefillScale
from kvrs.core.model import events as ev
from kvrs.core.model.member import Member
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from tests.core.policy_harness import TABLE, PolicyHarness, instance_up, member

# 10 ms for each step, and 1 ms for each token.
GUESS = PrefillTable(
    "guess", "made up", 100, [0.01, 0.11, 0.21], covered_to_tokens=0, is_guess=True
)


def guessed(name: str = "p0") -> Member:
    return member(name, prefill=GUESS)


def seen(scale: PrefillScale, at: Member, took_s: float, *, tokens: int = 1000) -> None:
    """One prompt alone, from second 0 on."""
    scale.began(at, StreamId("A"), 0.0, is_whole=True)
    scale.done(at, StreamId("A"), tokens, took_s)


def test_a_table_that_is_no_guess_is_never_changed() -> None:
    scale, measured = PrefillScale(), member("p0")

    for _ in range(20):
        seen(scale, measured, 7.0)

    assert (scale.factor, scale.prefills, scale.snapshot()) == (1.0, 0, None)


def test_prompts_that_come_alone_give_their_own_ratio() -> None:
    """A GPU that takes a quarter of the time that was guessed."""
    scale, at = PrefillScale(), guessed()

    for _ in range(ENOUGH_PREFILLS):
        seen(scale, at, GUESS.seconds_for(1000) / 4)

    assert scale.factor == pytest.approx(0.25)
    assert scale.is_learned


def test_tokens_that_were_cached_take_no_time() -> None:
    """Nine tenths of each prompt, at a GPU that is as fast as was guessed."""
    scale, at = PrefillScale(), guessed()

    for _ in range(ENOUGH_PREFILLS):
        scale.began(at, StreamId("A"), 0.0, is_whole=True)
        scale.done(at, StreamId("A"), 1000, GUESS.seconds_for(100), 900)

    assert scale.factor == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("ends_s", [[0.5, 1.0, 1.5], [1.5, 1.5, 1.5]])
def test_prompts_that_queue_or_share_steps_are_one_sample(ends_s: list[float]) -> None:
    """Three prompts of one second each by the guess, in turn or in one batch: half of that."""
    scale, at = PrefillScale(), guessed()
    tokens = 990  # One second.

    for stream in "ABC":
        scale.began(at, StreamId(stream), 0.0, is_whole=True)
    for stream, end_s in zip("ABC", ends_s, strict=True):
        scale.done(at, StreamId(stream), tokens, end_s)

    assert scale.factor == pytest.approx(0.5)
    assert scale.prefills == 3


def test_an_instance_that_is_never_idle_teaches_too() -> None:
    """One prompt comes before the last one ends, for ever: half of what was guessed."""
    scale, at = PrefillScale(), guessed()
    scale.began(at, StreamId("0"), 0.0, is_whole=True)

    for number in range(1, 100):
        scale.began(at, StreamId(str(number)), 0.5 * number - 0.1, is_whole=True)
        scale.done(at, StreamId(str(number - 1)), 990, 0.5 * number)

    assert scale.factor == pytest.approx(0.5, rel=0.05)
    assert scale.is_learned


def test_single_periods_that_are_out_of_the_way_do_not_count() -> None:
    """A cold start, and a prompt that was in the prefix cache."""
    scale, at = PrefillScale(), guessed()

    for took_s in (60.0, 2.0, 2.0, 0.01, 2.0, 2.0, 0.01):
        seen(scale, at, took_s, tokens=990)

    assert scale.factor == pytest.approx(2.0)


@pytest.mark.parametrize("tokens", [1, 5])
def test_prompts_that_take_one_steps_overhead_teach_nothing(tokens: int) -> None:
    """Their time is that of the way to the engine, whatever its GPU is."""
    scale, at = PrefillScale(), guessed()

    seen(scale, at, 3.0, tokens=tokens)

    assert (scale.factor, scale.prefills) == (1.0, 0)


def test_an_attempt_that_fails_or_finds_kv_there_spoils_its_period() -> None:
    """How much was computed is not known: nothing is learned, and the next period is whole."""
    scale, at = PrefillScale(), guessed()

    scale.began(at, StreamId("A"), 0.0, is_whole=True)
    scale.began(at, StreamId("B"), 0.0, is_whole=True)
    scale.left(at, StreamId("A"), 1.0)
    scale.done(at, StreamId("B"), 990, 9.0)
    scale.began(at, StreamId("C"), 10.0, is_whole=False)
    scale.done(at, StreamId("C"), 990, 10.1)
    assert scale.prefills == 0

    seen(scale, at, 0.5, tokens=990)
    assert scale.factor == pytest.approx(0.5)


@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=30))
def test_the_factor_never_leaves_its_bounds(took_s: list[float]) -> None:
    scale, at = PrefillScale(), guessed()

    for each in took_s:
        seen(scale, at, each)

    assert 1 / MOST <= scale.factor <= MOST


def decoded(policy: PolicyHarness, name: str, at_s: float, took_s: float) -> None:
    """A stream alone in the cluster, whose prompt of 990 tokens takes so long."""
    stream = StreamId(name)
    policy.handle(ev.StreamArrived(stream, 990), at_s)
    policy.handle(ev.PrefillDone(stream, 1, 990), at_s + took_s)
    policy.handle(ev.StreamResumed(stream, 1))
    policy.handle(ev.StreamEnded(stream, 1))


def test_what_the_proxy_sees_corrects_the_predictions_of_all_instances() -> None:
    """Prefills are seen at prefill; recomputing at decode is predicted by the same factor. The mark
    goes after enough of them, and a new process has the corrected table at once.
    """
    policy = PolicyHarness()
    for name in ("p0", "d0", "d1"):
        policy.handle(instance_up(name, prefill=GUESS))
    members = policy.policy.members
    assert all(each.times.table.is_guess for each in members.values())

    for number in range(ENOUGH_PREFILLS):
        decoded(policy, f"s{number}", 10.0 * number, 0.25)

    assert [
        members[InstanceId(name)].times.table.seconds_for(990) for name in ("p0", "d0", "d1")
    ] == (pytest.approx([0.25, 0.25, 0.25]))
    assert not any(each.times.table.is_guess for each in members.values())
    policy.lose("d1")
    policy.handle(instance_up("d1", epoch=2, prefill=GUESS))
    assert members[InstanceId("d1")].times.table.seconds_for(990) == pytest.approx(0.25)
    assert policy.policy.snapshot()["prefill_guess"] == {
        "label": "guess",
        "is_guess": False,
        "factor": pytest.approx(0.25),
        "prefills": ENOUGH_PREFILLS,
        "least_share": 1.0,
    }


def test_measured_tables_stay_as_they_are() -> None:
    policy = PolicyHarness("p0", "d0")

    for number in range(20):
        decoded(policy, f"s{number}", 10.0 * number, 7.0)

    assert policy.policy.members[InstanceId("p0")].times.table is TABLE
    assert policy.policy.snapshot()["prefill_guess"] is None


# A table that the settings name, where the instances declare another one.
NAMED = replace(GUESS, label="named", is_guess=False)


def test_a_named_table_is_corrected_after_enough_periods() -> None:
    """One of another machine or version; until then it counts as it is, and never as a guess."""
    policy = PolicyHarness()
    for name in ("p0", "d0"):
        policy.handle(instance_up(name, prefill=NAMED))
    there = policy.policy.members[InstanceId("p0")]

    known = []
    for number in range(ENOUGH_PREFILLS):
        decoded(policy, f"s{number}", 10.0 * number, 0.25)
        known.append(there.times.table.seconds_for(990))

    assert known == pytest.approx([1.0] * (ENOUGH_PREFILLS - 1) + [0.25])
    assert not there.times.has_guess
    shown = policy.policy.snapshot()["prefill_guess"]
    assert (shown["label"], shown["is_guess"], shown["factor"]) == (
        "named",
        False,
        pytest.approx(0.25),
    )


def test_one_period_of_many_prefills_corrects_no_named_table() -> None:
    """The first burst after a start compiles kernels."""
    scale, at = PrefillScale(), member("p0", prefill=NAMED)
    scale.up(at)

    for number in range(ENOUGH_PREFILLS):
        scale.began(at, StreamId(str(number)), 0.0, is_whole=True)
    for number in range(ENOUGH_PREFILLS):
        scale.done(at, StreamId(str(number)), 990, 50.0)
    scale.tune(at)

    assert scale.is_learned
    assert at.times.table is NAMED


def test_tables_are_scaled_anew_only_where_the_factor_has_moved() -> None:
    """Once for all instances: the table of a profile has thousands of times."""
    scale, members = PrefillScale(), [member(name, prefill=NAMED) for name in ("p0", "p1")]
    for each in members:
        scale.up(each)

    moved = []
    for took_s in (2.0,) * (ENOUGH_PREFILLS + 1) + (2.1,) * 20 + (2.5,) * 20:
        scale.began(members[0], StreamId("A"), 0.0, is_whole=True)
        moved.append(scale.done(members[0], StreamId("A"), 990, took_s))
    for each in members:
        scale.tune(each)

    assert sum(moved) == 3  # The first one, the one that makes it sure, and one of the last.
    assert members[0].times.table is members[1].times.table
    assert members[0].times.table.seconds_for(990) == pytest.approx(2.5)


def test_nothing_is_left_of_streams_that_ended_before_their_prefill() -> None:
    """The client has left, the instance is lost, or the attempt has failed."""
    policy = PolicyHarness()
    for name in ("p0", "d0"):
        policy.handle(instance_up(name, prefill=GUESS))
    for name in "ABC":
        policy.handle(ev.StreamArrived(StreamId(name), 990))

    policy.handle(ev.StreamEnded(StreamId("A"), 1))
    policy.handle(ev.AttemptFailed(StreamId("B"), 1, InstanceId("p0"), "reset", 0, abrupt=False))
    policy.lose("p0")
    policy.handle(ev.StreamEnded(StreamId("B"), 2))
    policy.handle(ev.StreamEnded(StreamId("C"), 1))

    assert not policy.policy.state.prefill_scale._periods
    assert policy.policy.snapshot()["prefill_guess"]["prefills"] == 0
