"""The cluster, load and faults of `kvrs lab demo` in virtual time."""

import pytest

from experiments.kills.simulated import TINY_BYTES_PER_TOKEN
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName
from kvrs.profiles.catalog import kv_geometry
from kvrs_lab.demo import FEWEST_REQUESTS, PACE, default_faults, demo_config, scaled_requests
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.generator import GeneratorSettings, generate


def config_of(seed: int) -> Config:
    """The demo's, with links and agents that have room for pages of the model of the profile."""
    document = demo_config(PolicyName.AUTO, seed).model_dump(mode="json")
    factor = kv_geometry(PACE).bytes_per_token / TINY_BYTES_PER_TOKEN
    document["transfer"]["link_bytes_per_s"] *= factor
    document["policy"]["assumed_link_bytes_per_s"] *= factor
    document["backup"]["capacity_bytes"] = int(document["backup"]["capacity_bytes"] * factor)
    return parse_config(document)


def simulated(requests: int, seed: int) -> Outcome:
    load = scaled_requests(generate(GeneratorSettings(requests=requests), seed), seed)
    arrivals = [Arrival(each.arrival_s, each.prompt_ids, each.max_tokens) for each in load]
    deaths = named_deaths(default_faults(requests))
    return World(config_of(seed), arrivals, deaths, seed=seed, reload_s=1.5, probes=True).run()


@pytest.mark.parametrize("seed", range(5))
def test_two_kills_let_auto_recompute_migrate_and_restore(seed: int) -> None:
    """The demo shows a choice, whatever the trace: none of the three is forced, and no stream is
    lost.
    """
    outcome = simulated(60, seed)

    assert not outcome.never_due
    assert outcome.ended == {"complete": 60}
    assert all(outcome.recoveries[option] for option in ("recompute", "migrate", "restore"))


@pytest.mark.parametrize("seed", range(5))
def test_the_fewest_allowed_requests_are_enough_for_both_kills(seed: int) -> None:
    """A fault that never comes due makes the command fail."""
    assert not simulated(FEWEST_REQUESTS, seed).never_due
