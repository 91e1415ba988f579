"""An instance that fails every call while its reports are healthy, in virtual time."""

import json

import pytest

from kvrs.core import outliers
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.world import World
from kvrs_testkit.death_scenarios import SICK_FOR_S
from kvrs_testkit.examples import scaled
from kvrs_testkit.random_worlds import sick


def starts_there(world: World, outcome: Outcome) -> tuple[int, int]:
    """The attempts that start at the sick instance after 5 s, and all attempts of that time."""
    (hit,) = outcome.hits
    (proxy,) = world.cluster.proxies
    entries = map(json.loads, (proxy.log or [])[1:])
    plans = [
        action["plan"]
        for entry in entries
        if hit.at_s + 5.0 < entry["at_s"] < hit.at_s + SICK_FOR_S
        for action in entry["actions"]
        if action["kind"] == "Start"
    ]
    there = sum(hit.whom in (plan["prefill"], plan["decode"]) for plan in plans)
    return there, len(plans)


@pytest.mark.parametrize("seed", range(scaled(4)))
def test_sick_instance_costs_no_stream_and_gets_few(seed: int) -> None:
    """After 5 s at most 2 % of the attempts start there, whatever it answers."""
    world = sick(seed, keep_log=True)

    outcome = world.run()

    there, starts = starts_there(world, outcome)
    assert outcome.ended == {"complete": 800}
    assert starts > 150
    assert there <= 0.02 * starts
    assert outcome.actions["Readmitted"] == min(1, outcome.actions["Ejected"])


def test_simulator_notices_a_policy_that_does_not_look_at_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound above can be broken: what fails every call at once gets its share and more."""
    monkeypatch.setattr(outliers, "failed", lambda state, stream, event: None)

    shares = []
    for seed in range(4):
        world = sick(seed, keep_log=True)
        there, starts = starts_there(world, world.run())
        shares.append(there / starts)

    assert max(shares) > 0.1
