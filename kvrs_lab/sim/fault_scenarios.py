"""Faults of a simulation: those of a file, or scenarios in the fault language, drawn at random."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvrs_lab.faults.language import Fault, parse_faults

Row = dict[str, Any]
FaultScenario = Callable[[Random, Sequence[str]], list[Row]]

ONE_RANK = "a rank, but not its memory"
ONE_DEVICE = "a rank and its device"


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """A fault that is due from `at_s` on, as soon as its victims are in the required state."""

    name: str
    at_s: float
    faults: tuple[Fault, ...] = ()


def kill(whom: Row, **when: Any) -> Row:
    return {"when": when or {"streams_at_least": 1}, "what": "kill", "whom": whom}


def _any(role: str) -> Row:
    return {"role": role, "pick": "random"}


def _all(role: str) -> Row:
    return {"role": role, "pick": "all"}


def lasting(what: str, whom: Row, for_s: float, **more: Any) -> Row:
    return {"when": {"at_s": 0.0}, "what": what, "whom": whom, "for_s": for_s} | more


def _damage(role: str, pages: int) -> Row:
    return {"when": {"at_s": 0.0}, "what": "corrupt_page", "whom": _all(role), "pages": pages}


def _link(rng: Random, nodes: Sequence[str]) -> Row:
    return {"link": rng.sample(nodes, 2)}


_DECODE = kill(_any("decode"))
_RECOVERY = {"phase": "recovery"}
_RANK, _DEVICE = {"rank": "random"}, {"what": "lose_device"}

FAULT_SCENARIOS: dict[str, FaultScenario] = {
    "prefill before the hand-off": lambda r, n: [kill(_any("prefill"), phase="prefill")],
    "prefill during a hand-off": lambda r, n: [kill(_any("prefill"), phase="handoff")],
    "prefill after the hand-off": lambda r, n: [kill(_any("prefill"), phase="decode")],
    "prefill during a recovery": lambda r, n: [_DECODE, kill(_any("prefill"), **_RECOVERY)],
    "all prefill instances": lambda r, n: [kill(_all("prefill"))],
    "decode": lambda r, n: [_DECODE],
    "decode near the end": lambda r, n: [kill(_any("decode"), phase="near_end")],
    "target during a recovery": lambda r, n: [_DECODE, kill(_any("decode"), **_RECOVERY)],
    "two decode instances at once": lambda r, n: [_DECODE, _DECODE],
    "all decode instances": lambda r, n: [kill(_all("decode"))],
    "agent": lambda r, n: [kill(_any("agent"))],
    "agent during a recovery": lambda r, n: [_DECODE, kill(_any("agent"), **_RECOVERY)],
    "all agents": lambda r, n: [kill(_all("agent"))],
    "a node with its agent": lambda r, n: [kill({"node": r.choice(n)})],
    "decode frozen": lambda r, n: [lasting("stop", _any("decode"), r.uniform(0.1, 9.0))],
    "prefill frozen": lambda r, n: [lasting("stop", _any("prefill"), r.uniform(0.1, 9.0))],
    "agent frozen": lambda r, n: [lasting("stop", _any("agent"), r.uniform(0.1, 9.0))],
    "a node frozen": lambda r, n: [lasting("stop", {"node": r.choice(n)}, r.uniform(0.1, 9.0))],
    "frozen and killed": lambda r, n: [lasting("stop", _any("decode"), 9.0), _DECODE],
    "decode ten times slower": lambda r, n: [
        lasting("slow", _any("decode"), r.uniform(0.5, 4.0), factor=10.0)
    ],
    "prefill ten times slower": lambda r, n: [
        lasting("slow", _any("prefill"), r.uniform(0.5, 4.0), factor=10.0)
    ],
    "damaged pages of prefill": lambda r, n: [_damage("prefill", r.randint(1, 4)), _DECODE],
    "damaged pages of agents": lambda r, n: [_damage("agent", r.randint(1, 4)), _DECODE],
    "damaged checkpoints": lambda r, n: [_damage("decode", r.randint(1, 4)), _DECODE],
    "a link cut": lambda r, n: [lasting("link_cut", _link(r, n), r.uniform(0.5, 6.0)), _DECODE],
    "a slow link": lambda r, n: [
        lasting("link_rate", _link(r, n), r.uniform(0.5, 6.0), bytes_per_s=1e8),
        _DECODE,
    ],
    ONE_RANK: lambda r, n: [kill(_any("decode") | _RANK)],
    ONE_DEVICE: lambda r, n: [kill(_any("decode") | _RANK) | _DEVICE],
}


def random_deaths(
    rng: Random,
    count: int,
    span_s: float,
    nodes: Sequence[str],
    *,
    has_agents: bool,
    has_ranks: bool,
    scenarios: Mapping[str, FaultScenario] = FAULT_SCENARIOS,
) -> list[FaultEvent]:
    """Draw `count` deaths at random moments of the span. Scenarios that need an agent, ranks or a
    second node are left out if the cluster has none.
    """
    names = [
        name
        for name in scenarios
        if (has_agents or "agent" not in name)
        and (has_ranks or name not in (ONE_RANK, ONE_DEVICE))
        and (len(nodes) > 1 or "link" not in name)
    ]
    deaths: list[FaultEvent] = []
    for name in rng.sample(names, min(count, len(names))) + rng.choices(
        names, k=max(0, count - len(names))
    ):
        at_s = rng.uniform(0.05, span_s)
        deaths.append(drawn_death(rng, name, scenarios[name], at_s, nodes))
    return sorted(deaths, key=lambda death: death.at_s)


def drawn_death(
    rng: Random, name: str, scenario: FaultScenario, at_s: float, nodes: Sequence[str]
) -> FaultEvent:
    """Draw the faults of a scenario, from `at_s` on."""
    rows = [
        row | {"when": row["when"] | {"at_s": at_s + row["when"].get("at_s", 0.0)}}
        for row in scenario(rng, nodes)
    ]
    return FaultEvent(name, at_s, tuple(parse_faults(rows)) if rows else ())


def named_deaths(faults: Sequence[Fault]) -> list[FaultEvent]:
    """The faults of a file, each with its label and time."""
    return [FaultEvent(fault.label, fault.when.at_s or 0.0, (fault,)) for fault in faults]
