"""Only what a resume self-test has seen working is weighed."""

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import Option
from kvrs.core.model.member import Member
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

PLAIN = frozenset({Capability.PREFIX_CACHE})
NAMES = ("p0", "d0", "p1", "d1")
A = StreamId("A")


def weighed(harness: PolicyHarness, lost: str) -> set[Option]:
    """The options that are weighed for the one victim of this loss."""
    recovered = only(harness.lose(lost, s=7), act.Recovered)
    return {estimate.option for estimate in recovered.estimates}


def seen(name: str, *, moves_kv: bool, tokens: str = "", epoch: int = 1) -> ev.SelfTested:
    return ev.SelfTested(InstanceId(name), epoch, moves_kv, tokens)


@pytest.mark.parametrize("policy", list(PolicyName))
@pytest.mark.parametrize("capabilities", [frozenset(Capability), PLAIN])
@pytest.mark.parametrize("broken", ["target", "holder"])
def test_nothing_is_fetched_where_kv_was_not_seen_to_move(
    policy: PolicyName, capabilities: frozenset[Capability], broken: str
) -> None:
    """Neither to a target, nor from a holder, whatever they declare."""
    harness = PolicyHarness(name=policy)
    for name in NAMES:
        harness.handle(instance_up(name, capabilities=capabilities))
    start = harness.decoding("s", 400).plan
    other = "d1" if start.decode == "d0" else "d0"
    assert start.prefill is not None
    harness.handle(seen(other if broken == "target" else start.prefill, moves_kv=False))

    assert weighed(harness, start.decode) == {Option.RECOMPUTE}


def test_an_instance_is_used_fully_once_kv_was_seen_to_move() -> None:
    """Where self-tests run, an instance comes up without."""
    harness = PolicyHarness()
    for name in NAMES:
        harness.handle(instance_up(name, moves_kv=False))
    start = harness.decoding("s", 400).plan

    for name in NAMES:
        harness.handle(seen(name, moves_kv=True))

    assert Option.MIGRATE in weighed(harness, start.decode)


def test_the_test_of_an_epoch_that_is_over_says_nothing() -> None:
    """The process after it may run otherwise."""
    harness = PolicyHarness(*NAMES)
    start = harness.decoding("s", 400).plan
    assert start.prefill is not None

    harness.handle(seen(start.prefill, moves_kv=False, epoch=0))

    assert Option.MIGRATE in weighed(harness, start.decode)


def test_a_history_is_not_computed_twice_where_the_hand_off_moves_nothing() -> None:
    """The target would compute it again behind the prefill instance."""
    harness = PolicyHarness(*NAMES)
    start = harness.decoding("s", 400).plan
    other = "d1" if start.decode == "d0" else "d0"
    harness.handle(seen(other, moves_kv=False))

    plan = only(harness.lose(start.decode, s=7), act.Start).plan

    assert (plan.decode, plan.prefill, plan.runs) == (other, None, ())


@pytest.mark.parametrize("alike", ["d1", "d2"])
def test_a_stream_goes_on_where_the_same_tokens_are_computed(alike: str) -> None:
    """An instance that computes others is better than none."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("s")
    for name in ("d1", "d2"):
        harness.handle(instance_up(name))
        harness.handle(seen(name, moves_kv=True, tokens="1" if name == alike else "2"))
    harness.handle(seen("d0", moves_kv=True, tokens="1"))

    first = only(harness.lose("d0", s=7), act.Start).plan.decode
    harness.handle(ev.StreamResumed(StreamId("s"), 2))
    second = only(harness.lose(first, s=9), act.Start).plan.decode

    assert first == alike
    assert second != alike


def test_tokens_differ_while_two_decode_instances_compute_different_ones() -> None:
    """Those of prefill instances do not count, nor those that are not known."""
    view, differ = ClusterView(1e9), []
    for name, tokens in (("d0", "one"), ("d1", ""), ("p0", "other"), ("d2", "other")):
        up = instance_up(name, tokens=tokens)
        view.set_self_tested(view.add(Member.of(up.info, up.prefill)), up)
        differ.append(view.tokens_differ)

    view.remove(view.members[InstanceId("d0")])

    assert (differ, view.tokens_differ) == ([False, False, False, True], False)


@pytest.mark.parametrize("moves_kv", [True, False])
@pytest.mark.parametrize("restores", [True, False, None])
def test_agents_are_a_source_where_restores_were_seen(
    moves_kv: bool, restores: bool | None
) -> None:
    """Engines that load from agents in another way than from each other are tested for it; with
    others (None) KV moves in both ways or in none.
    """
    harness = PolicyHarness(*NAMES, backup=BackupSettings(mode=BackupMode.BOTH))
    harness.agents("n0", "n1")
    start = harness.decoding("s", 400).plan
    other = "d1" if start.decode == "d0" else "d0"
    for agent in ("agent-n0", "agent-n1"):
        harness.kept(agent, s=10)
    harness.handle(ev.SelfTested(InstanceId(other), 1, moves_kv, restores=restores))

    options = weighed(harness, start.decode)

    assert (Option.RESTORE in options) is (moves_kv if restores is None else restores)
    assert (Option.MIGRATE in options) is moves_kv


def compare(harness: PolicyHarness, doubted: str = "", **weights: str) -> None:
    for name, value in weights.items():
        tested = ev.SelfTested(
            InstanceId(name), 1, True, f"{value}:", is_doubted=name in doubted.split()
        )
        harness.handle(tested)


def targets_of_new(harness: PolicyHarness, names: str) -> set[str]:
    """The decode instances that new streams of these names are sent to, which run on."""
    return {
        only(harness.handle(ev.StreamArrived(StreamId(name), 20)), act.Start).plan.decode
        for name in names
    }


def test_a_doubted_instance_gets_new_streams_only_if_nothing_else_serves() -> None:
    harness = PolicyHarness("p2", "d0", "d1", "d2")
    compare(harness, d0="a", d1="a", d2="b", doubted="d2")
    before = targets_of_new(harness, "abcdef")

    harness.handle(ev.InstanceLost(InstanceId("d0"), 1, "killed", {}))
    with_one = targets_of_new(harness, "ghijkl")
    harness.handle(ev.InstanceLost(InstanceId("d1"), 1, "killed", {}))
    alone = targets_of_new(harness, "mno")

    assert (before, with_one, alone) == ({"d0", "d1"}, {"d1"}, {"d2"})


def test_a_cut_stream_is_not_computed_again_by_a_doubted_prefill_instance() -> None:
    """The promise of exact tokens holds for the prompt, too."""
    harness = PolicyHarness("p0", "p1", "d0", "d1")
    compare(harness, d0="a", d1="a")
    start = harness.decoding(A, 400, resumed=False).plan
    harness.handle(ev.StreamResumed(A, 1, promise=ev.Promise.GREEDY))
    doubted = next(each for each in ("p0", "p1") if each != start.prefill)
    harness.handle(ev.InstanceLost(InstanceId(start.prefill or ""), 1, "killed", {}))
    harness.handle(ev.SelfTested(InstanceId(doubted), 1, True, is_doubted=True))

    actions = harness.handle(ev.InstanceLost(InstanceId(start.decode), 1, "killed", {}))

    assert {each.source for each in only(actions, act.Recovered).estimates} == {None}


def test_an_instance_that_answers_late_is_better_than_a_doubted_one() -> None:
    """It serves: on a starved machine all are late."""
    harness = PolicyHarness("p2", "d0", "d2")
    compare(harness, d0="a", d2="b", doubted="d2")
    harness.handle(ev.StreamArrived(A, 20))
    harness.handle(ev.PrefillDone(A, 1, 20))
    harness.handle(ev.TimerFired(), at_s=600.0)

    assert targets_of_new(harness, "bcd") == {"d0"}


def test_an_exact_stream_waits_rather_than_goes_on_with_other_tokens() -> None:
    """Whatever the majority is, and until it has waited for as long as any: then with an error."""
    harness = PolicyHarness("p0", "d0", "d1", "d2")
    compare(harness, d0="a", d1="b", d2="b")
    harness.handle(ev.InstanceLost(InstanceId("d1"), 1, "killed", {}))
    start = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    assert start.plan.decode == "d0"
    harness.handle(ev.PrefillDone(A, 1, 20))
    harness.handle(ev.StreamResumed(A, 1, promise=ev.Promise.GREEDY))

    lost = harness.handle(ev.InstanceLost(InstanceId("d0"), 1, "killed", {A: 3}))
    gathered = harness.handle(ev.TimerFired(), at_s=1.0)
    end = only(harness.handle(ev.TimerFired(), at_s=40.0), act.GiveUp)

    assert (of(lost, act.Start), of(gathered, act.Start)) == ([], [])
    assert end.reason is act.Reason.INEXACT


def test_an_exact_stream_goes_on_where_its_tokens_are() -> None:
    """An instance with these has to come up first: the one that is up has others."""
    harness = PolicyHarness("p0", "d0", "d1")
    compare(harness, d0="a", d1="b")
    start = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    home, other = start.plan.decode, {"d0": "d1", "d1": "d0"}[start.plan.decode]
    mine = {"d0": "a", "d1": "b"}[home]
    harness.handle(ev.PrefillDone(A, 1, 20))
    harness.handle(ev.StreamResumed(A, 1, promise=ev.Promise.GREEDY))
    harness.handle(ev.InstanceLost(home, 1, "killed", {A: 3}))
    harness.handle(ev.TimerFired(), at_s=1.0)

    back = harness.handle(instance_up(home, epoch=2, tokens=f"{mine}:"), at_s=2.0)

    assert only(back, act.Start).plan.decode == home != other


def test_an_exact_stream_goes_back_to_its_instance_after_the_pause_of_that() -> None:
    """It has failed once; the other one, which has not, has other tokens."""
    harness = PolicyHarness("p0", "d0", "d1")
    compare(harness, d0="a", d1="b")
    start = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    home = start.plan.decode
    harness.handle(ev.PrefillDone(A, 1, 20))
    harness.handle(ev.StreamResumed(A, 1, promise=ev.Promise.GREEDY))
    failed = harness.handle(ev.AttemptFailed(A, 1, home, "reset", 3, True))
    pause_s = harness.policy.members[home].answers.until_s

    back = only(failed + harness.look_until(3.0), act.Start)

    assert pause_s is not None
    assert pause_s < 2.0
    assert back.plan.decode == home


def test_an_exact_stream_goes_back_to_its_instance_once_that_is_readmitted() -> None:
    """A probe may end an ejection at any time."""
    harness = PolicyHarness("p0", "d0", "d1")
    compare(harness, d0="a", d1="b")
    start = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    home = harness.policy.members[start.plan.decode]
    harness.handle(ev.PrefillDone(A, 1, 20))
    harness.handle(ev.StreamResumed(A, 1, promise=ev.Promise.GREEDY))
    home.answers.is_ejected = True
    waits = harness.handle(ev.AttemptFailed(A, 1, home.id, "reset", 3, True))
    waits += harness.look_until(5.0)
    home.answers.is_ejected, home.answers.until_s = False, None

    back = only(harness.look_until(8.0), act.Start)

    assert of(waits, act.Start) == []
    assert back.plan.decode == home.id


def test_a_marked_stream_goes_on_anywhere() -> None:
    """Its head has said so."""
    harness = PolicyHarness("p0", "d0", "d1")
    compare(harness, d0="a", d1="b")
    start = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    harness.handle(ev.PrefillDone(A, 1, 20))
    harness.handle(ev.StreamResumed(A, 1))

    actions = harness.handle(ev.InstanceLost(start.plan.decode, 1, "killed", {A: 3}))
    actions += harness.handle(ev.TimerFired(), at_s=1.0)

    assert only(actions, act.Start).plan.decode != start.plan.decode


@pytest.mark.parametrize("promise", [ev.Promise.GREEDY, ev.Promise.NONE])
def test_a_promised_replay_is_the_only_option_however_often_it_failed(promise: ev.Promise) -> None:
    """A target that was silent may replay a moment later. What is marked goes on in another way."""
    harness = PolicyHarness("p0")
    for name in ("d0", "d1", "d2"):
        harness.handle(instance_up(name, capabilities=[*Capability]))
    start = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    harness.handle(ev.PrefillDone(A, 1, 20))
    harness.handle(ev.StreamResumed(A, 1, needs_replay=True, promise=promise))
    actions = harness.handle(ev.InstanceLost(start.plan.decode, 1, "killed", {A: 3}))
    actions += harness.handle(ev.TimerFired(), at_s=1.0)
    first = only(actions, act.Start)

    silent = ev.FailureKind.BROKEN
    event = ev.AttemptFailed(A, first.attempt, first.plan.decode, "silent", 3, True, silent)
    actions = harness.handle(event)
    actions += harness.handle(ev.TimerFired(), at_s=4.0)

    second = only(actions, act.Start)
    assert first.plan.replays
    assert second.plan.replays is (promise is ev.Promise.GREEDY)
