"""All deaths that a stream may meet, each a short story in the language of faults, in random order
at random moments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvrs_lab.faults.language import Fault, parse_faults

Row = dict[str, Any]
FaultScenario = Callable[[Random, Sequence[str]], list[Row]]

# What no order to a process can do, and a simulator can.
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
ONE_RANK = "a rank, but not its memory"
ONE_DEVICE = "a rank and its device"
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


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """A fault that is due from `at_s` on, as soon as its victims are in the state it is about."""

    name: str
    at_s: float
    faults: tuple[Fault, ...] = ()  # Without any it is one of those above.


def _kill(whom: Row, **when: Any) -> Row:
    return {"when": when or {"streams_at_least": 1}, "what": "kill", "whom": whom}


def _any(role: str) -> Row:
    return {"role": role, "pick": "random"}


def _all(role: str) -> Row:
    return {"role": role, "pick": "all"}


def _lasting(what: str, whom: Row, for_s: float, **more: Any) -> Row:
    return {"when": {"at_s": 0.0}, "what": what, "whom": whom, "for_s": for_s} | more


def _damage(role: str, pages: int) -> Row:
    return {"when": {"at_s": 0.0}, "what": "corrupt_page", "whom": _all(role), "pages": pages}


def _link(rng: Random, nodes: Sequence[str]) -> Row:
    return {"link": rng.sample(nodes, 2)}


_DECODE = _kill(_any("decode"))
_RECOVERY = {"phase": "recovery"}
_RANK, _DEVICE = {"rank": "random"}, {"what": "lose_device"}
_OF_RANKS = ("a rank", "re-forming", "two ranks", "all ranks")

FAULT_SCENARIOS: dict[str, FaultScenario] = {
    "prefill before the hand-off": lambda r, n: [_kill(_any("prefill"), phase="prefill")],
    "prefill during a hand-off": lambda r, n: [_kill(_any("prefill"), phase="handoff")],
    "prefill after the hand-off": lambda r, n: [_kill(_any("prefill"), phase="decode")],
    "prefill during a recovery": lambda r, n: [_DECODE, _kill(_any("prefill"), **_RECOVERY)],
    "all prefill instances": lambda r, n: [_kill(_all("prefill"))],
    "decode": lambda r, n: [_DECODE],
    "decode near the end": lambda r, n: [_kill(_any("decode"), phase="near_end")],
    "target during a recovery": lambda r, n: [_DECODE, _kill(_any("decode"), **_RECOVERY)],
    "two decode instances at once": lambda r, n: [_DECODE, _DECODE],
    "all decode instances": lambda r, n: [_kill(_all("decode"))],
    "agent": lambda r, n: [_kill(_any("agent"))],
    "agent during a recovery": lambda r, n: [_DECODE, _kill(_any("agent"), **_RECOVERY)],
    "all agents": lambda r, n: [_kill(_all("agent"))],
    "a node with its agent": lambda r, n: [_kill({"node": r.choice(n)})],
    "decode frozen": lambda r, n: [_lasting("stop", _any("decode"), r.uniform(0.1, 9.0))],
    "prefill frozen": lambda r, n: [_lasting("stop", _any("prefill"), r.uniform(0.1, 9.0))],
    "agent frozen": lambda r, n: [_lasting("stop", _any("agent"), r.uniform(0.1, 9.0))],
    "a node frozen": lambda r, n: [_lasting("stop", {"node": r.choice(n)}, r.uniform(0.1, 9.0))],
    "frozen and killed": lambda r, n: [_lasting("stop", _any("decode"), 9.0), _DECODE],
    "decode ten times slower": lambda r, n: [
        _lasting("slow", _any("decode"), r.uniform(0.5, 4.0), factor=10.0)
    ],
    "prefill ten times slower": lambda r, n: [
        _lasting("slow", _any("prefill"), r.uniform(0.5, 4.0), factor=10.0)
    ],
    "damaged pages of prefill": lambda r, n: [_damage("prefill", r.randint(1, 4)), _DECODE],
    "damaged pages of agents": lambda r, n: [_damage("agent", r.randint(1, 4)), _DECODE],
    "damaged checkpoints": lambda r, n: [_damage("decode", r.randint(1, 4)), _DECODE],
    "a link cut": lambda r, n: [_lasting("link_cut", _link(r, n), r.uniform(0.5, 6.0)), _DECODE],
    "a slow link": lambda r, n: [
        _lasting("link_rate", _link(r, n), r.uniform(0.5, 6.0), bytes_per_s=1e8),
        _DECODE,
    ],
    LOST_REPORTS: lambda r, n: [],
    ERROR_EVENT: lambda r, n: [],
    GPU_DEGRADED: lambda r, n: [],
    GPU_FAILING: lambda r, n: [],
    DRAINED: lambda r, n: [],
    PROXY_KILLED: lambda r, n: [],
    FALSE_GOSSIP: lambda r, n: [],
    RELOADED: lambda r, n: [],
    DRAIN_ORDERED: lambda r, n: [],
    REMOVED: lambda r, n: [],
    ONE_RANK: lambda r, n: [_kill(_any("decode") | _RANK)],
    ONE_DEVICE: lambda r, n: [_kill(_any("decode") | _RANK) | _DEVICE],
    TWO_RANKS: lambda r, n: [],
    TOO_MANY_RANKS: lambda r, n: [],
    MID_MOVE: lambda r, n: [],
    LATE: lambda r, n: [],
    HUNG: lambda r, n: [],
    CUT_OFF: lambda r, n: [],
    PROXY_FROZEN: lambda r, n: [],
    PAGES_STALL: lambda r, n: [],
    ONE_WAY: lambda r, n: [],
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
        for row in (_host(name), _kill({"id": name}, at_s=r.uniform(0.0, 1.0)))
    ],
    "a host, and the process that lends": lambda r, n: [
        row
        for name, other in [r.sample(n, 2)]
        for row in (_host(name), _kill({"id": other}, at_s=r.uniform(0.0, 1.0)))
    ],
    "a host, and a process stopped": lambda r, n: [
        _host(r.choice(n)),
        _lasting("stop", {"id": r.choice(n)}, r.uniform(0.1, 3.0)),
    ],
}


def _host(name: str, stage: int = 1, later_s: float = 0.0) -> Row:
    return _kill({"id": name, "stage": stage}, at_s=later_s)


def random_deaths(
    rng: Random,
    count: int,
    span_s: float,
    nodes: Sequence[str],
    *,
    has_agents: bool,
    has_ranks: bool,
    proxies: int,
) -> list[FaultEvent]:
    """So many, at any moment of the span. What needs an agent, ranks, a second node or a second
    proxy is left out where there is none.
    """
    names = [
        name
        for name in FAULT_SCENARIOS
        if (has_agents or "agent" not in name)
        and (has_ranks or not any(what in name for what in _OF_RANKS))
        and (len(nodes) > 1 or "link" not in name)
        and (proxies > 1 or name != PROXY_KILLED)
    ]
    deaths: list[FaultEvent] = []
    for name in rng.sample(names, min(count, len(names))) + rng.choices(
        names, k=max(0, count - len(names))
    ):
        deaths.append(named_death(rng, name, rng.uniform(0.05, span_s), nodes))
    return sorted(deaths, key=lambda death: death.at_s)


def named_death(rng: Random, name: str, at_s: float, nodes: Sequence[str] = ()) -> FaultEvent:
    """That of a name, from `at_s` on; `nodes`: for those of stages, instances."""
    found = (FAULT_SCENARIOS | STAGE_SCENARIOS).get(name)
    rows = [
        row | {"when": row["when"] | {"at_s": at_s + row["when"].get("at_s", 0.0)}}
        for row in (found(rng, nodes) if found is not None else ())
    ]
    return FaultEvent(name, at_s, tuple(parse_faults(rows)) if rows else ())


def named_deaths(faults: Sequence[Fault]) -> list[FaultEvent]:
    """Those of a file, by what they say of themselves."""
    return [FaultEvent(fault.label, fault.when.at_s or 0.0, (fault,)) for fault in faults]
