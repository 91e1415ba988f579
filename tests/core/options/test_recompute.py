"""The cost of computing a history again."""

from typing import Any

import pytest

from kvrs.core.model import actions as act
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, Stream
from kvrs.core.options.base import RecoveryOption
from kvrs.core.options.migrate import MIGRATE
from kvrs.core.options.recompute import RECOMPUTE, estimate_handed_off
from kvrs.core.rules.base import cases_of
from kvrs.core.state import CoreSettings, State
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Capability
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
    up = instance_up("b1")
    target = state.view.add(Member.of(up.info, up.prefill))
    target.note_queue(2.0)  # A history waits for a quarter of it in a fair queue.
    state.view.look_ahead()
    (case,) = cases_of(state, Stream(StreamId("s"), 0, 110, 0.0), [target], 0.0)
    RECOMPUTE.estimate(case, alone)

    assert apart.total_s == pytest.approx(0.5 + 0.110 + 0.01 + 112 * 2048 / 204_800)
    assert [each.total_s for each in alone] == pytest.approx([0.5 + 0.110])


def test_an_estimate_from_beyond_the_table_is_marked() -> None:
    """`Estimate.extrapolated` shows that a table was used outside its measured range: that of the
    instance that computes.
    """
    state = State(CoreSettings())
    view = state.view
    for up in (instance_up("p1"), instance_up("d1")):
        view.add(Member.of(up.info, up.prefill))
    target, marks = view.members[InstanceId("d1")], []
    target.times.table = PrefillTable("longer", "test", 100, [0.0, 0.09, 0.18, 0.27, 0.36, 0.45])

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


@pytest.mark.parametrize("option", [RECOMPUTE, MIGRATE])
def test_a_hand_off_waits_for_those_before_it_on_its_link(option: RecoveryOption) -> None:
    """The prefill instance computes meanwhile. Victims of one event so see each other's bytes, also
    where nothing can be fetched, as in front of stock vLLM.
    """
    state = State(CoreSettings())
    view = state.view
    cached = frozenset([Capability.PREFIX_CACHE])
    plain: dict[str, Any] = {"capabilities": cached, "computes_prompts": True}
    for name in ("p1", "d2"):
        up = instance_up(name, moves_kv=True, **plain)
        view.add(Member.of(up.info, up.prefill)).moves_kv = True
    prefill, target = (view.members[InstanceId(name)] for name in ("p1", "d2"))
    target.note_queue(0.4)  # So that the target itself is slower.
    view.look_ahead()
    stream = Stream(StreamId("s"), 0, 110, 0.0)
    if option is MIGRATE:
        stream.holders[prefill.id] = Holder(prefill, 3)
    link = view.link(prefill.node, target.node)
    link.bytes_per_s = 2e6
    costs = []
    for in_flight_bytes in (0, 100_000, 2_000_000):
        link.in_flight_bytes, found = in_flight_bytes, list[Estimate]()
        (case,) = cases_of(state, stream, [target], 0.0)
        option.estimate(case, found)
        costs.append(next(each for each in found if each.source == prefill.id))

    ready_s = 0.110 if option is RECOMPUTE else 0.110 - 0.048
    hand_off_s = HANDSHAKE_S + 112 * 2048 / 2e6
    assert [each.total_s for each in costs] == pytest.approx(
        [max(0.4, max(ready_s, wait_s) + hand_off_s) for wait_s in (0.0, 0.05, 1.0)]
    )
