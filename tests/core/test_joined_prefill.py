"""Decode instances that compute nothing: each attempt there begins with a prefill elsewhere, at the
same time.
"""

from typing import Any

import pytest

from kvrs.config.policy import Handoff, PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability
from tests.core.policy_harness import PolicyHarness, instance_up, load, only

P0, P2, D0, D1 = (InstanceId(name) for name in ("p0", "p2", "d0", "d1"))
A = StreamId("A")
CACHES: dict[str, Any] = {"capabilities": frozenset([Capability.PREFIX_CACHE])}
POLICIES = [PolicyName.AUTO, PolicyName.ROM, PolicyName.ALWAYS_MIGRATE, PolicyName.ALWAYS_RECOMPUTE]


def pairs(*names: str, **settings: Any) -> PolicyHarness:
    harness = PolicyHarness(**settings)
    for name in names:
        facts = CACHES if name[0] == "p" else {"joins_prefill": True, "capabilities": frozenset()}
        harness.handle(instance_up(name, **facts))
    return harness


def begun(harness: PolicyHarness, prompt_tokens: int = 100) -> act.Plan:
    return only(harness.handle(ev.StreamArrived(A, prompt_tokens, 200)), act.Start).plan


def failed(harness: PolicyHarness, instance: InstanceId, produced: int = 0) -> list[act.Action]:
    return harness.handle(
        ev.AttemptFailed(A, 1, instance, "connection lost", produced, False), harness.now_s + 1
    )


def resumed(harness: PolicyHarness, prompt_tokens: int = 100) -> None:
    harness.handle(ev.PrefillDone(A, 1, prompt_tokens))
    harness.handle(ev.StreamResumed(A, 1))


@pytest.mark.parametrize("prompt_tokens", [100, 5])
@pytest.mark.parametrize("name", POLICIES)
def test_a_recovery_names_a_prefill_instance_too(name: PolicyName, prompt_tokens: int) -> None:
    """Also one that has the history in its cache, or the little that is no page."""
    harness = pairs("p0", "d0", "d1", name=name)
    assert begun(harness, prompt_tokens) == act.Plan(decode=D0, prefill=P0)
    resumed(harness, prompt_tokens)

    again = only(failed(harness, D0, produced=8), act.Start)

    assert again.plan == act.Plan(decode=D1, prefill=P0)


def test_the_decode_instance_is_chosen_at_the_beginning() -> None:
    """Prefill and decode have met when prefill is done: nothing is redirected then."""
    harness = pairs("p0", "d0", "d1")
    begun(harness)
    harness.handle(load("d1"))
    harness.handle(load("d0", queue_s=30.0))

    actions = harness.handle(ev.PrefillDone(A, 1, 100))

    assert not [each for each in actions if isinstance(each, act.Redirect)]


def test_without_a_prefill_instance_a_stream_waits() -> None:
    """The decode instance could not compute its history."""
    harness = pairs("p0", "d0", "d1")
    begun(harness)
    resumed(harness)
    harness.lose("p0")

    assert not [each for each in failed(harness, D0, produced=8) if isinstance(each, act.Start)]
    harness.look_until(harness.now_s + 1)
    later = harness.handle(instance_up("p0", epoch=2, **CACHES))

    assert only(later, act.Start).plan == act.Plan(decode=D1, prefill=P0)


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_pair_of_a_dead_prefill_is_left_at_both_ends(is_lost: bool) -> None:
    """Decode keeps the memory of what was not sent for a while; with no other one it is used."""
    for names, decode in ((("p0", "p2", "d0", "d1"), D1), (("p0", "p2", "d0"), D0)):
        harness = pairs(*names)
        assert begun(harness) == act.Plan(decode=D0, prefill=P0)
        if "d1" in names:
            harness.handle(load("d1", streams=3))  # It has more to do.

        actions = harness.lose("p0") if is_lost else failed(harness, P0)
        actions += harness.look_until(harness.now_s + 2)

        assert only(actions, act.Start).plan == act.Plan(decode=decode, prefill=P2)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_the_cache_of_prefill_had_counts(is_late: bool) -> None:
    """Its call ends about when the first token comes: before that, or later."""
    harness = pairs("p0", "d0", "d1")
    begun(harness)
    found = ev.PrefillDone(A, 1, 100, 48)

    events = (ev.PrefillDone(A, 1, 100), ev.StreamResumed(A, 1), found)
    for event in events if is_late else (found, ev.StreamResumed(A, 1)):
        harness.handle(event)

    (hits,) = harness.policy.prefix_hits.values()
    assert [*harness.policy.prefix_hits] == [P0]
    assert (hits.prompt_tokens, hits.cached_tokens) == (100, 48)


def test_a_stream_that_decodes_outlives_its_prefill_instance() -> None:
    harness = pairs("p0", "p1", "d0", "d1")
    begun(harness)
    resumed(harness)

    assert not [each for each in harness.lose("p0") if isinstance(each, act.Start)]


def test_a_decode_instance_takes_its_prefill_along() -> None:
    """Before prefill is done: it has nothing to send the KV to."""
    harness = pairs("p0", "d0", "d1")
    begun(harness)

    actions = harness.lose("d0") + harness.look_until(harness.now_s + 1)

    assert only(actions, act.Start).plan == act.Plan(decode=D1, prefill=P0)


def test_a_start_is_weighed_at_all_decode_instances() -> None:
    """Not only at that of the prefill's node."""
    harness = pairs("p0", "d0", "d1", handoff=Handoff.AUTO)
    harness.handle(load("d0", queue_s=30.0))

    assert begun(harness) == act.Plan(decode=D1, prefill=P0)
