"""The cost of computing a history again."""

import pytest

from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.options.recompute import RECOMPUTE, estimate_handed_off
from kvrs.core.rules.base import cases_of
from kvrs.core.state import CoreSettings, State
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from tests.core.policy_harness import PolicyHarness, instance_up, load, member, of


def test_recomputing_costs_queue_the_whole_history_and_the_hand_off() -> None:
    """`queue(prefill) + prefill(L + t) + local hand-off`; there is no hand-off within one
    instance.
    """
    apart = estimate_handed_off(
        member("p1"),
        member("d1"),
        history_tokens=110,
        compute_s=0.110,
        extrapolated=False,
        bytes_per_s=204_800.0,
        queue_s=0.5,
        handshake_s=0.01,
    )
    state, alone = State(CoreSettings()), list[Estimate]()
    state.view.assume(204_800.0)
    state.factors[Option.RECOMPUTE] = 2.0
    up = instance_up("b1")
    target = state.view.add(Member.of(up.info, up.prefill))
    target.note_queue(0.5)
    (case,) = cases_of(state, Stream(StreamId("s"), 0, 110, 0.0), [target], 0.0)
    RECOMPUTE.estimate(case, alone)

    assert apart.total_s == pytest.approx(0.5 + 0.110 + 0.01 + 112 * 2048 / 204_800)
    assert [each.raw_s for each in alone] == pytest.approx([0.5 + 0.110])
    assert [each.total_s for each in alone] == pytest.approx([2 * (0.5 + 0.110)])


def test_an_estimate_from_beyond_the_table_is_marked() -> None:
    """`Estimate.extrapolated` shows that a table was used outside its measured range: that of the
    instance that computes.
    """
    state = State(CoreSettings())
    view = state.view
    for up in (instance_up("p1"), instance_up("d1")):
        view.add(Member.of(up.info, up.prefill))
    target, marks = view.members[InstanceId("d1")], []
    target.prefill = PrefillTable("longer", "test", 100, [0.0, 0.09, 0.18, 0.27, 0.36, 0.45])

    for tokens in (400, 401):
        found: list[Estimate] = []
        stream = Stream(StreamId("s"), 0, tokens, 0.0)
        (case,) = cases_of(state, stream, [target], 0.0)
        RECOMPUTE.estimate(case, found)
        marks.append({each.source: each.extrapolated for each in found})

    assert marks == [{None: False, "p1": False}, {None: False, "p1": True}]


@pytest.mark.parametrize(("queue_s", "sources"), [(0.0, {"p1", None}), (9.0, {"p1"})])
def test_a_prefill_instance_is_weighed_beside_a_target_that_is_sooner(
    queue_s: float, sources: set[str | None]
) -> None:
    """No other victim waits at the target for what it computes. If it is the sooner one itself, the
    target is not weighed.
    """
    harness = PolicyHarness("p0", "d0")
    harness.decoding("s")
    for name in ("p1", "d1"):
        harness.handle(instance_up(name))
    harness.handle(load("d1", queue_s))

    (recovered,) = of(harness.lose("d0"), act.Recovered)

    found = [each for each in recovered.estimates if each.option is Option.RECOMPUTE]
    assert {each.source for each in found} == sources
    assert found == sorted(found, key=lambda each: each.total_s)
