"""All deaths that a stream may meet in a simulation: stories in the language of faults, and
disturbances that no order to a process can cause.
"""

from collections.abc import Sequence
from random import Random

from kvrs_lab.sim.fault_scenarios import (
    FAULT_SCENARIOS,
    ONE_DEVICE,
    ONE_RANK,
    FaultEvent,
    FaultScenario,
    Row,
    drawn_death,
    kill,
    lasting,
)

# What no order to a process can do, and a simulator can: `disturbances.py`.
LOST_REPORTS = "lost reports"
ERROR_EVENT = "error event"
GPU_DEGRADED = "a GPU degraded"
GPU_FAILING = "a GPU failing"
DRAINED = "an instance drained"
DRAIN_ORDERED = "an instance drained by an operator"
REMOVED = "an instance removed and added again"
SICK_FOR_S = 15.0
SICK = "an instance that fails all calls"  # Not drawn among the others: `random_worlds.sick`.
PROXY_KILLED = "a proxy"
FALSE_GOSSIP = "a false death by gossip"
RELOADED = "other settings"
TWO_RANKS = "two ranks at once"
TOO_MANY_RANKS = "all ranks but one, too few for the model"
MID_MOVE = "a rank in mid-move of another one"
LATE = "a re-forming five times as long as said"
LEAVES = "a rank that leaves by order"  # Not drawn among the others: `random_worlds.ranked`.
# Half dead: `half_deaths.py`.
HUNG = "an instance that computes nothing"
CUT_OFF = "a proxy cut off from an instance"
PROXY_FROZEN = "a proxy frozen"
PAGES_STALL = "a page port that stalls"
ONE_WAY = "a link cut one way"

_OF_ALL = (
    LOST_REPORTS,
    ERROR_EVENT,
    GPU_DEGRADED,
    GPU_FAILING,
    DRAINED,
    PROXY_KILLED,
    FALSE_GOSSIP,
    RELOADED,
    DRAIN_ORDERED,
    REMOVED,
)
_BY_ORDER_OF_RANKS = (ONE_RANK, ONE_DEVICE)
_OF_RANKS = (TWO_RANKS, TOO_MANY_RANKS, MID_MOVE, LATE)
_HALF_DEATHS = (HUNG, CUT_OFF, PROXY_FROZEN, PAGES_STALL, ONE_WAY)


def _nothing(rng: Random, nodes: Sequence[str]) -> list[Row]:
    """A disturbance has no fault of the language."""
    return []


# Worlds draw from it in this order: another one makes other worlds of the same seeds.
DEATH_SCENARIOS: dict[str, FaultScenario] = {
    **{
        name: scenario
        for name, scenario in FAULT_SCENARIOS.items()
        if name not in _BY_ORDER_OF_RANKS
    },
    **dict.fromkeys(_OF_ALL, _nothing),
    **{name: FAULT_SCENARIOS[name] for name in _BY_ORDER_OF_RANKS},
    **dict.fromkeys((*_OF_RANKS, *_HALF_DEATHS), _nothing),
}

# Of instances with a host for each stage, by their ids; drawn by `random_worlds.pipelines`.
STAGE_SCENARIOS: dict[str, FaultScenario] = {
    "a host": lambda r, n: [_host(r.choice(n))],
    "a host of each of two instances": lambda r, n: [_host(name) for name in r.sample(n, 2)],
    "two hosts of an instance": lambda r, n: [
        _host(name, stage) for name in [r.choice(n)] for stage in (0, 1)
    ],
    # The same stage: by then that of its donor, if there is one.
    "a host, and the donor's": lambda r, n: [
        _host(name, later_s=later_s)
        for name in [r.choice(n)]
        for later_s in (0.0, r.uniform(0.0, 1.0))
    ],
    "a host, as another one loads": lambda r, n: [
        _host(name, later_s=later_s)
        for name in [r.choice(n)]
        for later_s in (0.0, r.uniform(0.0, 3.0))
    ],
    "a host, and the process that borrows": lambda r, n: [
        row
        for name in [r.choice(n)]
        for row in (_host(name), kill({"id": name}, at_s=r.uniform(0.0, 1.0)))
    ],
    "a host, and the process that lends": lambda r, n: [
        row
        for name, other in [r.sample(n, 2)]
        for row in (_host(name), kill({"id": other}, at_s=r.uniform(0.0, 1.0)))
    ],
    "a host, and a process stopped": lambda r, n: [
        _host(r.choice(n)),
        lasting("stop", {"id": r.choice(n)}, r.uniform(0.1, 3.0)),
    ],
}


def _host(name: str, stage: int = 1, later_s: float = 0.0) -> Row:
    return kill({"id": name, "stage": stage}, at_s=later_s)


def scenarios_of(*, has_ranks: bool, proxies: int) -> dict[str, FaultScenario]:
    """Scenarios of a world; those of ranks, and of a proxy, only where there are several."""
    return {
        name: scenario
        for name, scenario in DEATH_SCENARIOS.items()
        if (has_ranks or name not in _OF_RANKS) and (proxies > 1 or name != PROXY_KILLED)
    }


def named_death(rng: Random, name: str, at_s: float, nodes: Sequence[str] = ()) -> FaultEvent:
    """The death of a name, from `at_s` on; `nodes`: for those of stages, instances."""
    scenario = (DEATH_SCENARIOS | STAGE_SCENARIOS).get(name, _nothing)
    return drawn_death(rng, name, scenario, at_s, nodes)
