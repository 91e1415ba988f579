"""New requests are refused by their predicted wait, before the engines drown."""

from dataclasses import replace
from typing import Any

import pytest

from kvrs.config.policy import AdmissionSettings, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only

P0, D0, D1 = InstanceId("p0"), InstanceId("d0"), InstanceId("d1")
A, B = StreamId("A"), StreamId("B")
BOUND = AdmissionSettings(wait_s=10.0)
SHORT = AdmissionSettings(wait_s=4.1)  # Of ten prompts of 400 tokens, at 0.4 s each.


def arrived(name: str, tokens: int = 100, **deadlines: float) -> ev.StreamArrived:
    return ev.StreamArrived(StreamId(name), tokens, deadlines=ev.Deadlines(**deadlines))


def test_a_request_that_would_wait_for_too_long_is_refused() -> None:
    """It is told to come back when the queue is short enough; with jitter, at most twice that."""
    harness = PolicyHarness("p0", "d0", admission=BOUND)
    harness.handle(load(P0, 14.0))

    refused = only(harness.handle(arrived("A")), act.GiveUp)

    assert refused.reason is act.Reason.OVERLOADED
    assert 4.0 <= refused.retry_after_s <= 8.0


def test_the_wait_at_the_decode_instance_counts() -> None:
    """Both roles have a queue, and the first token passes through both."""
    harness = PolicyHarness("p0", "d0", admission=BOUND)
    harness.handle(load(P0, 6.0))
    harness.handle(load(D0, 6.0))

    assert only(harness.handle(arrived("A")), act.GiveUp).reason is act.Reason.OVERLOADED


def test_what_this_proxy_has_just_sent_counts() -> None:
    """A burst between two reports of the engines is bounded as well: 11 fill it."""
    harness = PolicyHarness("p0", "d0", admission=SHORT)

    actions = [action for n in range(20) for action in harness.handle(arrived(f"s{n}", 400))]

    assert (len(of(actions, act.Start)), len(of(actions, act.GiveUp))) == (11, 9)


def test_a_request_that_the_queue_makes_late_is_refused() -> None:
    """Its client would not wait for the token that an engine would compute for it."""
    harness = PolicyHarness("p0", "d0", admission=BOUND)
    harness.handle(load(P0, 3.0))

    late = only(harness.handle(arrived("A", ttft_s=2.0)), act.GiveUp)

    assert late.reason is act.Reason.OVERLOADED
    assert "2 s to the first token" in late.message
    assert only(harness.handle(arrived("B", ttft_s=4.0)), act.Start)


def test_a_request_that_would_be_late_in_any_case_is_not_sent_away_to_wait() -> None:
    """To come back later helps only where the queue is what makes it late."""
    harness = PolicyHarness("p0", "d0", admission=BOUND)
    harness.handle(load(P0, 0.1))

    assert only(harness.handle(arrived("A", 4000, ttft_s=1.0)), act.Start)


def test_a_stream_that_has_begun_is_never_refused() -> None:
    """Recoveries go before new requests: their clients have waited already."""
    harness = PolicyHarness("p0", "d0", "d1", admission=BOUND)
    start = harness.decoding("A")
    for each in (P0, D0, D1):
        harness.handle(load(each, 60.0))

    actions = harness.lose(str(start.plan.decode), at_s=1.0, A=3)

    assert only(actions, act.Start).stream == A
    assert only(harness.handle(arrived("B")), act.GiveUp).reason is act.Reason.OVERLOADED


def test_a_request_that_was_taken_is_tried_again() -> None:
    """Its first instance failed it; the queue of the next one is no reason to refuse it now."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", admission=BOUND)
    start = only(harness.handle(arrived("A")), act.Start)
    assert start.plan.prefill is not None
    for name in ("p0", "p1"):
        harness.handle(load(name, 60.0))

    again = harness.handle(ev.AttemptFailed(A, 1, start.plan.prefill, "HTTP 500", 0, abrupt=False))

    assert only(again, act.Start).attempt == 2


# A thousand tokens take a second.
GUESS = PrefillTable("guess", "made up", 100, [0.001, 0.1, 0.2], covered_to_tokens=0, is_guess=True)


def measure(harness: PolicyHarness, took_s: list[float], tokens: int = 1000) -> None:
    """Prefills of a second each by the guess, one after the other, that take so long."""
    for number, seconds in enumerate(took_s):
        name = StreamId(f"measured-{number}")
        harness.handle(arrived(name, tokens))
        harness.handle(ev.PrefillDone(name, 1, tokens, 0), harness.now_s + seconds)
        harness.handle(ev.StreamResumed(name, 1))
        harness.handle(ev.StreamEnded(name, 1))


def guessing(**settings: Any) -> PolicyHarness:
    harness = PolicyHarness(admission=BOUND, **settings)
    harness.handle(instance_up("p0", prefill=GUESS))
    harness.handle(instance_up("d0", prefill=GUESS))
    return harness


@pytest.mark.parametrize("prefills", [0, 8])
def test_a_table_that_the_settings_name_refuses_before_and_after_it_is_scaled(
    prefills: int,
) -> None:
    """It was measured somewhere: 100 s of work are too long by it, and by its correction."""
    harness = PolicyHarness(admission=BOUND)
    for name in ("p0", "d0"):
        harness.handle(instance_up(name, prefill=replace(GUESS, label="named", is_guess=False)))
    measure(harness, [0.5] * prefills)

    harness.handle(arrived("long", 100_000))

    assert only(harness.handle(arrived("A")), act.GiveUp).reason is act.Reason.OVERLOADED


@pytest.mark.parametrize("prefills", [0, 7])
def test_a_guess_refuses_nobody(prefills: int) -> None:
    """The engine may be faster by any factor, and would have served the request."""
    harness = guessing(slo=SloSettings(abort=True))
    measure(harness, [1.0] * prefills)

    harness.handle(arrived("long", 100_000))

    assert only(harness.handle(arrived("A")), act.Start)
    assert only(harness.handle(arrived("B", ttft_s=2.0)), act.Start)


def test_a_table_that_was_learned_refuses_as_a_measured_one_does() -> None:
    harness = guessing()
    measure(harness, [1.0] * 8)

    harness.handle(arrived("long", 100_000))

    assert only(harness.handle(arrived("A")), act.GiveUp).reason is act.Reason.OVERLOADED


def test_the_spread_of_learned_times_counts_for_the_request() -> None:
    """Prefills that took 0.2 to 2 times as long as the median predict a wait that may be short."""
    took_s = [0.2, 0.2, 0.2, 1.0, 1.0, 2.0, 2.0, 2.0]
    spread, even = guessing(), guessing()
    measure(spread, took_s)
    measure(even, [1.0] * 8)

    for harness in (spread, even):
        harness.handle(arrived("long", 20_000))

    assert only(spread.handle(arrived("A")), act.Start)
    assert only(even.handle(arrived("A")), act.GiveUp)
    for harness in (spread, even):
        harness.handle(arrived("longer", 90_000))
    assert only(spread.handle(arrived("B")), act.GiveUp)
