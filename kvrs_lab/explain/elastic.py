"""The cost of going on without some ranks of an instance: the plan in bytes, every planner beside
the others, and every way of the instance with the policy's decision for each of its streams.

The ways come from the state machine that chooses one, the decisions from the policy itself. The
instance `home` serves all requests; another one like it, with a prefill instance beside it, is idle
on a second node. The prefill instance beside `home` retains all prompts. The time until processes
have started and joined is not counted.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import LOOKAHEAD_TOKENS, PolicySettings, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.recovery import RecoveryPolicy
from kvrs.errors import ConfigError, LayoutError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from kvrs.protocol.instance import LoadReport, ReformingReport, Role, assumed_instance
from kvrs_engine.elastic import cmm, on_demand
from kvrs_engine.elastic import reforming as reform
from kvrs_engine.elastic.layouts import Layout, even
from kvrs_engine.elastic.moving import LinkRates, schedule
from kvrs_engine.elastic.plans import HOST, MovePlan, plan
from kvrs_engine.elastic.shapes import shape_of
from kvrs_engine.elastic.speed import Degree, Speed, shares
from kvrs_engine.elastic.units import Units
from kvrs_engine.elastic.ways.base import Costs, PossibleWay, Room, StreamAtRisk
from kvrs_lab.explain.experts import explain_experts

# RaidServe (3.2, table 3): Llama-3.1-70B on 8 H100, one lost, 56 requests of 16K tokens.
_RAIDSERVE = ("meta-llama/Llama-3.1-70B", 8, 1, 56, 16384)
_RAIDSERVE_S = {"recompute": 22.0, "host": 0.530, "on demand": 0.120}
_RAIDSERVE_WEIGHT_BYTES, _RAIDSERVE_KV_BYTES = 140 * 10**9, 280 * 10**9
RAIDSERVE_HOST_BYTES_PER_S = 50e9

# What stands in the papers beside figures that do not follow from it.
CONTRADICTIONS = (
    "AnchorTP, table II: 17.56 s of 197.31 s for a full reload are 8.9 % of the bytes, Eq. (1) has "
    "12.5 % as the least for 8 -> 7 (24.7 s at the same rate)",
    "RaidServe, figure 4: the text loses GPU 3, its result {3,4,5,0}, {6,7,8,1}, {9,10,11,2} is "
    "that of GPU 0",
    "RaidServe, 3.2 and table 3: the arithmetic gives 0.50 s and 0.15 s where 530 and 120 ms were "
    "measured; 120 ms for 7.5 GB are 62.5 GB/s, more than the 50 GB/s it starts from",
)

_HOME, _AGENT = InstanceId("home"), InstanceId("agent")
_HERE, _THERE = NodeId("n0"), NodeId("n1")
_ROOM_BYTES = 1 << 60
_SETTINGS = PolicySettings()


class KvBackup(StrEnum):
    OFF = "off"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class ElasticQuestion:
    """`profile`: a name of the catalog. Rates are of one rank's link."""

    profile: str
    tp: int
    lost: int
    requests: int
    context_tokens: int
    has_backup: bool  # Of KV, in the host's memory, by the agent of the instance's node.
    host_bytes_per_s: float
    peer_bytes_per_s: float
    bytes_per_s: float  # Between nodes.
    # Of models with experts: how skewed their choice is, and the part of a rank's weights that it
    # has room for as copies.
    zipf: float | None = None
    room_share: float | None = None

    @property
    def rates(self) -> LinkRates:
        return LinkRates(self.host_bytes_per_s, self.peer_bytes_per_s)


def explain_elastic(question: ElasticQuestion) -> dict[str, Any]:
    """The answer as JSON has it: bytes that move on demand, by kind; the ladder of planners, the
    quickest first; the ways of the instance, the one that it takes first; RaidServe's seconds; and
    `experts` of a model that has some.

    Raises:
        ConfigError: profile or degrees do not allow it.
    """
    profile = catalog.profile(question.profile)
    shape = shape_of(profile.model)
    units, experts = shape.units(), {}
    try:
        before = even(units, question.tp)
        dead = frozenset(before.ranks[question.tp - question.lost :])
        after = on_demand.reshaped(before, units, on_demand.survivors(before, sorted(dead)))
        if question.zipf is not None and question.room_share is not None:
            experts["experts"] = explain_experts(
                shape,
                question.tp,
                question.lost,
                question.rates,
                zipf=question.zipf,
                room_share=question.room_share,
            )
    except LayoutError as error:
        raise ConfigError(f"--tp, --lost: {error}") from None
    tokens = question.requests * question.context_tokens
    kv_bytes = tokens * profile.geometry.bytes_per_token
    cells = _per_head(kv_bytes, units) if question.has_backup else 0
    found = plan(before, after, units, dead, cells)
    return {
        "survivors": len(after.ranks),
        "weight_bytes": units.total_bytes,
        "kv_bytes": kv_bytes,
        "moved": [
            {"kind": kind.name.lower(), "host_bytes": host_bytes, "peer_bytes": peer_bytes}
            for kind, (host_bytes, peer_bytes) in found.bytes_by_kind().items()
        ],
        **experts,
        "ladder": _ladder(question, units, found, dead, kv_bytes),
        "ways": _Case(question, units, before, dead).ways(),
        "raidserve_s": raidserve_s(question.peer_bytes_per_s),
    }


def raidserve_s(peer_bytes_per_s: float) -> dict[str, float]:
    """Seconds of its two ways, from 140 GB of weights, 280 GB of KV and 50 GB/s on each link."""
    shape = shape_of(_RAIDSERVE[0]).units()
    layer = _RAIDSERVE_WEIGHT_BYTES // shape.layers
    share = sum(shape.attention_bytes) / (sum(shape.attention_bytes) + sum(shape.mlp_bytes))
    heads, tiles = len(shape.attention_bytes), len(shape.mlp_bytes)
    units = Units(
        layers=shape.layers,
        attention_bytes=(int(layer * share) // heads,) * heads,
        mlp_bytes=(int(layer * (1 - share)) // tiles,) * tiles,
        vocabulary_bytes=(0,),
        common_bytes=0,
    )
    rates = LinkRates(RAIDSERVE_HOST_BYTES_PER_S, peer_bytes_per_s)
    before = even(units, 8)
    after = on_demand.reshaped(before, units, on_demand.survivors(before, [7]))
    full = plan(before, after, units, {7}, _per_head(_RAIDSERVE_KV_BYTES, units))
    return {
        "host": _reload(units, 7, _RAIDSERVE_KV_BYTES // 8, rates, 0.0)["total_s"],
        "on demand": schedule(full, rates).makespan_s,
    }


def _per_head(kv_bytes: int, units: Units) -> int:
    return kv_bytes // (units.layers * len(units.attention_bytes))


def _ladder(
    question: ElasticQuestion, units: Units, found: MovePlan, dead: frozenset[int], kv_bytes: int
) -> list[dict[str, Any]]:
    """Every planner's way. Bytes from the host are those of the rank that reads most."""
    profile, rates, left = catalog.profile(question.profile), question.rates, len(found.after.ranks)
    recompute_s = _recompute_s(question, found.after, units)
    missing_s = 0.0 if question.has_backup else recompute_s
    lost_kv_bytes = len(dead) * kv_bytes // question.tp if question.has_backup else 0
    moving_s = schedule(found, rates).makespan_s
    host_bytes = max(found.host_bytes_by_rank().values())
    rungs = [
        _reload(units, left, 0, rates, recompute_s),
        _rung("on demand", host_bytes, found.peer_bytes, moving_s, missing_s),
        _by_interval(units, found.before, dead, lost_kv_bytes, rates, missing_s),
    ]
    if question.has_backup:
        rungs.append(_reload(units, left, lost_kv_bytes, rates, 0.0))
    asked = (question.tp, question.lost, question.requests, question.context_tokens)
    for rung in rungs:
        # It recomputes without a backup, and restores with one.
        is_published = question.has_backup is (rung["way"] != "recompute")
        if is_published and (profile.model, *asked) == _RAIDSERVE:
            rung["published_s"] = _RAIDSERVE_S.get(rung["way"])
    return sorted(rungs, key=lambda rung: rung["total_s"])


def _rung(
    way: str, host_bytes: int, peer_bytes: int, moving_s: float, recompute_s: float
) -> dict[str, Any]:
    return {
        "way": way,
        "host_bytes": host_bytes,
        "peer_bytes": peer_bytes,
        "moving_s": moving_s,
        "recompute_s": recompute_s,
        "total_s": moving_s + recompute_s,
        "published_s": None,
    }


def _reload(
    units: Units, survivors: int, lost_kv_bytes: int, rates: LinkRates, recompute_s: float
) -> dict[str, Any]:
    """Whole new shards from the host, whatever the survivors have."""
    host = (units.total_bytes + lost_kv_bytes) // survivors
    way = "host" if lost_kv_bytes else "recompute"
    return _rung(way, host, 0, host / rates.host_bytes_per_s, recompute_s)


def _by_interval(
    units: Units,
    before: Layout,
    dead: frozenset[int],
    lost_kv_bytes: int,
    rates: LinkRates,
    recompute_s: float,
) -> dict[str, Any]:
    """AnchorTP's planner over all weights as one interval; lost KV in even shares."""
    left = [rank for rank in before.ranks if rank not in dead]
    parts = cmm.even_parts(units.total_bytes, len(before.ranks))
    held = [cmm.Shard(rank, *part) for rank, part in zip(before.ranks, parts, strict=True)]
    tasks = cmm.plan_interval(held, dead, left)
    copies = [task for task in tasks if task.source not in (HOST, task.target)]
    host = _most((task.target, task.bytes) for task in tasks if task.source == HOST)
    host += lost_kv_bytes // len(left)
    busiest = max(
        _most((task.target, task.bytes) for task in copies),
        _most((task.source, task.bytes) for task in copies),
    )
    moving_s = max(host / rates.host_bytes_per_s, busiest / rates.peer_bytes_per_s)
    return _rung("cmm", host, sum(task.bytes for task in copies), moving_s, recompute_s)


def _most(parts: Iterable[tuple[int, int]]) -> int:
    """The bytes of the rank that has most."""
    sums: Counter[int] = Counter()
    for rank, size in parts:
        sums[rank] += size
    return max(sums.values(), default=0)


def _recompute_s(question: ElasticQuestion, after: Layout, units: Units) -> float:
    """Every history once more, one after the other, at the degree that is left. What does not
    shrink with the ranks follows from the nearest other degree of the same model, GPU and engine.
    """
    own = catalog.profile(question.profile)
    if own.tp is None:
        raise ConfigError(f"--elastic: {own.label} states no tensor parallel degree")
    kin: list[tuple[int, str]] = []
    for name in catalog.names():
        other = catalog.profile(name)
        is_kin = (other.model, other.gpu, other.engine) == (own.model, own.gpu, own.engine)
        if is_kin and other.tp not in (None, own.tp) and other.decode is not None:
            kin.append((abs((other.tp or 0) - own.tp), name))
    speed = Speed(_degree(question.profile), _degree(min(kin)[1]) if kin else None)
    return question.requests * speed.prefill_s(shares(after, units), question.context_tokens)


def _degree(name: str) -> Degree:
    profile = catalog.profile(name)
    assert profile.tp is not None
    return Degree(profile.tp, catalog.decode_table(name), catalog.prefill_table(name))


class _Case:
    """A loss of ranks at `home`, for the machine of the instance and for the policy."""

    def __init__(
        self, question: ElasticQuestion, units: Units, before: Layout, lost: frozenset[int]
    ) -> None:
        self._question, self._units, self._lost = question, units, lost
        self._before = before
        self._geometry = catalog.kv_geometry(question.profile)
        self._prefill = catalog.prefill_table(question.profile)
        self._pages = question.context_tokens // self._geometry.page_size_tokens
        self._streams = [StreamId(f"s{number}") for number in range(question.requests)]
        tokens = question.requests * question.context_tokens
        decode = catalog.decode_table(question.profile)
        self._token_s = decode.seconds_for(question.requests, tokens)

    def ways(self) -> list[dict[str, Any]]:
        """All ways, the one that the instance would take first."""
        full = shares(self._before, self._units).weights
        machine = reform.Reforming(
            self._units,
            self._before,
            Room(capacity_bytes=_ROOM_BYTES, cell_bytes=0, pages=0),
            Costs(
                rates=self._question.rates,
                join_s=0.0,
                restart_s=0.0,
                replace_s=0.0,
                lookahead_tokens=LOOKAHEAD_TOKENS,
                step_s=lambda layout: self._token_s * shares(layout, self._units).weights / full,
            ),
        )
        at_risk = StreamAtRisk(self._pages * self._page_s(1.0))
        lost = reform.RanksLost(self._lost, streams=(at_risk,) * len(self._streams))
        actions = machine.handle(lost)
        (chosen,) = (each.way for each in actions if isinstance(each, reform.CarryOut))
        found = [self._way_on(each, is_chosen=each.way is chosen) for each in machine.choices()]
        return sorted(found, key=lambda each: not each["is_chosen"])

    def _way_on(self, possible: PossibleWay, *, is_chosen: bool) -> dict[str, Any]:
        after, before = (
            shares(layout, self._units) for layout in (possible.plan.after, self._before)
        )
        decode_factor, prefill_factor = after.factors(before)
        reforming = ReformingReport(
            number=1,
            way=possible.way.value,
            ready_in_s=possible.ready_s,
            degree=len(possible.plan.after.ranks),
            lost=[*self._lost],
            move_bytes=0,
            missing_pages=dict.fromkeys(self._streams, self._pages),
            page_s=self._page_s(prefill_factor),
            decode_factor=decode_factor,
            prefill_factor=prefill_factor,
        )
        ranks = self._question.tp
        load = LoadReport(1, 0, 0, 0, 0.0, [], reforming=reforming, full_degree=ranks)
        produced = dict.fromkeys(self._streams, 1)
        event = ev.LoadReported(_HOME, load, False, self._token_s, produced)
        actions = self._policy().handle(event, 1.0)
        decided = [each for each in actions if isinstance(each, act.Recovered)]
        return {
            "way": possible.way,
            "ranks": len(possible.plan.after.ranks),
            "ready_s": possible.ready_s,  # Until it serves again.
            "step_factor": decode_factor,  # Decode steps over those of all ranks.
            "is_chosen": is_chosen,
            "options": _options(decided),
            # Streams that are to leave, and wait for a slot at the target.
            "waiting": len(self._streams) - len(decided),
        }

    def _page_s(self, prefill_factor: float) -> float:
        """Seconds of a page of which the lost ranks had a part: read from the host by the ranks
        side by side, or computed.
        """
        ranks, lost = self._question.tp, len(self._lost)
        if self._question.has_backup:
            lost_bytes = self._geometry.page_bytes * lost / ranks
            return lost_bytes / (ranks - lost) / self._question.host_bytes_per_s
        history_s = self._prefill.seconds_for(self._question.context_tokens)
        return prefill_factor * history_s / max(1, self._pages)

    def _policy(self) -> RecoveryPolicy:
        """A policy with all streams at `home`, and an instance like it on the other node."""
        question, has_backup = self._question, self._question.has_backup
        mode = BackupMode.LOCAL if has_backup else BackupMode.OFF
        backup = BackupSettings(mode=mode, capacity_bytes=_ROOM_BYTES)
        policy = RecoveryPolicy(_SETTINGS, SloSettings(), backup)
        before: list[ev.Event] = [
            ev.LinkMeasured(_HERE, _THERE, question.bytes_per_s),
            ev.LinkMeasured(_THERE, _HERE, question.bytes_per_s),
            self._up("p0", _HERE, Role.PREFILL),
            self._up(_HOME, _HERE, Role.DECODE),
        ]
        if has_backup:
            host_bytes_per_s = question.host_bytes_per_s * question.tp
            before.insert(0, ev.HolderUp(_AGENT, _HERE, 1, _ROOM_BYTES, host_bytes_per_s))
        for stream in self._streams:
            before += (
                ev.StreamArrived(stream, question.context_tokens),
                ev.PrefillDone(stream, 1, question.context_tokens),
                ev.StreamResumed(stream, 1),
            )
        if has_backup:
            held = dict.fromkeys(self._streams, self._pages)
            before.append(ev.CheckpointsReported(_AGENT, 1, 0, len(held), held))
        for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
            before.append(self._up(name, _THERE, role))
        for event in before:
            policy.handle(event, 0.0)
        return policy

    def _up(self, name: str, node: NodeId, role: Role) -> ev.InstanceUp:
        info = assumed_instance(InstanceId(name), node, role, self._geometry)
        return ev.InstanceUp(info, self._prefill)


def _options(decided: Sequence[act.Recovered]) -> list[dict[str, Any]]:
    """Each option with the number of streams that take it, and its predictions for the first stream
    that is decided and for the last one; None: it is not possible then.
    """
    taken = Counter(each.option for each in decided)
    first_s, last_s = (_least_s(decided[at]) if decided else {} for at in (0, -1))
    return [
        {
            "option": option,
            "streams": taken[option],
            "first_s": first_s.get(option),
            "last_s": last_s.get(option),
        }
        for option in Option
        if option in {*taken, *first_s, *last_s}
    ]


def _least_s(action: act.Recovered) -> dict[Option, float]:
    """The least prediction of each option."""
    slowest_first = sorted(action.estimates, key=lambda each: -each.next_token_s)
    return {each.option: each.next_token_s for each in slowest_first}
