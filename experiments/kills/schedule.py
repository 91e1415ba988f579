"""A random schedule of all fault scenarios, each of one or two faults, in random order."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvrs_lab.faults.language import Fault, parse_faults

HIT_AT_LEAST = 8
FROZEN_S = 4.0
SLOW_S = 6.0
CUT_S = 4.0
# The first streams need a moment to fill the instances; killed processes are back after about five
# seconds, and then the load needs a moment to fill it again.
FIRST_S = 4.0
GAP_S = (7.0, 10.0)
# The last scenario needs streams until its end.
LAST_S = 12.0

Row = dict[str, Any]
Scenario = Callable[[random.Random, Sequence[str]], list[Row]]


def _kill(whom: Row, **when: Any) -> Row:
    return {"when": when, "what": "kill", "whom": whom}


def _any(role: str) -> Row:
    return {"role": role, "pick": "random"}


def _all(role: str) -> Row:
    return {"role": role, "pick": "all"}


def _lasting(what: str, whom: Row, for_s: float, **more: Any) -> Row:
    return {
        "when": {"streams_at_least": HIT_AT_LEAST},
        "what": what,
        "whom": whom,
        "for_s": for_s,
    } | more


def _damage(whom: Row, pages: int) -> Row:
    return {"when": {"at_s": 0.0}, "what": "corrupt_page", "whom": whom, "pages": pages}


def _link(rng: random.Random, nodes: Sequence[str]) -> Row:
    return {"link": rng.sample(nodes, 2)}


def _node(rng: random.Random, nodes: Sequence[str]) -> Row:
    return {"node": rng.choice(nodes)}


_DECODE = _kill(_any("decode"), inflight_at_least=HIT_AT_LEAST)
_IN_RECOVERY = {"phase": "recovery", "in_phase_at_least": 2, "streams_at_least": HIT_AT_LEAST}

FAULT_SCENARIOS: dict[str, Scenario] = {
    "prefill before the hand-off": lambda r, n: [
        _kill(_any("prefill"), phase="prefill", streams_at_least=HIT_AT_LEAST)
    ],
    "prefill during a hand-off": lambda r, n: [
        _kill(_any("prefill"), phase="handoff", streams_at_least=HIT_AT_LEAST)
    ],
    "prefill after the hand-off": lambda r, n: [
        _kill(_any("prefill"), phase="decode", in_phase_at_least=HIT_AT_LEAST)
    ],
    "decode": lambda r, n: [_DECODE],
    "agent": lambda r, n: [_kill(_any("agent"), streams_at_least=HIT_AT_LEAST)],
    "target during a recovery": lambda r, n: [_DECODE, _kill(_any("decode"), **_IN_RECOVERY)],
    "agent during a recovery": lambda r, n: [_DECODE, _kill(_any("agent"), **_IN_RECOVERY)],
    "prefill during a recovery": lambda r, n: [
        _DECODE,
        _kill(_any("prefill"), phase="recovery", streams_at_least=HIT_AT_LEAST),
    ],
    "all decode instances": lambda r, n: [_kill(_all("decode"), streams_at_least=HIT_AT_LEAST)],
    "all agents": lambda r, n: [_kill(_all("agent"), streams_at_least=HIT_AT_LEAST)],
    "two decode instances at once": lambda r, n: [_DECODE, _DECODE],
    "a node with its agent": lambda r, n: [_kill(_node(r, n), streams_at_least=HIT_AT_LEAST)],
    "prefill frozen": lambda r, n: [_lasting("stop", _any("prefill"), FROZEN_S)],
    "decode frozen": lambda r, n: [_lasting("stop", _any("decode"), FROZEN_S)],
    "agent frozen": lambda r, n: [_lasting("stop", _any("agent"), FROZEN_S)],
    "a node frozen": lambda r, n: [_lasting("stop", _node(r, n), FROZEN_S)],
    "decode ten times slower": lambda r, n: [_lasting("slow", _any("decode"), SLOW_S, factor=10)],
    "prefill ten times slower": lambda r, n: [_lasting("slow", _any("prefill"), SLOW_S, factor=10)],
    "flipped bits of prefill": lambda r, n: [_damage(_all("prefill"), 4), _DECODE],
    "flipped bits of agents": lambda r, n: [_damage(_all("agent"), 4), _DECODE],
    "flipped bits of checkpoints": lambda r, n: [_damage(_all("decode"), 4), _DECODE],
    "a link cut": lambda r, n: [_lasting("link_cut", _link(r, n), CUT_S)],
    "a link cut during a recovery": lambda r, n: [
        _lasting("link_cut", _link(r, n), CUT_S),
        _DECODE,
    ],
}


@dataclass(frozen=True, slots=True)
class Act:
    scenario: str
    at_s: float
    faults: list[Fault]


def schedule(span_s: float, seed: int, nodes: Sequence[str], only: Sequence[str] = ()) -> list[Act]:
    """Scenarios at random times, in rounds: each once, in random order, before any is repeated."""
    rng = random.Random(seed)
    acts: list[Act] = []
    at_s = FIRST_S
    for scenario in _rounds(rng, list(only or FAULT_SCENARIOS)):
        if at_s > max(FIRST_S, span_s - LAST_S):
            return acts
        rows = [
            row | {"when": row["when"] | {"at_s": at_s}}
            for row in FAULT_SCENARIOS[scenario](rng, nodes)
        ]
        acts.append(Act(scenario, at_s, parse_faults(rows)))
        at_s += rng.uniform(*GAP_S)
    return acts


def _rounds(rng: random.Random, names: list[str]) -> Iterator[str]:
    while True:
        rng.shuffle(names)
        yield from names
