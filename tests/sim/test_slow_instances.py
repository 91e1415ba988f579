"""Simulated instances that take longer for each step than their profile says."""

import pytest

from kvrs.core.event_log import rerun
from kvrs.core.model.member import Member
from kvrs.ids import InstanceId
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from tests.sim.test_prefix_hits import config

FACTOR = 2.2


def members_of(factor: float) -> dict[InstanceId, Member]:
    """The instances as a proxy knows them after a load; its log leads to the same."""
    arrivals = [Arrival(at / 2, [10 + at] * 2_000, 40) for at in range(1, 9)]
    world = World(config(1), arrivals, [], seed=1, keep_log=True)
    for engine in world.cluster.engines.values():
        engine.slow_factor = factor
    assert world.run_before(4.5)
    proxy = world.cluster.proxies[0]
    assert proxy.log is not None
    assert rerun(proxy.log).difference is None
    return dict(proxy.control.policy.members)


def test_a_proxy_knows_that_an_instance_is_slower_than_its_profile() -> None:
    """Steps with prompts at the one that prefills, and without at the one that decodes; a known
    pace of 1.0 shows that these are no other cause's.
    """
    as_profiled, slower = members_of(1.0), members_of(FACTOR)

    prefill, decode = InstanceId("p0"), InstanceId("d0")
    assert as_profiled[prefill].times.slowness == 1.0
    assert slower[prefill].times.slowness == pytest.approx(FACTOR, rel=0.1)
    times_s = [each[prefill].times.table.seconds_for(2_000) for each in (as_profiled, slower)]
    assert times_s[1] == pytest.approx(FACTOR * times_s[0], rel=0.1)
    assert as_profiled[decode].times.step_s > as_profiled[decode].times.table.step_overhead_s
    assert slower[decode].times.step_s == pytest.approx(
        FACTOR * as_profiled[decode].times.step_s, rel=0.15
    )


@pytest.mark.parametrize("factor", [1.0, FACTOR])
def test_a_queue_is_reported_by_what_steps_take(factor: float) -> None:
    """Prompts of one length wait behind one that has just begun, after others of that length."""
    arrivals = [
        Arrival(from_s + at / 1000, [10 + at + int(from_s)] * 2_000, 4)
        for from_s in (1.0, 5.0)
        for at in range(4)
    ]
    world = World(config(1), arrivals, [], seed=1)
    engine = world.cluster.engines[InstanceId("p0")]
    engine.slow_factor = factor

    assert world.run_before(5.01)

    by_table_s = engine.scheduler.queued_s(engine.step_times._prefill)
    assert by_table_s > 0.1
    assert engine.load().queue_delay_s == pytest.approx(factor * by_table_s, rel=0.1)
