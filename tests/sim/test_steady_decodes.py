"""Decode steps of steady sequences are counted, and nothing is different by it: each world here is
run twice, the second time with each step of each sequence worked out by itself.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.faults.language import parse_faults
from kvrs.sim import scenarios
from kvrs.sim.calls import SimRun
from kvrs.sim.clients import records_of
from kvrs.sim.fault_scenarios import named_deaths
from kvrs.sim.flows import TokenFlow
from kvrs.sim.steady import SteadyDecodes
from kvrs.sim.streams import Arrival
from kvrs.sim.world import World

SEEDS = range(24)


def all_of(world: World) -> dict[str, Any]:
    """Everything that a run tells: each token's time, each event and action, the books' figures."""
    outcome = asdict(world.run())
    logs = [world.cluster.log, *(proxy.log or [] for proxy in world.cluster.proxies)]
    return {
        "outcome": outcome,
        "records": [asdict(each) for each in records_of(world.arrivals, world.cluster.proxies)],
        "delivered": [
            {name: each.last_s for name, each in proxy.control.progress.delivered.items()}
            for proxy in world.cluster.proxies
        ],
        "logs": [hashlib.sha256("\n".join(lines).encode()).hexdigest() for lines in logs],
    }


def nothing_is_steady(steady: SteadyDecodes, run: SimRun) -> None:
    pass


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(SteadyDecodes, "take", nothing_is_steady)


@pytest.mark.parametrize(
    "drawn",
    [
        scenarios.scenario,
        scenarios.peers,
        scenarios.contended,
        scenarios.pipelines,
        scenarios.in_turn,
        scenarios.sick,
        scenarios.poisoned,
    ],
)
def test_a_world_is_the_same_step_by_step(
    drawn: Callable[..., World], step_by_step: Callable[[], None]
) -> None:
    """Deaths, freezes, cut links, drains, aborts, preemption and proxies that die in between."""
    seeds = SEEDS if drawn in (scenarios.scenario, scenarios.peers) else SEEDS[:6]
    counted = [all_of(drawn(seed, keep_log=True)) for seed in seeds]
    step_by_step()

    assert [all_of(drawn(seed, keep_log=True)) for seed in seeds] == counted


def _long(**engine: Any) -> World:
    """Two instances with agents, one of which is killed while all of its streams are steady."""
    names = ("a", "b")
    config = parse_config(
        {
            "cluster": {
                "engine": {"max_model_len": 1024, "pages": 600, "max_running": 32} | engine,
                "nodes": [
                    {"id": name, "instances": [{"id": f"w-{name}", "role": "both"}]}
                    for name in names
                ],
            },
            "backup": {"mode": "remote", "capacity_bytes": 8 << 30},
        }
    )
    arrivals = [
        Arrival(1.0 + 0.13 * number, [(number * 31 + at) % 50_000 for at in range(70)], 230)
        for number in range(24)
    ]
    kill = {"when": {"at_s": 4.0}, "what": "kill", "whom": {"id": "w-a"}}
    return World(config, arrivals, named_deaths(parse_faults([kill])), seed=3, keep_log=True)


@pytest.mark.parametrize(
    "engine",
    [{}, {"pages": 90}, {"max_running": 5}, {"max_batch_tokens": 16}, {"page_size_tokens": 1}],
)
def test_long_outputs_are_the_same_step_by_step(
    engine: dict[str, int], step_by_step: Callable[[], None]
) -> None:
    """With pages for all, for a few, and pages of one token, in each of which something happens."""
    counted = all_of(_long(**engine))
    step_by_step()

    assert all_of(_long(**engine)) == counted


def test_most_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: there is something to compare."""
    counted = 0
    came = TokenFlow.came

    def noted(flow: TokenFlow, calls: int, now_s: float) -> None:
        nonlocal counted
        counted += calls
        came(flow, calls, now_s)

    monkeypatch.setattr(TokenFlow, "came", noted)
    outcome = _long().run()

    assert counted > outcome.tokens * 0.7
