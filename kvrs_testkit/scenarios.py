"""The table of faults: what a cluster is, what its clients ask, what goes wrong in the fault
language or in the condition of an instance, and what must come of it. Three drivers run the rows:
the simulator, a proxy before scripted instances in memory, and real processes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any

from kvrs.config.cluster import pipeline_nodes
from kvrs.config.file import Config, parse_config
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.protocol.instance import GpuHealth, GpuState
from kvrs_lab.faults.language import Fault, parse_faults

Row = dict[str, Any]
Entry = tuple[ev.Event, tuple[act.Action, ...]]  # Of an event log.
PREFILL, DECODE, BOTH = ("prefill",), ("decode",), ("both",)
PAIR = (*PREFILL, *DECODE)
NEVER_S = 10_000.0
# Why real processes cannot run a row.
BACK = "a supervisor brings back every process that was killed"
CONNECTS = (
    "a new connection to a stopped process fails after 1 s: a request that comes during the "
    "pause makes a second attempt"
)
MEASURED = "the link is measured, and on a busy machine as slower than the settings say"
UNORDERED = (
    "a busy machine may send the request before the fault, or before the proxy has noticed it"
)
VLLM = "tests/vllm has real ones"
SCRIPT = "no order to a process causes it"
STAGES = "tests/cluster/test_lending_up.py has real hosts"
NO_HOSTS = "instances in memory have no hosts"
NO_POISON = "no request ends the embedded engine"


def fault(what: str, whom: Row, **when: Any) -> Row:
    more = {name: when.pop(name) for name in ("for_s", "factor") if name in when}
    return {"when": when, "what": what, "whom": whom} | more


def kill(*names: str, **when: Any) -> tuple[Row, ...]:
    return tuple(fault("kill", {"id": name}, **when) for name in names)


def stop(whom: Row, for_s: float, at_s: float = 4.0, **when: Any) -> tuple[Row, ...]:
    return (fault("stop", whom, at_s=at_s, for_s=for_s, **when),)


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
    # Of every request; a simulated one has none. With a chat's `messages` or a text as its
    # `prompt`, the ids of the prompts are not sent.
    fields: Mapping[str, Any] = field(default_factory=dict)

    def prompts(self, seed: int) -> list[list[int]]:
        rng = Random(seed)
        return [
            [rng.randrange(4, 500) for _ in range(self.prompt_tokens)] for _ in range(self.streams)
        ]

    def at_s(self, number: int) -> float:
        return self.first_s + number * self.every_s


ONE_STREAM = Load(streams=1)
FLOW = Load(streams=40, every_s=0.125, tokens=150)  # Some come while instances are paused.
# Their histories take longer to compute at few instances than a stage is away.
LONG_FLOW = replace(FLOW, prompt_tokens=300)


class Condition(StrEnum):
    """The condition of an instance, which no fault of the language causes."""

    DRAINED = "drained"  # An operator's order: what runs there may end there.
    CLEARED = "cleared"  # An operator's order: what runs there is moved.
    ENDING = "ending"  # It reports that its process is about to end.
    FAILS = "fails"  # It answers every call with HTTP 500.
    BUSY = "busy"  # It answers every call with HTTP 503.
    HANGS = "hangs"  # It reports and takes calls, and computes nothing new.
    GPU_DEGRADED = "gpu_degraded"  # The agent of its node has published it.
    GPU_FAILING = "gpu_failing"
    WELL = "well"  # None of these any more.


DRAINS_S = {Condition.DRAINED: 600.0, Condition.CLEARED: 0.0}
GPUS = {
    Condition.GPU_DEGRADED: GpuState.DEGRADED,
    Condition.GPU_FAILING: GpuState.FAILING,
}


def gpu_of(instance: str, what: Condition) -> GpuHealth:
    state = GPUS.get(what, GpuState.HEALTHY)
    return GpuHealth(instance, 0, state, "xid 79" if what in GPUS else "", 0.0)


@dataclass(frozen=True, slots=True)
class Becomes:
    whom: str
    what: Condition
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """None: nothing is said of it."""

    ended: Mapping[str, int] | None = None  # None: every stream is complete.
    left: set[str] | None = None  # Instances that streams had to leave.
    to: set[str] | None = None  # The decode instances that took them.
    lost: set[str] | None = None  # Instances and agents that were given up.
    options: set[str] | None = None
    # Instances at which streams stayed until their end, in the same attempt, with the option.
    stayed: set[tuple[str, str]] | None = None
    recovers: bool | None = True  # Some stream moves, and every victim of a loss does; or none.
    attempts: int | None = 2  # The most that a stream that moves has needed.
    pause_s: float | None = None  # No stream that moved was silent for longer.
    poison_deaths: set[int] | None = None  # Of each poisoned request, one of these numbers.
    failed: int | None = None  # Attempts that failed, each by itself.
    # Where streams begin, and where none do, that come after the first loss or news of a condition.
    new_at: frozenset[str] = frozenset()
    none_at: frozenset[str] = frozenset()
    at_most: Mapping[str, int] = field(default_factory=dict)  # Attempts, by instance.
    # At least so many streams begin while all prefill instances are lost, and after that. Only
    # then, and always then, they begin without one.
    without_prefill: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    rule: str
    faults: tuple[Row, ...] = ()
    becomes: tuple[Becomes, ...] = ()
    nodes: tuple[tuple[str, ...], ...] = (PAIR, PAIR)
    stages: int = 0  # Of each instance, in hosts; then all are of one group, as d0, d1 and so on.
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
        if self.stages:
            nodes = [
                node.model_dump(mode="json", exclude_unset=True)
                for node in pipeline_nodes(len(self.nodes), self.stages)
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


def seen_in(found: Found, entries: list[Entry]) -> dict[str, Any]:
    """By the names of `Expected`."""
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

    return {
        "never_due": found.never_due,
        "ended": dict(found.ended),
        "left": {str(each.failed) for each in recovered if each.failed is not None},
        "to": to,
        "lost": lost,
        "options": {each.option.value for each in recovered},
        "stayed": _stayed(entries),
        "recovers": bool(moved) and (victims <= moved or "complete" not in found.ended),
        "attempts": max((each.attempt for each in recovered), default=None),
        "failed": sum(isinstance(event, ev.AttemptFailed) for event, _ in entries),
    }


def check(row: Scenario, found: Found) -> None:
    """The assertions of a row, the same for every driver."""
    expected, entries = row.expected, list(found.entries)
    seen = seen_in(found, entries)
    wanted = {"never_due": [], "ended": expected.ended or {"complete": row.load.streams}}
    wanted |= {name: value for name in seen if (value := getattr(expected, name, None)) is not None}
    differs = {name: (seen[name], value) for name, value in wanted.items() if seen[name] != value}
    assert not differs, f"{row.name}, (seen, wanted): {differs}"
    assert expected.pause_s is None or max(found.pauses_s) <= expected.pause_s
    if expected.poison_deaths is not None:
        assert set(found.poison_deaths.values()) <= expected.poison_deaths
    begin_at = _new_at(entries)
    assert begin_at >= expected.new_at, begin_at
    assert begin_at or not expected.none_at
    assert not begin_at & expected.none_at, begin_at
    attempts = Counter(name for start in _starts(entries) for name in _instances_of(start.plan))
    assert all(attempts[name] <= most for name, most in expected.at_most.items()), attempts
    begun = _begun(row, entries)
    assert set(begun) <= {("before", False), ("while", True), ("after", False)}, begun
    assert min(begun["while", True], begun["after", False]) >= expected.without_prefill, begun


def _starts(entries: Iterable[Entry]) -> list[act.Start]:
    return [each for _, actions in entries for each in actions if isinstance(each, act.Start)]


def _stayed(entries: Iterable[Entry]) -> set[tuple[str, str]]:
    """Instance and option of streams that stayed and had no other attempt after."""
    last: dict[str, int] = {}
    stays: dict[str, act.Recovered] = {}  # The last one of each stream.
    for _, actions in entries:
        for each in actions:
            if isinstance(each, act.Start):
                last[each.stream] = each.attempt
            elif isinstance(each, act.Recovered) and each.option.stays:
                assert each.attempt == last[each.stream], "a stream that stays has another attempt"
                stays[each.stream] = each
    return {
        (str(each.failed), each.option.value)
        for each in stays.values()
        if each.attempt == last[each.stream]
    }


def _instances_of(plan: act.Plan) -> set[str]:
    return {str(name) for name in (plan.prefill, plan.decode) if name is not None}


def _new_at(entries: list[Entry]) -> set[str]:
    """Where new streams begin, from the first loss or news on."""
    news = [
        isinstance(event, ev.InstanceLost | ev.DrainOrdered | ev.GpuJudged | ev.AttemptFailed)
        or (isinstance(event, ev.LoadReported) and event.report.draining)
        for event, _ in entries
    ]
    after = entries[news.index(True) :] if True in news else []
    begun = [start.plan for start in _starts(after) if start.attempt == 1]
    return {name for plan in begun for name in _instances_of(plan)}


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
        begun.update(
            (when, each.plan.prefill is None)
            for each in starts
            if each.plan.decode.startswith("d")  # One that does both needs none.
        )
    return begun
