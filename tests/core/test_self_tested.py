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
from tests.core.policy_harness import PolicyHarness, instance_up, only

PLAIN = frozenset({Capability.PREFIX_CACHE})
NAMES = ("p0", "d0", "p1", "d1")


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
