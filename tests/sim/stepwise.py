"""Decode steps of steady sequences are counted, and nothing is different by it: worlds are run
again with each step of each sequence worked out by itself, and everything that a run tells is
compared.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

from kvrs_lab.sim.calls import SimRun
from kvrs_lab.sim.clients import records_of
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.steady import SteadyDecodes
from kvrs_lab.sim.world import World

Drawn = Callable[..., World]  # From a seed.


def all_of(world: World) -> dict[str, Any]:
    """Everything that a run tells: each token's time, each event and action, the books' figures."""
    outcome = world.run()
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


@cache
def told(drawn: Drawn, seed: int) -> dict[str, Any]:
    """Everything that the run of one world tells, for all tests of a file."""
    return all_of(drawn(seed, keep_log=True))


def outcome_told(drawn: Drawn, seed: int) -> Outcome:
    outcome: Outcome = told(drawn, seed)["outcome"]
    return outcome


def assert_same_step_by_step(
    drawn: Drawn, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = [told(drawn, seed) for seed in seeds]
    step_by_step(monkeypatch)

    assert [all_of(drawn(seed, keep_log=True)) for seed in seeds] == counted


def nothing_is_steady(steady: SteadyDecodes, run: SimRun) -> None:
    pass


def step_by_step(patch: pytest.MonkeyPatch) -> None:
    """From now on each step of each sequence is worked out by itself."""
    patch.setattr(SteadyDecodes, "take", nothing_is_steady)
