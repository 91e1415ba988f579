"""New streams while no instance of a role is up: computed by decode instances that can, else
refused soon, with the name of the role.
"""

from typing import Any

import pytest

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.routing import PROMPTS_MAX
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

P0, D0, D1 = (InstanceId(name) for name in ("p0", "d0", "d1"))
A, B = (StreamId(name) for name in "AB")
# As of vLLM.
PLAIN: dict[str, Any] = {"capabilities": frozenset[Any](), "computes_prompts": True}


def vllms(*names: str, **settings: Any) -> PolicyHarness:
    harness = PolicyHarness(**settings)
    for name in names:
        harness.handle(instance_up(name, **PLAIN))
    return harness


def arrive(harness: PolicyHarness, count: int) -> list[act.Action]:
    return [
        action
        for number in range(count)
        for action in harness.handle(ev.StreamArrived(StreamId(f"s{number}"), 100))
    ]


def test_prompts_are_computed_by_decode_instances_while_no_prefill_instance_is_up() -> None:
    """One attempt, of a call for both stages; new ones go to a prefill instance again when there
    is one.
    """
    harness = vllms("p0", "d0")
    harness.lose("p0", at_s=1.0)

    alone = harness.handle(ev.StreamArrived(A, 100))
    harness.handle(ev.PrefillDone(A, 1, 100))
    harness.handle(ev.StreamResumed(A, 1))
    harness.handle(instance_up("p0", 2, **PLAIN))
    again = harness.handle(ev.StreamArrived(B, 100))

    assert only(alone, act.Start) == act.Start(A, 1, act.Plan(decode=D0))
    assert only(again, act.Start) == act.Start(B, 1, act.Plan(decode=D0, prefill=P0))


def test_a_prefill_instance_that_fails_is_no_missing_one() -> None:
    """Decode instances compute prompts only where no prefill instance is up at all."""
    harness = vllms("p0", "d0")
    harness.handle(ev.StreamArrived(A, 100))

    retried = harness.handle(ev.AttemptFailed(A, 1, P0, "broken", 0))
    retried += harness.handle(ev.TimerFired(), 10.0)

    assert [start.plan.prefill for start in of(retried, act.Start)] == [P0]


def test_what_was_at_a_lost_prefill_instance_goes_on_at_a_decode_instance() -> None:
    """The prompt of a stream that had no token yet is computed there."""
    harness = vllms("p0", "d0")
    harness.handle(ev.StreamArrived(A, 100))

    assert only(harness.lose("p0"), act.Start) == act.Start(A, 2, act.Plan(decode=D0))


def test_a_stream_whose_decode_instance_died_is_recomputed_at_another_one() -> None:
    """Without any prefill instance, and however many prompts that one computes."""
    harness = vllms("p0", "d0", "d1")
    harness.decoding("A")
    harness.lose("p0")
    arrive(harness, 2 * PROMPTS_MAX)

    actions = harness.lose("d0", A=10)

    assert [start.plan for start in of(actions, act.Start) if start.stream == A] == [
        act.Plan(decode=D1)
    ]


def test_decode_instances_compute_a_few_prompts_at_a_time() -> None:
    """So that the streams that run there keep their pace; the next ones begin, in their order, as
    soon as others have their first token, or are gone.
    """
    harness = vllms("p0", "d0", "d1")
    harness.lose("p0")

    begun = of(arrive(harness, 2 * PROMPTS_MAX + 3), act.Start)
    first, other, last = begun[0], begun[1], begun[2]
    resumed = of(harness.handle(ev.StreamResumed(first.stream, 1)), act.Start)
    ended = of(harness.handle(ev.StreamEnded(other.stream, 1)), act.Start)
    failed = of(
        harness.handle(ev.AttemptFailed(last.stream, 1, last.plan.decode, "x", 0)), act.Start
    )

    assert [start.stream for start in begun] == [f"s{n}" for n in range(2 * PROMPTS_MAX)]
    assert {start.plan.decode for start in begun} == {D0, D1}
    assert [start.stream for start in resumed] == [f"s{2 * PROMPTS_MAX}"]
    assert [start.stream for start in ended] == [f"s{2 * PROMPTS_MAX + 1}"]
    assert f"s{2 * PROMPTS_MAX + 2}" in [start.stream for start in failed]


def test_interrupted_streams_come_before_new_prompts() -> None:
    """Recomputed streams take the room of new ones at an instance."""
    harness = vllms("p0", "d0")
    for number in range(PROMPTS_MAX):
        harness.decoding(f"v{number}")
    harness.handle(instance_up("d1", **PLAIN))
    harness.lose("p0")
    harness.lose("d0", **{f"v{number}": 5 for number in range(PROMPTS_MAX)})

    waiting = harness.handle(ev.StreamArrived(A, 100))
    begun = harness.handle(ev.StreamResumed(StreamId("v0"), 2))

    assert of(waiting, act.Start) == []
    assert only(begun, act.Start) == act.Start(A, 1, act.Plan(decode=D1))


def test_a_prompt_that_finds_no_room_ends_with_an_error_that_says_why() -> None:
    """After `recovery.wait_s`, as with instances that are busy."""
    harness = vllms("p0", "d0", wait_s=20.0)
    harness.lose("p0")
    arrive(harness, PROMPTS_MAX + 1)

    given_up = only(harness.handle(ev.TimerFired(), 20.0), act.GiveUp)

    assert given_up.stream == f"s{PROMPTS_MAX}"
    assert given_up.reason is act.Reason.NO_INSTANCE
    assert "no prefill instance is up" in given_up.message


def test_prompts_that_wait_for_room_go_to_a_prefill_instance_that_comes_up() -> None:
    harness = vllms("p0", "d0")
    harness.lose("p0")
    arrive(harness, PROMPTS_MAX + 2)

    begun = of(harness.handle(instance_up("p0", 2, **PLAIN)), act.Start)

    assert [start.plan.prefill for start in begun] == [P0, P0]
    assert not harness.policy.has_waiting


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (("p0",), "no prefill instance came up within 5 s"),
        (("d0",), "no decode instance came up within 5 s"),
        (("p0", "d0"), "no instance came up within 5 s"),
    ],
)
def test_a_new_request_is_refused_soon_by_the_name_of_the_role_that_was_lost(
    lost: tuple[str, ...], message: str
) -> None:
    """After `recovery.role_wait_s`: what is started again at once is back by then."""
    harness = PolicyHarness("p0", "d0")
    for name in lost:
        harness.lose(name, at_s=1.0)

    harness.handle(ev.StreamArrived(A, 100), 2.0)
    before = harness.handle(ev.TimerFired(), 6.9)
    given_up = only(harness.handle(ev.TimerFired(), 7.0), act.GiveUp)

    assert of(before, act.GiveUp) == []
    assert (given_up.reason, given_up.message) == (act.Reason.NO_INSTANCE, message)
    assert 5.0 <= given_up.retry_after_s <= 10.0


@pytest.mark.parametrize("up", [(), ("p0",), ("d0",)])
def test_a_role_that_never_was_up_is_waited_for_as_at_the_start(up: tuple[str, ...]) -> None:
    """Proxies come up before their instances."""
    harness = PolicyHarness(*up, wait_s=30.0)
    harness.handle(ev.StreamArrived(A, 100), 1.0)

    early = harness.handle(ev.TimerFired(), 30.0)

    assert of(early, act.GiveUp) == []
    assert only(harness.handle(ev.TimerFired(), 31.0), act.GiveUp).reason is act.Reason.NO_INSTANCE


def test_a_request_that_waited_already_has_its_time_from_the_loss_on() -> None:
    """Not from its arrival: what it waited for was up, and is perhaps back in seconds."""
    harness = PolicyHarness("p0", "d0", wait_s=30.0)
    harness.handle(ev.StreamArrived(A, 100))
    busy = ev.AttemptFailed(
        A, 1, P0, "HTTP 503", 0, failure=ev.FailureKind.BUSY, retry_after_s=10.0
    )
    harness.handle(busy, 0.1)
    harness.handle(ev.StreamEnded(A, 1))
    harness.handle(ev.StreamArrived(B, 100), 1.0)
    harness.lose("p0", at_s=10.0)

    waits = harness.handle(ev.TimerFired(), 14.0)
    begun = harness.handle(instance_up("p0", 2), 18.0)

    assert of(waits, act.GiveUp) == []
    assert only(begun, act.Start).stream == B
