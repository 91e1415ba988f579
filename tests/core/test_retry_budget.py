"""Retries of one proxy as a share of its starts, and instances that restart in a loop."""

from itertools import pairwise
from typing import Any

import pytest

from kvrs.core.books.waiting import LEAST_RETRY_TOKENS, RETRY_REFILL_S, RETRY_SHARE, RetryBudget
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

D0 = InstanceId("d0")


def wakes(harness: PolicyHarness, until_s: float) -> list[act.Start]:
    """Fire timers as they are asked for; the attempts that begin."""
    starts = of(harness.handle(ev.TimerFired()), act.Start)
    while True:
        at_s = [each.at_s for each in of(harness.actions, act.WakeAt) if each.at_s > harness.now_s]
        if not at_s or min(at_s) > until_s:
            return starts
        starts += of(harness.handle(ev.TimerFired(), min(at_s)), act.Start)


def test_retries_stay_below_a_share_of_starts_and_a_floor() -> None:
    """Over any time: the bucket, its refill, and a fifth of the starts."""
    budget, taken, at_s = RetryBudget(), 0, 0.0
    for step in range(10_000):
        at_s = step * 0.01
        budget.started(50, at_s)
        taken += budget.take_spare(50, at_s)

    assert (
        taken
        <= LEAST_RETRY_TOKENS + LEAST_RETRY_TOKENS * at_s / RETRY_REFILL_S + RETRY_SHARE * 10_000
    )
    assert taken > 0.9 * (LEAST_RETRY_TOKENS * at_s / RETRY_REFILL_S + RETRY_SHARE * 10_000)


def test_all_victims_of_a_loss_go_on_at_once() -> None:
    """The bucket holds a token for each open stream."""
    harness = PolicyHarness("p0", "d0")
    for n in range(300):
        harness.decoding(f"s{n}")
        harness.now_s += 0.1
    harness.add("d1", "d2")

    before = harness.policy.snapshot()["instances"]
    harness.lose("d0")

    victims = next(row["decode_streams"] for row in before if row["id"] == D0)
    assert victims > LEAST_RETRY_TOKENS
    retries = harness.policy.snapshot()["retries"]
    assert (retries["delayed"], retries["used"]) == (0, victims)


def test_streams_that_fail_again_and_again_wait_and_none_is_lost() -> None:
    """An avalanche: every attempt fails for a second, and the survivors are not overrun."""
    harness = PolicyHarness("p0", "d0", max_attempts=100)
    for n in range(90):
        harness.decoding(f"s{n}")
    harness.add("d1", "d2")
    attempts = of(harness.lose("d0", **{f"s{n}": 1 for n in range(90)}), act.Start)
    tries = len(attempts)
    while harness.now_s < 1.0:
        again: list[act.Start] = []
        for start in attempts:
            failed = ev.AttemptFailed(start.stream, start.attempt, start.plan.decode, "reset", 1)
            again += of(harness.handle(failed), act.Start)
        attempts = again + wakes(harness, harness.now_s + 0.02)
        tries += len(attempts)
        harness.now_s += 0.02

    assert tries < LEAST_RETRY_TOKENS + LEAST_RETRY_TOKENS / RETRY_REFILL_S + 90 * RETRY_SHARE
    assert of(harness.actions, act.GiveUp) == []

    back: set[StreamId] = set()
    for start in attempts + wakes(harness, 60.0):
        harness.handle(ev.StreamResumed(start.stream, start.attempt))
        back.add(start.stream)
    assert back == {f"s{n}" for n in range(90)}


def test_a_request_that_has_not_begun_may_be_refused_and_keeps_no_token_from_others() -> None:
    """A quarter of the bucket is for streams that have begun."""
    harness = PolicyHarness("p0", "p1", "d0", "d1", max_attempts=100, wait_s=2.0)
    harness.decoding("flows")
    again = 0
    for n in range(200):
        name = StreamId(f"s{n}")
        start = only(harness.handle(ev.StreamArrived(name, 100)), act.Start)
        prefill = start.plan.prefill
        assert prefill is not None
        failed = ev.AttemptFailed(name, 1, prefill, "HTTP 500", 0)
        again += len(of(harness.handle(failed), act.Start))
        harness.handle(ev.StreamEnded(name, 1 if start.attempt == 1 else 2))
        harness.handle(ev.StreamEnded(name, 2))

    recovered = of(harness.lose("d0", flows=1) + harness.lose("d1", flows=1), act.Start)

    assert again < 0.75 * LEAST_RETRY_TOKENS + 200 * RETRY_SHARE + 1
    assert "flows" in [start.stream for start in recovered]


def test_an_instance_that_restarts_in_a_loop_waits_longer_each_time() -> None:
    """Others get the work meanwhile; the state says why."""
    harness = PolicyHarness("p0", "d0", "d1", "d2")
    paused_s = []
    for epoch in range(1, 7):
        harness.lose("d0", epoch)
        harness.now_s += 1.0
        harness.handle(instance_up("d0", epoch + 1))
        row = next(r for r in harness.policy.snapshot()["instances"] if r["id"] == D0)
        paused_s.append(row["health"]["paused_s"])
        assert row["health"]["quick_deaths"] == epoch

    assert paused_s[0] == 0.0
    assert 1.0 <= paused_s[1] <= 1.25
    assert all(1.5 < after / before < 2.6 for before, after in pairwise(paused_s[1:]))
    assert harness.decoding("A").plan.decode != D0


def test_a_process_that_waits_for_work_lives_from_the_end_of_its_pause_on() -> None:
    """It had nothing to do before: a death soon after is still one of many."""
    harness = PolicyHarness("p0", "d0", "d1")
    for epoch in range(1, 6):
        harness.lose("d0", epoch)
        harness.handle(instance_up("d0", epoch + 1))
    row = next(r for r in harness.policy.snapshot()["instances"] if r["id"] == D0)
    paused_s = row["health"]["paused_s"]

    harness.now_s += paused_s + 5.0
    harness.lose("d0", 6)
    harness.handle(instance_up("d0", 7))

    row = next(r for r in harness.policy.snapshot()["instances"] if r["id"] == D0)
    assert (paused_s > 5.0, row["health"]["quick_deaths"]) == (True, 6)


def test_an_instance_that_has_lived_for_a_while_is_in_no_loop() -> None:
    """One death after a long life is not one of many."""
    harness = PolicyHarness("p0", "d0", "d1")
    for epoch in range(1, 9):
        harness.now_s += 100.0
        harness.lose("d0", epoch)
        harness.handle(instance_up("d0", epoch + 1))

    row = next(r for r in harness.policy.snapshot()["instances"] if r["id"] == D0)
    assert (row["health"]["quick_deaths"], row["health"]["paused_s"]) == (0, 0.0)


def health(harness: PolicyHarness, name: str) -> Any:
    rows = harness.policy.snapshot()["instances"]
    return next(row["health"] for row in rows if row["id"] == name)


def killed_in_turn(*names: str) -> PolicyHarness:
    """Each instance dies six times, a few seconds after it has come up, and is back 1 s later."""
    harness = PolicyHarness("p0", "d0", "d1", "d2")
    for epoch in range(1, 7):
        for name in names:
            harness.now_s += 2.0
            harness.lose(name, epoch)
            harness.now_s += 1.0
            harness.handle(instance_up(name, epoch + 1))
    return harness


def test_no_instance_is_paused_where_all_die_alike() -> None:
    """A pause would only gather all streams at those that are left, for the next death."""
    harness = killed_in_turn("d0", "d1", "d2")

    found = [health(harness, name) for name in ("d0", "d1", "d2")]
    assert [(each["paused_s"], each["quick_deaths"]) for each in found] == [(0.0, 1)] * 3
    used = {harness.decoding(f"s{n}").plan.decode for n in range(3)}
    assert used == {"d0", "d1", "d2"}


def test_two_instances_in_a_loop_are_paused_beside_one_that_lives() -> None:
    harness = killed_in_turn("d0", "d1")

    assert all(health(harness, name)["paused_s"] > 5.0 for name in ("d0", "d1"))
    assert {harness.decoding(f"s{n}").plan.decode for n in range(3)} == {"d2"}


def test_a_loop_is_counted_anew_once_all_others_have_died() -> None:
    """The next two deaths that another instance outlives begin a row again."""
    harness = killed_in_turn("d0")
    harness.lose("d1")
    harness.handle(instance_up("d1", 2))
    harness.lose("d2")
    harness.handle(instance_up("d2", 2))
    counts = []

    for epoch in range(7, 10):
        harness.lose("d0", epoch)
        harness.now_s += 1.0
        harness.handle(instance_up("d0", epoch + 1))
        counts.append(health(harness, "d0")["quick_deaths"])

    assert counts == [1, 2, 3]
    assert health(harness, "d0")["paused_s"] >= 2.0


def test_an_empty_bucket_of_100_is_full_again_after_10_s() -> None:
    """The next token comes after a tenth of a second, and those before are paid back."""
    budget = RetryBudget()

    waits_s = [budget.take(50, 0.0) for _ in range(102)]

    assert waits_s == [0.0] * 100 + [pytest.approx(0.1), pytest.approx(0.2)]
    waits_s = [budget.take(50, 10.2) for _ in range(101)]
    assert waits_s[-2:] == pytest.approx([0.0, 0.1], abs=1e-9)


def test_five_starts_allow_one_more_retry() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.take(50, 0.0)

    for _ in range(5):
        budget.started(50, 0.0)

    assert budget.take(50, 0.0) == pytest.approx(0.0, abs=1e-9)
    assert budget.take(50, 0.0) == pytest.approx(0.1)


def test_requests_that_have_not_begun_get_three_quarters_of_the_bucket() -> None:
    """The rest is for those that have."""
    budget = RetryBudget()

    granted = [budget.take_spare(50, 0.0) for _ in range(100)]

    assert granted == [True] * 75 + [False] * 25
    assert [budget.take(50, 0.0) for _ in range(25)] == [0.0] * 25


@pytest.mark.parametrize(("lived_s", "quick_deaths"), [(9.0, 1), (11.0, 0)])
def test_a_death_within_ten_seconds_of_coming_up_is_a_quick_one(
    lived_s: float, quick_deaths: int
) -> None:
    harness = PolicyHarness("p0", "d0", "d1")

    harness.lose("d0", at_s=lived_s)
    harness.handle(instance_up("d0", 2))

    row = next(r for r in harness.policy.snapshot()["instances"] if r["id"] == D0)
    assert row["health"]["quick_deaths"] == quick_deaths


def test_a_request_that_has_not_begun_asks_for_a_token_two_to_four_times_a_second() -> None:
    """Jitter keeps those apart that were refused together."""
    waits_s = []
    for n in range(40):
        harness = PolicyHarness("p0", "d0", "p1", "d1")
        name = StreamId(f"s{n}")
        start = only(harness.handle(ev.StreamArrived(name, 100)), act.Start)
        assert start.plan.prefill is not None
        for _ in range(100):
            harness.policy.state.retries.take(1, 0.0)
        harness.handle(ev.AttemptFailed(name, 1, start.plan.prefill, "HTTP 500", 0))
        waits_s.append(only(harness.actions, act.WakeAt).at_s)

    assert all(0.25 <= each <= 0.5 for each in waits_s)
