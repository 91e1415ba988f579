"""Replay: where it is weighed, what it costs, and when it is chosen."""

from typing import Any

import pytest

from kvrs.config.policy import PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.options import replay
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability
from tests.core.policy_harness import PolicyHarness, instance_up, only

A = StreamId("A")
P0, D1 = InstanceId("p0"), InstanceId("d1")
CAPABILITIES = {"p": [Capability.PREFIX_CACHE], "d": [Capability.REPLAY]}


def cut(*, needs_replay: bool = True, tokens: int = 40, **settings: Any) -> PolicyHarness:
    """A stream of 100 tokens of prompt lost d0 with so many tokens of output, 10 ms each."""
    harness = PolicyHarness(**settings)
    for name in ("p0", "d0", "d1"):
        harness.handle(instance_up(name, capabilities=CAPABILITIES[name[0]]))
    harness.decoding("A", resumed=False)
    harness.handle(ev.StreamResumed(A, 1, needs_replay))
    harness.actions.clear()
    harness.lose("d0", at_s=tokens * 0.01, A=tokens)
    return harness


def replays_of(harness: PolicyHarness) -> list[Estimate]:
    estimates = only(harness.actions, act.Recovered).estimates
    return [each for each in estimates if each.option is Option.REPLAY]


@pytest.mark.parametrize(
    "name", [PolicyName.AUTO, PolicyName.ALWAYS_RECOMPUTE, PolicyName.ALWAYS_MIGRATE]
)
def test_a_stream_that_nothing_else_continues_exactly_is_replayed(name: PolicyName) -> None:
    """Whatever the other options cost: they would go on with other tokens."""
    harness = cut(name=name)

    recovered = only(harness.actions, act.Recovered)
    assert recovered.option is Option.REPLAY
    assert min(recovered.estimates, key=lambda each: each.total_s).option is not Option.REPLAY
    assert only(harness.actions, act.Start).plan.replays


@pytest.mark.parametrize(
    "case",
    [
        {"needs_replay": False},
        {"name": PolicyName.ROM},
    ],
    ids=["need-less", "rom"],
)
def test_others_are_not_replayed(case: dict[str, Any]) -> None:
    """Those that another option continues exactly; `rom` is that of seed KVRS."""
    harness = cut(**case)

    assert not replays_of(harness)
    assert not only(harness.actions, act.Start).plan.replays


def test_a_long_output_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`REPLAY_S_MAX` bounds the pause."""
    monkeypatch.setattr(replay, "REPLAY_S_MAX", 0.39)

    assert not replays_of(cut())


def test_it_costs_the_prompt_and_a_step_per_known_token() -> None:
    """At the pace that the stream had; the prompt alone is computed, or handed off."""
    found = {each.source: each for each in replays_of(cut())}

    assert found[None].total_s == pytest.approx(0.1 + 40 * 0.01)
    assert found[P0].by_prefill
    assert found[P0].compute_s == pytest.approx(0.1 - 0.096)
    assert found[P0].total_s == pytest.approx(found[P0].compute_s + found[P0].transfer_s + 0.4)


def test_another_option_follows_a_replay_that_failed() -> None:
    """The instance runs on, and has generated something else."""
    harness = cut()

    harness.handle(ev.PrefillDone(A, 2, 100))
    harness.actions.clear()
    harness.handle(ev.AttemptFailed(A, 2, D1, "replayed other tokens", 40), at_s=1.0)
    harness.look_until(4.0)

    assert only(harness.actions, act.Recovered).option is not Option.REPLAY
