"""Decode steps that are worked out one by one, and everything that a run tells."""

import hashlib
from dataclasses import asdict
from typing import Any

import pytest

from kvrs.sim.calls import SimRun
from kvrs.sim.clients import records_of
from kvrs.sim.steady import SteadyDecodes
from kvrs.sim.world import World


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


def nothing_is_steady(steady: SteadyDecodes, run: SimRun) -> None:
    pass


def step_by_step(patch: pytest.MonkeyPatch) -> None:
    """From now on each step of each sequence is worked out by itself."""
    patch.setattr(SteadyDecodes, "take", nothing_is_steady)
