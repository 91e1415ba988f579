"""Streams of an alias or adapter go only to instances that serve it."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.policy import Dispatch, Handoff, PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability, ModelNames
from kvrs_testkit.examples import examples
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

A, B = StreamId("A"), StreamId("B")
BASE, BOTH = ("tiny",), ("tiny", "lora")
PLAIN = frozenset({Capability.PREFIX_CACHE})  # As vLLM has.
ALL = ("p0", "d0", "p1", "d1", "p2", "d2")


def harness_of(
    *having: str, capabilities: frozenset[Capability] = frozenset(Capability), **given: Any
) -> PolicyHarness:
    harness = PolicyHarness(**given)
    for name in ALL:
        names = BOTH if name in having else BASE
        harness.handle(instance_up(name, names=names, capabilities=capabilities))
    return harness


def listed(name: str, names: tuple[str, ...], epoch: int = 1) -> ev.NamesListed:
    return ev.NamesListed(InstanceId(name), epoch, ModelNames(names))


@pytest.mark.parametrize("handoff", list(Handoff))
def test_streams_of_an_adapter_start_where_it_is_and_others_anywhere(handoff: Handoff) -> None:
    """Also when its instances are the most loaded ones."""
    harness = harness_of("p1", "d2", handoff=handoff)

    plans = {"lora": Counter[str](), "": Counter[str]()}
    for n in range(30):
        name = "lora" if n % 2 else ""
        start = only(harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 20, name=name)), act.Start)
        plans[name].update([start.plan.prefill or "", start.plan.decode])
        harness.handle(ev.PrefillDone(start.stream, 1, 20))
        harness.handle(ev.StreamResumed(start.stream, 1))

    assert plans["lora"] == {"p1": 15, "d2": 15}
    assert len(plans[""]) > 2
    assert of(harness.actions, act.Redirect) == [] or handoff is not Handoff.OWN_PAIR


@pytest.mark.parametrize("policy", list(PolicyName))
@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_a_stream_of_an_adapter_is_recovered_where_it_is(
    policy: PolicyName, dispatch: Dispatch
) -> None:
    """With load, locality and a free place elsewhere against it."""
    harness = harness_of("p0", "d0", "d2", name=policy, dispatch=dispatch)
    first = only(harness.handle(ev.StreamArrived(A, 400, name="lora")), act.Start)
    harness.handle(ev.PrefillDone(A, 1, 400))
    harness.handle(ev.StreamResumed(A, 1))
    other = "d2" if first.plan.decode == "d0" else "d0"
    for n in range(5):
        harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 20, name="lora"))

    again = only(
        [a for a in harness.lose(first.plan.decode, A=9) if getattr(a, "stream", "") == A],
        act.Start,
    )

    assert again.plan.decode == other
    assert again.plan.prefill in (None, "p0")


def test_without_an_instance_that_has_it_a_stream_waits_and_goes_on_when_one_does() -> None:
    """An adapter that is loaded at run time is used at once, and one that is unloaded no more."""
    harness = harness_of("p0")
    arrived = harness.handle(ev.StreamArrived(A, 20, name="lora"))

    late = harness.handle(listed("d1", BOTH, epoch=0))
    loaded = harness.handle(listed("d1", BOTH))
    harness.handle(listed("d1", BASE))
    harness.handle(listed("d2", BOTH))
    after = only(harness.handle(ev.StreamArrived(B, 20, name="lora")), act.Start)

    assert of([*arrived, *late], act.Start) == []
    assert only(loaded, act.Start).plan.decode == "d1"
    assert after.plan.decode == "d2"


def test_an_adapter_that_is_unloaded_during_prefill_is_handed_off_elsewhere() -> None:
    """Or waits for an instance that has it."""
    harness = harness_of("p0", "d0", "d1")
    first = only(harness.handle(ev.StreamArrived(A, 20, name="lora")), act.Start)
    harness.handle(ev.StreamArrived(B, 20, name="lora"))

    harness.handle(listed(first.plan.decode, BASE))
    moved = only(harness.handle(ev.PrefillDone(A, 1, 20)), act.Redirect)
    harness.handle(listed(moved.plan.decode, BASE))
    late = harness.handle(ev.PrefillDone(B, 1, 20))

    assert {first.plan.decode, moved.plan.decode} == {"d0", "d1"}
    assert not any(isinstance(each, act.Start | act.Redirect) for each in late)


def test_the_only_instance_with_the_adapter_is_tried_again_though_others_are_healthier() -> None:
    """After its pause, and not only when nothing else answers."""
    harness = harness_of("p0", "d0")
    harness.handle(ev.StreamArrived(A, 20, name="lora"))
    harness.handle(ev.PrefillDone(A, 1, 20))
    harness.handle(ev.StreamResumed(A, 1))

    harness.handle(ev.AttemptFailed(A, 1, InstanceId("d0"), "reset", 3))
    again = [a for n in range(20) for a in of(harness.handle(ev.TimerFired(), n * 0.1), act.Start)]

    assert [each.plan.decode for each in again] == ["d0"]


def test_a_prefill_instance_that_has_unloaded_the_adapter_computes_no_rest_with_it() -> None:
    """Though it has the front of the history cached."""
    harness = harness_of("p0", "p1", "d0", "d1", capabilities=PLAIN, name=PolicyName.ALWAYS_MIGRATE)
    first = only(harness.handle(ev.StreamArrived(A, 400, name="lora")), act.Start)
    harness.handle(ev.PrefillDone(A, 1, 400))
    harness.handle(ev.StreamResumed(A, 1))
    assert first.plan.prefill is not None

    harness.handle(listed(first.plan.prefill, BASE))
    again = only(harness.lose(first.plan.decode, A=9), act.Start)

    assert again.plan.prefill != first.plan.prefill


def test_an_adopted_stream_goes_where_its_adapter_is() -> None:
    harness = harness_of("p0", "d2")

    start = only(harness.handle(ev.StreamAdopted(A, 20, 5, name="lora")), act.Start)

    assert start.plan.decode == "d2"


def test_a_refusal_of_the_only_instance_that_has_the_adapter_is_decided_there() -> None:
    """The others could not say whose fault it is."""
    harness = harness_of("p0", "d0")
    start = only(harness.handle(ev.StreamArrived(A, 20, name="lora")), act.Start)

    event = ev.AttemptFailed(A, 1, InstanceId("p0"), "no", 0, failure=ev.FailureKind.REFUSED)
    given_up = only(harness.handle(event), act.GiveUp)

    assert (start.plan.prefill, given_up.reason) == ("p0", act.Reason.REFUSED)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "adopt", "prefilled", "resume", "fail", "list", "lose", "up"]),
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(
    STEPS,
    st.sampled_from(list(PolicyName)),
    st.sampled_from(list(Handoff)),
    st.sampled_from([PLAIN, frozenset(Capability)]),
)
@examples(150)
def test_no_attempt_goes_to_an_instance_that_lacks_its_name(
    steps: list[tuple[str, int, int]],
    policy: PolicyName,
    handoff: Handoff,
    capabilities: frozenset[Capability],
) -> None:
    """Whatever comes, goes, is loaded and unloaded."""
    harness = harness_of(
        *ALL[:3],
        name=policy,
        handoff=handoff,
        capabilities=capabilities,
        wait_s=3600.0,
        max_attempts=100,
    )
    names = {each: BOTH if each in ALL[:3] else BASE for each in ALL}
    epochs, wanted, running = (
        Counter(dict.fromkeys(ALL, 1)),
        dict[str, str](),
        dict[str, act.Start](),
    )

    def check(actions: list[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Start):
                running[action.stream] = action
            if isinstance(action, act.Start | act.Redirect) and wanted[action.stream]:
                assert "lora" in names[action.plan.decode]
                assert action.plan.prefill is None or "lora" in names[action.plan.prefill]

    def handle(event: ev.Event) -> None:
        harness.now_s += 0.3
        check(harness.handle(event))

    for number, (what, at, n) in enumerate(steps):
        name, stream = ALL[at], StreamId(f"s{number}")
        if what in ("arrive", "adopt"):
            wanted[stream] = "lora" if n % 3 else ""
            kind = ev.StreamArrived(stream, 100, name=wanted[stream])
            handle(
                kind if what == "arrive" else ev.StreamAdopted(stream, 100, 7, name=wanted[stream])
            )
        elif what == "list":
            names[name] = BOTH if n % 2 else BASE
            handle(listed(name, names[name], epochs[name]))
        elif what == "lose":
            produced = dict.fromkeys(running, n)
            harness.now_s += 0.3
            check(harness.lose(name, epochs[name], **produced))
        elif what == "up":
            epochs[name] += 1
            names[name] = BOTH if n % 2 else BASE
            handle(instance_up(name, epochs[name], names=names[name], capabilities=capabilities))
        elif running:
            start = running[sorted(running)[n % len(running)]]
            if what == "prefilled":
                handle(ev.PrefillDone(start.stream, start.attempt, 100 + n))
            elif what == "resume":
                handle(ev.StreamResumed(start.stream, start.attempt))
            else:
                handle(ev.AttemptFailed(start.stream, start.attempt, InstanceId(name), "no", n))
    handle(ev.TimerFired())
