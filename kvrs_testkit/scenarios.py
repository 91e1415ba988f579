"""The table of faults: what a cluster is, what its clients ask, what goes wrong in the fault
language, and what must come of it. Three drivers run the rows: the simulator, a proxy before
scripted instances in memory, and real processes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvrs.config.file import Config, parse_config
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.faults.language import Fault, parse_faults

Row = dict[str, Any]
Entry = tuple[ev.Event, tuple[act.Action, ...]]  # Of an event log.
PAIR = ("prefill", "decode")
DECODE = ("decode",)
NEVER_S = 10_000.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests `every_s` apart; those of the numbers `poisons` end each instance they run at."""

    streams: int = 8
    tokens: int = 100
    first_s: float = 1.0
    every_s: float = 0.01
    prompt_tokens: int = 40
    poisons: tuple[int, ...] = ()
    # Before which of their tokens, at decode; -1: at prefill.
    poison_at: int = 0

    def prompts(self, seed: int) -> list[list[int]]:
        rng = Random(seed)
        return [
            [rng.randrange(4, 500) for _ in range(self.prompt_tokens)] for _ in range(self.streams)
        ]

    def at_s(self, number: int) -> float:
        return self.first_s + number * self.every_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """None: nothing is said of it."""

    ended: Mapping[str, int] | None = None  # None: every stream is complete.
    left: set[str] | None = None  # Instances that streams had to leave.
    to: set[str] | None = None  # The decode instances that took them.
    lost: set[str] | None = None  # Instances and agents that were given up.
    options: set[str] | None = None
    recovers: bool | None = True  # Some stream moves, and every victim of a loss does; or none.
    attempts: int | None = 2  # The most that a stream that moves has needed.
    pause_s: float | None = None  # No stream that moved was silent for longer.
    poison_deaths: set[int] | None = None  # Of each poisoned request, one of these numbers.
    failed: int | None = None  # Attempts that failed, each by itself.
    # At least so many streams begin while all prefill instances are lost, and after that. Only
    # then, and always then, they begin without one.
    without_prefill: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    rule: str
    faults: tuple[Row, ...]
    nodes: tuple[tuple[str, ...], ...] = (PAIR, PAIR)
    is_vllm: bool = False  # Its engines are vLLM's.
    settings: Mapping[str, Any] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    back_s: float = NEVER_S  # What was killed is back after it.
    expected: Expected = field(default_factory=Expected)
    seeds: int = 3  # In the simulator.
    # Why a driver cannot run it.
    not_simulated: str = ""
    not_scripted: str = ""
    not_real: str = ""

    @property
    def parsed(self) -> list[Fault]:
        return parse_faults(list(self.faults)) if self.faults else []

    def config(self, **proxy: Any) -> Config:
        nodes = [
            {
                "id": f"n{n}",
                "instances": [{"id": f"{role[0]}{n}", "role": role} for role in roles],
            }
            for n, roles in enumerate(self.nodes)
        ]
        settings = dict(self.settings)
        settings["proxy"] = settings.get("proxy", {}) | proxy
        return parse_config({"cluster": {"nodes": nodes}} | settings)


@dataclass(slots=True)
class Found:
    """The outcome of one run, as a driver saw it."""

    ended: Counter[str]
    entries: Iterable[Entry]  # Of the proxy's event log.
    never_due: list[str]
    pauses_s: list[float]
    poison_deaths: Counter[str] = field(default_factory=Counter)


def check(row: Scenario, found: Found) -> None:
    """The assertions of a row, the same for every driver."""
    expected, entries = row.expected, list(found.entries)
    recovered = [each for _, actions in entries for each in actions if type(each) is act.Recovered]
    moves = {(each.stream, each.attempt) for each in recovered}
    to = {
        str(each.plan.decode)
        for _, actions in entries
        for each in actions
        if isinstance(each, act.Start) and (each.stream, each.attempt) in moves
    }
    lost = {str(event.instance) for event, _ in entries if isinstance(event, ev.InstanceLost)}
    lost |= {str(event.holder) for event, _ in entries if isinstance(event, ev.HolderLost)}
    victims = {
        stream
        for event, _ in entries
        if isinstance(event, ev.InstanceLost)
        for stream in event.produced_tokens
    }
    moved = {each.stream for each in recovered}

    seen = {
        "never_due": found.never_due,
        "ended": dict(found.ended),
        "left": {str(each.failed) for each in recovered if each.failed is not None},
        "to": to,
        "lost": lost,
        "options": {each.option.value for each in recovered},
        "recovers": bool(moved) and (victims <= moved or "complete" not in found.ended),
        "attempts": max((each.attempt for each in recovered), default=None),
        "failed": sum(isinstance(event, ev.AttemptFailed) for event, _ in entries),
    }
    wanted = {"never_due": [], "ended": expected.ended or {"complete": row.load.streams}}
    wanted |= {name: value for name in seen if (value := getattr(expected, name, None)) is not None}
    differs = {name: (seen[name], value) for name, value in wanted.items() if seen[name] != value}
    assert not differs, f"{row.name}, (seen, wanted): {differs}"
    assert expected.pause_s is None or max(found.pauses_s) <= expected.pause_s
    if expected.poison_deaths is not None:
        assert set(found.poison_deaths.values()) <= expected.poison_deaths
    begun = _begun(row, entries)
    assert set(begun) <= {("before", False), ("while", True), ("after", False)}, begun
    assert min(begun["while", True], begun["after", False]) >= expected.without_prefill, begun


def _begun(row: Scenario, entries: Iterable[Entry]) -> Counter[tuple[str, bool]]:
    """New streams by when they begin: before all prefill instances are lost, while they are, or
    after that; and by whether they begin without one.
    """
    prefill = {f"p{n}" for n, roles in enumerate(row.nodes) if "prefill" in roles}
    lost, when, begun = set[str](), "before", Counter[tuple[str, bool]]()
    for event, actions in entries:
        if isinstance(event, ev.InstanceLost):
            lost.add(str(event.instance))
        elif isinstance(event, ev.InstanceUp):
            lost.discard(str(event.info.id))
        if prefill <= lost:
            when = "while"
        elif when == "while":
            when = "after"
        starts = [each for each in actions if isinstance(each, act.Start) and each.attempt == 1]
        begun.update((when, each.plan.prefill is None) for each in starts)
    return begun
