"""Instances between which NIXL can carry no hand-off: other pairs are used, or decode computes the
prompt itself.
"""

from typing import Any

import pytest

from kvrs.config.policy import Handoff
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, load, only

P0, P1, D0, D1 = (InstanceId(name) for name in ("p0", "p1", "d0", "d1"))
A, B = (StreamId(name) for name in "AB")
PLAIN: dict[str, Any] = {"capabilities": frozenset[Any](), "computes_prompts": True}


def vllms(formats: dict[str, str], **settings: Any) -> PolicyHarness:
    harness = PolicyHarness(**settings)
    for name, each in formats.items():
        harness.handle(instance_up(name, hand_off_format=each, **PLAIN))
    return harness


def plan_of(harness: PolicyHarness, stream: StreamId = A) -> act.Plan:
    return only(harness.handle(ev.StreamArrived(stream, 100)), act.Start).plan


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("hash x", "hash x"), ("", "hash x"), ("hash x", ""), ("hash x", "cache_dtype auto")],
)
def test_formats_that_are_equal_or_cannot_be_compared_are_no_hindrance(
    prefill: str, decode: str
) -> None:
    harness = vllms({"p0": prefill, "d0": decode, "d1": prefill})

    assert plan_of(harness) == act.Plan(decode=D0, prefill=P0)


def test_another_decode_instance_takes_what_the_own_one_cannot_read() -> None:
    harness = vllms({"p0": "hash x", "d0": "hash y", "d1": "hash x"})

    assert plan_of(harness) == act.Plan(decode=D1, prefill=P0)


def test_another_prefill_instance_is_taken_whose_hand_offs_can_be_read() -> None:
    """Though the first one has less work."""
    harness = vllms({"p0": "hash x", "p1": "hash y", "d0": "hash y"})

    assert plan_of(harness) == act.Plan(decode=D0, prefill=P1)


def test_decode_computes_the_prompt_where_it_can_read_no_hand_off() -> None:
    harness = vllms({"p0": "cache_dtype auto", "d0": "cache_dtype fp8"})

    assert plan_of(harness) == act.Plan(decode=D0)


def test_a_decode_instance_without_a_pair_helps_where_the_others_cannot() -> None:
    """While those with a pair are up they are taken; it is used when they are gone."""
    harness = vllms({"p0": "hash x", "d0": "hash x", "d1": "hash y"})

    with_pair = plan_of(harness)
    harness.lose("d0", at_s=1.0)

    assert with_pair == act.Plan(decode=D0, prefill=P0)
    assert plan_of(harness, B) == act.Plan(decode=D1)


def test_a_prefill_that_is_done_is_not_redirected_to_what_cannot_read_it() -> None:
    harness = vllms({"p0": "hash x", "d0": "hash x", "d1": "hash y"}, handoff=Handoff.AUTO)
    plan_of(harness)
    harness.policy.state.view.members[D0].queue_s = 60.0

    assert not harness.handle(ev.PrefillDone(A, 1, 100))


def test_a_cut_stream_is_computed_where_no_prefill_instance_can_hand_it_over() -> None:
    """Though the prefill instance is idle, and the other decode instance has a long queue."""
    harness = vllms({"p0": "hash x", "d0": "hash x", "d1": "hash y"})
    plan_of(harness)
    harness.handle(ev.PrefillDone(A, 1, 100))
    harness.handle(ev.StreamResumed(A, 1))

    harness.handle(load("d1", 5.0))
    actions = harness.lose("d0", at_s=1.0, A=5)

    assert only(actions, act.Start).plan == act.Plan(decode=D1)


def test_formats_are_alike_again_when_the_other_one_is_gone() -> None:
    harness = vllms({"p0": "hash x", "d0": "hash y"})
    harness.lose("d0", at_s=1.0)
    harness.handle(instance_up("d0", 2, hand_off_format="hash x", **PLAIN))

    assert plan_of(harness) == act.Plan(decode=D0, prefill=P0)
