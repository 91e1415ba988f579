"""Simulated states in which a decode instance dies, and the futures of that moment.

A state has a cluster, streams under way, and three earlier deaths that were recovered by
`always_recompute`: so it does not depend on how the policy under test decides. At the kill the
process is forked, and each future goes on with another policy, or with one option forced.
"""

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import exp, log
from statistics import fmean
from typing import Any

import msgspec

from experiments.forking import in_children
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName
from kvrs.core import options
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.rules import BY_NAME
from kvrs.core.rules.auto import Auto
from kvrs.protocol.instance import Capability, InstanceInfo
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.fault_scenarios import FaultEvent, named_deaths
from kvrs_lab.sim.proxy import SimProxy
from kvrs_lab.sim.streams import Arrival, SimRecovery
from kvrs_lab.sim.world import World

# Requests a second and pair of instances at load 1, by profile of the instances' pace.
PROFILES = {
    "opt-13b-a100-distserve-tp1": 2.2,
    "llama-3.1-8b-h100-vllm-tp1": 9.0,
    "llama-3.1-70b-h100-vllm-tp4": 3.5,
}
LINKS_GBIT_S = (10, 25, 100, 400)
BACKUPS = ("off", "both", "local")
NODES = (2, 4)
LOADS, LOADS_OF_FEW = (0.25, 0.5, 0.8), (0.05, 0.1, 0.15)
PROMPT_TOKENS, OUTPUT_TOKENS = (200, 8000), (80, 500)
# The first 110 states have at least four victims, the others one to three.
STATES, OF_FEW = 150, 40
EARLIER_KILLS_S = (8.0, 13.0, 18.0)
KILL_S, LATEST_KILL_S = 26.0, 60.0  # The first moment, and the last, with so many victims.
_LOOK_S = 0.25
WATCHED_S = 40.0  # Of a future; a victim that has no token by then counts with all of it.
VICTIM = "d0"
# As in front of stock vLLM: instances that have a prefix cache, and fetch nothing.
STOCK = frozenset([Capability.PREFIX_CACHE])
FORCED = (Option.RECOMPUTE, Option.MIGRATE, Option.RESTORE, Option.SPLIT)
MOVED_ALONE = 2  # Victims for which each other option is tried alone.


@dataclass(frozen=True, slots=True)
class State:
    """One moment before a death."""

    number: int
    profile: str
    link_gbit_s: float
    backup: str
    nodes: int
    load: float
    is_of_few: bool = False  # One to three victims.
    is_stock: bool = False
    slowness: float = 1.0  # Time of each step over that of the profile, which proxies are told.

    @classmethod
    def drawn(cls, number: int) -> "State":
        rng = random.Random(f"decisions/{number}")
        is_of_few = number >= STATES - OF_FEW
        return cls(
            number,
            rng.choice([*PROFILES]),
            rng.choice(LINKS_GBIT_S),
            rng.choice(BACKUPS),
            rng.choice(NODES),
            rng.choice(LOADS_OF_FEW if is_of_few else LOADS),
            is_of_few,
        )

    @property
    def config(self) -> Config:
        nodes = [
            {
                "id": f"n{node}",
                "instances": [
                    {"id": f"p{node}", "role": "prefill"},
                    {"id": f"d{node}", "role": "decode"},
                ],
            }
            for node in range(self.nodes)
        ]
        engine = {"pace": self.profile, "max_model_len": 16384, "pages": 40000}
        engine |= {"max_batch_tokens": 2048, "max_running": 256}
        return parse_config(
            {
                "proxy": {"port": 0, "admin_port": 0},
                "cluster": {"allow_faults": True, "engine": engine, "nodes": nodes},
                "policy": {"name": PolicyName.ALWAYS_RECOMPUTE},
                "transfer": {
                    "link_bytes_per_s": self.link_gbit_s * 125e6,
                    "probe_interval_s": 1.0,
                },
                "backup": {"mode": self.backup, "capacity_bytes": 1 << 40},
            }
        )

    def world(self) -> World:
        rng = random.Random(f"decisions/{self.number}/arrivals")
        per_s = PROFILES[self.profile] * self.load * self.nodes
        arrivals, at_s = list[Arrival](), 0.0
        while (at_s := at_s + rng.expovariate(per_s)) < LATEST_KILL_S + WATCHED_S:
            tokens = round(exp(rng.uniform(*map(log, PROMPT_TOKENS))))
            ids = array("H", rng.randbytes(2 * tokens))
            arrivals.append(Arrival(at_s, ids, rng.randint(*OUTPUT_TOKENS)))
        before = [
            death
            for number, at_s in enumerate(EARLIER_KILLS_S)
            for death in _kill(f"d{(number + 1) % self.nodes}", at_s)
        ]
        before += _kill(VICTIM, 1e6)  # The world looks for faults as long as one is pending.
        world = World(self.config, arrivals, before, seed=self.number, reload_s=3.0, probes=True)
        for engine in world.cluster.engines.values():
            if self.is_stock:
                engine.declares = _stock
            engine.pace_factor = self.slowness
        return world


# Six states as stock vLLM, chosen before hand-offs waited for their links: one, or three, targets.
STOCK_STATES = tuple(
    State(1000 + number, profile, link_gbit_s, "off", nodes, load, is_stock=True)
    for number, (profile, link_gbit_s, nodes, load) in enumerate(
        (
            ("llama-3.1-8b-h100-vllm-tp1", 25, 2, 0.8),
            ("llama-3.1-8b-h100-vllm-tp1", 100, 4, 0.8),
            ("llama-3.1-8b-h100-vllm-tp1", 400, 4, 0.8),
            ("llama-3.1-8b-h100-vllm-tp1", 10, 2, 0.25),
            ("opt-13b-a100-distserve-tp1", 25, 4, 0.5),
            ("llama-3.1-70b-h100-vllm-tp4", 10, 4, 0.5),
        )
    )
)


@dataclass(frozen=True, slots=True)
class Future:
    """How a state goes on: by a policy, or by `auto` with an option forced for all or one victim
    that has it, or with factors of its options' estimates.
    """

    name: str
    policy: PolicyName = PolicyName.AUTO
    forced: Option | None = None
    alone: str = ""  # The only victim for which it is forced; the others go as `chosen` says.
    chosen: Mapping[str, Option] = field(default_factory=dict)
    factors: Mapping[Option, float] = field(default_factory=dict)


@dataclass(slots=True)
class Victim:
    """A stream that the death had cut, and its recovery."""

    stream: str
    option: str  # Of its first recovery.
    pause_s: float  # From the kill to its next token.
    predicted_s: float
    low_s: float | None  # The predicted interval; None: the policy has none.
    high_s: float | None
    real_s: float | None  # From the decision to the next token; None: it took another attempt.
    tried: list[str]  # Options that had an estimate.

    def as_row(self) -> dict[str, Any]:
        return {
            "option": self.option,
            "pause_s": round(self.pause_s, 5),
            "predicted_s": round(self.predicted_s, 5),
            "low_s": self.low_s,
            "high_s": self.high_s,
            "real_s": None if self.real_s is None else round(self.real_s, 5),
        }


@dataclass(slots=True)
class Observed:
    """One future."""

    name: str
    victims: list[Victim]

    @property
    def mean_s(self) -> float:
        return fmean(victim.pause_s for victim in self.victims)


class Forced(Auto):
    """`auto`, with the best estimate of one option where there is one."""

    def __init__(self, future: Future) -> None:
        super().__init__(PolicyName.AUTO, options.ALL)
        self._future = future
        self._stream = ""

    def weigh(self, state: Any, stream: Any, targets: Any, now_s: float) -> Any:
        self._stream, factors = stream.id, self._future.factors
        return [
            msgspec.structs.replace(each, total_s=each.total_s * factors.get(each.option, 1.0))
            for each in super().weigh(state, stream, targets, now_s)
        ]

    def choose_sparing(
        self, estimates: Sequence[Estimate], budget_s: float | None, others: float
    ) -> Estimate | None:
        future = self._future
        wanted = future.forced
        if future.alone and self._stream != future.alone:
            wanted = future.chosen.get(self._stream)
        of_it = [each for each in estimates if each.option == wanted]
        return super().choose_sparing(of_it or estimates, budget_s, others)


def futures_of(state: State) -> list[Future]:
    """Return the futures that are tried before those of single victims."""
    forced = [each for each in FORCED if each is not Option.RESTORE or state.backup != "off"]
    if state.is_stock:
        forced = [Option.RECOMPUTE, Option.MIGRATE]
    return [
        Future("auto"),
        Future("rom", PolicyName.ROM),
        *(Future(option.value, forced=option) for option in forced),
    ]


def before_kill(state: State) -> tuple[World, float]:
    """Return a state's world a moment before its kill, and the time of the kill. Raises
    LookupError: there were so many victims at no moment.
    """
    world, kill_s = state.world(), KILL_S
    while world.run_before(kill_s - 0.002) and kill_s <= LATEST_KILL_S:
        count = sum(map(_is_victim, _streams(world)))
        if 1 <= count <= 3 if state.is_of_few else count >= 4:
            return world, kill_s
        kill_s += _LOOK_S
    raise LookupError(state.number)


def observe(state: State) -> tuple[float, list[Observed]]:
    """Return the time of the kill in a state, and what its futures came to; `auto` first. Without
    any future there were so many victims at no moment.
    """
    try:
        world, kill_s = before_kill(state)
    except LookupError:
        return LATEST_KILL_S, []
    found = list(observed(world, state, kill_s, futures_of(state)))
    auto, rng = found[0], random.Random(f"decisions/{state.number}/victims")
    chosen = {victim.stream: Option(victim.option) for victim in auto.victims}
    moved = rng.sample(auto.victims, min(MOVED_ALONE, len(auto.victims)))
    alone = [
        Future(f"{victim.stream} {tried}", forced=Option(tried), alone=victim.stream, chosen=chosen)
        for victim in moved
        for tried in victim.tried
        if tried != victim.option
    ]
    return kill_s, [*found, *observed(world, state, kill_s, alone)]


def as_row(state: State, kill_s: float, observed: Sequence[Observed]) -> dict[str, Any]:
    """Return a state's figures: the mean pause of each future, and the victims under `auto`."""
    pauses_s = {each.name: round(each.mean_s, 5) for each in observed if each.victims}
    victims = observed[0].victims if observed else []
    return asdict(state) | {
        "kill_s": kill_s,
        "pauses_s": pauses_s,
        "victims": [each.as_row() for each in victims],
    }


def observed(
    world: World, state: State, kill_s: float, futures: Sequence[Future]
) -> Iterator[Observed]:
    """Yield what each future of the world came to, in a process of its own."""
    return in_children([partial(_go_on, world, state, kill_s, each) for each in futures])


def _go_on(world: World, state: State, kill_s: float, future: Future) -> Observed:
    config = state.config
    policy = config.policy.model_copy(update={"name": future.policy})
    if future.forced is not None or future.factors:
        rules: Any = BY_NAME  # Of this child alone.
        rules[PolicyName.AUTO] = Forced(future)
    before = {id(each) for proxy in world.cluster.proxies for each in proxy.recovered}
    world.go_on_with(_kill(VICTIM, kill_s), config.model_copy(update={"policy": policy}), None)
    at_s = kill_s + 0.03
    while world.run_before(at_s) and at_s < kill_s + WATCHED_S:
        at_s += _LOOK_S
        waits = any(each.failed_at_s is not None for each in _streams(world))
        if at_s > kill_s + 1.0 and not waits:
            break
    rows = [
        each
        for proxy in world.cluster.proxies
        for each in proxy.recovered
        if id(each) not in before and each.action.failed == VICTIM
    ]
    return Observed(future.name, _victims(rows, world.cluster.proxies, kill_s))


def _victims(
    rows: Sequence[SimRecovery], proxies: Sequence[SimProxy], kill_s: float
) -> list[Victim]:
    lives = {name: live for proxy in proxies for name, live in proxy.streams.items()}
    firsts = dict[str, SimRecovery]()
    for row in rows:
        if row.action.option is not Option.START:
            firsts.setdefault(row.action.stream, row)
    found = []
    for name, row in firsts.items():
        after = [at_s for at_s in lives[row.action.stream].journal.received_s if at_s > row.at_s]
        pause_s = (after[0] if after else kill_s + WATCHED_S) - kill_s
        real_s = None if row.resumed_s is None else row.resumed_s - row.at_s
        tried = sorted({each.option.value for each in row.action.estimates})
        action = row.action
        low_s = high_s = None
        predicted_s = action.predicted_s
        if (settled := row.settled) is not None:
            predicted_s, low_s, high_s = settled.predicted_s, settled.low_s, settled.high_s
        option = action.option.value
        found.append(Victim(name, option, pause_s, predicted_s, low_s, high_s, real_s, tried))
    return found


def _streams(world: World) -> Iterator[Any]:
    return (
        live
        for proxy in world.cluster.proxies
        for live in proxy.streams.values()
        if not live.outcome
    )


def _is_victim(live: Any) -> bool:
    return live.instance == VICTIM and bool(live.journal.output_ids)


def _kill(whom: str, at_s: float) -> list[FaultEvent]:
    return named_deaths(
        parse_faults([{"when": {"at_s": at_s}, "what": "kill", "whom": {"id": whom}}])
    )


def _stock(info: InstanceInfo) -> InstanceInfo:
    kept = [each for each in info.capabilities if each in STOCK]
    return msgspec.structs.replace(info, capabilities=kept)
