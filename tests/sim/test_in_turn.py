"""Every kind of death and fault, one after the other, and processes that are half dead, in virtual
time. `experiments/kills` has more seeds.
"""

from collections import Counter
from random import Random
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.core.fleet.silence import InstanceProgress
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_testkit import half_deaths
from kvrs_testkit.death_scenarios import (
    CUT_OFF,
    HUNG,
    ONE_WAY,
    PAGES_STALL,
    PROXY_FROZEN,
    named_death,
)
from kvrs_testkit.disturbances import DisturbedWorld
from kvrs_testkit.examples import scaled
from kvrs_testkit.random_worlds import KINDS, in_turn
from tests.sim.stepwise import assert_same_step_by_step, outcome_told

SEEDS = range(scaled(1))
LONG_S = 120.0


@pytest.mark.parametrize("seed", SEEDS)
def test_no_kind_of_death_costs_a_stream(seed: int) -> None:
    """Instances, ranks, devices, nodes, links, agents, proxies, and processes that are half dead;
    all invariants are checked on the way.
    """
    outcome = outcome_told(in_turn, seed)

    assert set(outcome.ended) == {"complete"}
    assert {hit.death for hit in outcome.hits} == set(KINDS)
    assert outcome.never_due == []


@pytest.mark.nightly
def test_every_kind_of_death_hits_streams() -> None:
    """Guards the test above."""
    hit: Counter[str] = Counter()
    for one in (
        one for seed in range(max(6, scaled(1))) for one in outcome_told(in_turn, seed).hits
    ):
        hit[one.death] += one.streams

    assert [name for name in KINDS if not hit[name]] == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_is_the_same_step_by_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is different where steps of steady sequences are counted."""
    assert_same_step_by_step(in_turn, [seed], monkeypatch)


def half_dead(name: str, seed: int) -> World:
    """Three pairs with checkpoints and three proxies; after 3 s of 10 something is half dead."""
    nodes: list[dict[str, Any]] = [
        {
            "id": f"n{n}",
            "instances": [{"id": f"p{n}", "role": "prefill"}, {"id": f"d{n}", "role": "decode"}],
        }
        for n in range(3)
    ]
    document = {
        "proxy": {"token_gap_s": 2.0},
        "cluster": {"nodes": nodes},
        "backup": {"mode": "both", "capacity_bytes": 64 << 30},
        "transfer": {"lease_s": 10.0},  # A world is at rest when two of them are over.
    }
    rng = Random(seed)
    arrivals = [
        Arrival(at_s, tuple(rng.choices(range(50_000), k=100)), 100, is_keyed=True)
        for at_s in sorted(rng.uniform(0.5, 10.5) for _ in range(80))
    ]
    death = named_death(rng, name, 3.0)
    return DisturbedWorld(parse_config(document), arrivals, [death], seed=seed, proxies=3)


@pytest.mark.parametrize("seed", range(scaled(1)))
@pytest.mark.parametrize("name", [HUNG, CUT_OFF, PROXY_FROZEN, PAGES_STALL, ONE_WAY])
def test_streams_go_on_elsewhere_while_something_is_half_dead(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two minutes: long before its end all streams have theirs, each once."""
    monkeypatch.setattr(half_deaths.HalfDeaths, "_for_s", lambda self: LONG_S)
    monkeypatch.setattr(half_deaths, "PATIENCE_S", 5.0)

    outcome = half_dead(name, seed).run()

    assert outcome.ended == {"complete": 80}
    if name == PROXY_FROZEN:  # It learns how its streams have ended when it wakes.
        assert outcome.adopted == sum(hit.streams for hit in outcome.hits) > 0
    else:
        assert outcome.span_s < 60.0


def test_simulator_notices_a_proxy_that_waits_for_what_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound above can be broken."""
    monkeypatch.setattr(half_deaths.HalfDeaths, "_for_s", lambda self: LONG_S)
    monkeypatch.setattr(InstanceProgress, "token_gap_s", lambda *of: 1e6)
    monkeypatch.setattr(InstanceProgress, "first_token_s", lambda *of: 1e6)

    assert max(half_dead(HUNG, seed).run().span_s for seed in range(3)) > 60.0
