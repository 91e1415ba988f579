"""Prefix caches of simulated instances, and where the core sends prompts that begin alike."""

from array import array
from collections.abc import Sequence
from functools import partial
from math import inf

import pytest

from kvrs.config.file import Config
from kvrs.core.event_log import rerun
from kvrs.core.recovery import RecoveryPolicy
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.command import rows
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World

DOCUMENT, QUESTION = 4096, 256


def config(prefill: int, *, pages: int = 4_096, backup: str = "off", **policy: str) -> Config:
    nodes = [
        {
            "id": f"n{index}",
            "instances": [
                {"id": f"p{index}", "role": "prefill"},
                {"id": f"d{index}", "role": "decode"},
            ],
        }
        for index in range(prefill)
    ]
    engine = {"max_model_len": 16_384, "pages": pages, "max_batch_tokens": 2_048}
    return Config.model_validate(
        {
            "cluster": {"nodes": nodes, "engine": engine},
            "policy": {"admission": {"wait_s": 600.0}, **policy},
            "backup": {"mode": backup, "capacity_bytes": 1 << 40},
            "transfer": {"link_bytes_per_s": 50e9},
        }
    )


def questions(times_s: Sequence[float], document: int = 0) -> list[Arrival]:
    """Prompts with one document, of which each goes on in its own way."""
    text = [10 + document] * DOCUMENT
    return [
        Arrival(at_s, array("H", [*text, *[1_000 + round(at_s * 1_000) % 9_000] * QUESTION]), 4)
        for at_s in times_s
    ]


def outcome_of(world_config: Config, arrivals: list[Arrival]) -> Outcome:
    world = World(world_config, sorted(arrivals, key=lambda one: one.at_s), [], seed=1)
    world.run()
    return world.cluster.outcome


def test_a_burst_with_a_hot_prefix_finds_it() -> None:
    """All of its prompts are at the instance before the first of them is computed. None is taken
    for silent, though the last waits behind all others.
    """
    times_s = [1.0 + index / 1_000 for index in range(12)]

    outcome = outcome_of(config(1), questions(times_s))

    share = outcome.cached_tokens / outcome.prompt_tokens
    assert share > 0.85 * 11 / 12
    assert dict(rows([outcome]))["prompt tokens found in a prefix cache"] == f"{share:.1%}"
    assert outcome.recovered_streams == 0


def mixed(documents: int, count: int, every_s: float = 0.15) -> list[Arrival]:
    """Questions about several documents, each time about another one."""
    return [
        one
        for document in range(documents)
        for one in questions(
            [1.0 + (document + index * documents) * every_s for index in range(count)], document
        )
    ]


def test_prompts_find_more_where_they_are_placed_by_their_prefixes() -> None:
    """By load each instance computes nearly all of five documents; by prefix few do."""
    found = {
        route: outcome_of(config(4, route=route), mixed(documents=5, count=12))
        for route in ("load", "prefix")
    }

    shares = {route: each.cached_tokens / each.prompt_tokens for route, each in found.items()}
    assert shares["prefix"] > 0.75
    assert shares["load"] < shares["prefix"] - 0.15
    assert all(each.ended == {"complete": 60} for each in found.values())


def test_two_proxies_find_as_much_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They tell each other what they have sent; otherwise each has documents computed that the
    other one has sent elsewhere.
    """
    arrivals = mixed(documents=7, count=6)

    def share() -> float:
        world = World(config(4), sorted(arrivals, key=lambda one: one.at_s), [], seed=1, proxies=2)
        world.run()
        return world.cluster.outcome.cached_tokens / world.cluster.outcome.prompt_tokens

    shared = share()
    monkeypatch.setattr(RecoveryPolicy, "sent_elsewhere", lambda *_: None)
    own = share()

    assert shared > 0.75
    assert own < shared - 0.1


def test_a_death_takes_the_cache_along_and_the_log_is_run_again() -> None:
    """Prompts go elsewhere until the instance is back, and it begins empty. Each decision comes out
    again from the log, which has no prompts.
    """
    arrivals = sorted(mixed(documents=3, count=16), key=lambda one: one.at_s)
    deaths = named_deaths(
        parse_faults([{"when": {"at_s": 4.0}, "what": "kill", "whom": {"id": "p0"}}])
    )
    world = World(config(3), arrivals, deaths, seed=1, reload_s=1.0, keep_log=True)

    outcome = world.run()

    assert outcome.ended == {"complete": 48}
    assert outcome.cached_tokens / outcome.prompt_tokens > 0.5
    (proxy,) = world.cluster.proxies
    assert proxy.log is not None
    assert rerun(proxy.log).difference is None


def test_small_caches_load_from_agents_what_they_have_lost() -> None:
    """Each has room for two documents of nine. A log is run again, which has no prompts."""
    arrivals = sorted(mixed(documents=9, count=6), key=lambda one: one.at_s)
    found = {}
    for backup in ("off", "local", "remote"):
        world = World(
            config(3, pages=700, backup=backup), arrivals, [], seed=1, keep_log=backup == "remote"
        )
        outcome = world.run()
        found[backup] = outcome.cached_tokens / outcome.prompt_tokens
        assert outcome.ended == {"complete": 54}

    assert found["off"] < 0.4
    assert min(found["local"], found["remote"]) > found["off"] + 0.1
    (proxy,) = world.cluster.proxies
    assert proxy.log is not None
    assert any('"first_token"' in line for line in proxy.log)
    assert rerun(proxy.log).difference is None


def test_agents_that_do_not_answer_are_not_waited_for() -> None:
    """Each prompt is computed after a moment, perhaps behind one other that was to be loaded."""
    arrivals = sorted(mixed(documents=9, count=6, every_s=0.4), key=lambda one: one.at_s)

    def longest_s(backup: str) -> float:
        world = World(config(3, pages=700, backup=backup), arrivals, [], seed=1)
        for agent in world.cluster.agents.values():
            world.cluster.clock.after(5.0, partial(setattr, agent, "stalls_until_s", inf))
        world.run()
        streams = world.cluster.proxies[0].streams.values()
        return max(live.journal.received_s[0] - live.arrival.at_s for live in streams)

    assert longest_s("remote") < 2.5 * longest_s("off")
