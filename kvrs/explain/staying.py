"""What becomes of the streams of an instance that loses ranks: every way in which the instance can
go on, by the state machine that chooses one, and for each way what the policy decides for each
stream, by the policy itself.

The instance `home` serves all requests; another one like it, with a prefill instance beside it,
stands on a second node and is idle. The prefill instance beside `home` retains all prompts. To
start processes, and to let them join, is not counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.elastic.layouts import Layout
from kvrs.elastic.moving import LinkRates
from kvrs.elastic.reforming import (
    CarryOut,
    Costs,
    PossibleWay,
    RanksLost,
    Reforming,
    Room,
    StreamAtRisk,
)
from kvrs.elastic.speed import shares
from kvrs.elastic.units import Units
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.model.actions import Recovered
from kvrs.policy.model.cluster_view import Instance
from kvrs.policy.model.estimates import Option
from kvrs.policy.model.events import (
    CheckpointsReported,
    HolderUp,
    InstanceReforming,
    InstanceUp,
    LinkMeasured,
    PrefillDone,
    StreamArrived,
    StreamResumed,
)
from kvrs.policy.recovery import RecoveryPolicy
from kvrs.profiles import catalog
from kvrs.protocol.instance import Capability, Role

_HOME, _AGENT = InstanceId("home"), InstanceId("agent")
_HERE, _THERE = NodeId("n0"), NodeId("n1")
_ROOM_BYTES = 1 << 60
_SETTINGS = PolicySettings()


@dataclass(frozen=True, slots=True)
class OptionTaken:
    """One option of the streams, and how many take it. The predictions are those for the first
    stream that is decided and for the last one; None: the option is not possible then.
    """

    option: Option
    streams: int
    first_s: float | None
    last_s: float | None


@dataclass(frozen=True, slots=True)
class WayOn:
    """One way of the instance."""

    way: str
    ranks: int
    ready_s: float  # Until it serves again.
    step_factor: float  # Decode steps over those of all ranks.
    is_chosen: bool
    options: tuple[OptionTaken, ...]
    waiting: int  # Streams that are to leave, and wait for a slot at the target.


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticCase:
    profile: str
    units: Units
    before: Layout
    lost: frozenset[int]
    requests: int
    context_tokens: int
    has_backup: bool  # Of KV, by the agent of the instance's node.
    rates: LinkRates
    bytes_per_s: float  # Between the nodes.


def ways_on(case: ElasticCase) -> tuple[WayOn, ...]:
    """All ways, the one that the instance would take first."""
    table = catalog.decode_table(case.profile)
    tokens = case.requests * case.context_tokens
    token_s = table.seconds_for(case.requests, tokens)
    full = shares(case.before, case.units).weights

    def step_s(layout: Layout) -> float:
        return token_s * shares(layout, case.units).weights / full

    machine = Reforming(
        case.units,
        case.before,
        Room(capacity_bytes=_ROOM_BYTES, cell_bytes=0, pages=0),
        Costs(
            rates=case.rates,
            join_s=0.0,
            restart_s=0.0,
            replace_s=0.0,
            lookahead_tokens=_SETTINGS.lookahead_tokens,
            step_s=step_s,
        ),
    )
    at_risk = StreamAtRisk(_pages(case) * _page_s(case, 1.0))
    lost = RanksLost(case.lost, streams=(at_risk,) * case.requests)
    (chosen,) = (each for each in machine.handle(lost) if isinstance(each, CarryOut))
    found = [_way_on(case, each, token_s, chosen) for each in machine.choices()]
    return tuple(sorted(found, key=lambda each: not each.is_chosen))


def _way_on(case: ElasticCase, possible: PossibleWay, token_s: float, chosen: CarryOut) -> WayOn:
    after, before = (shares(layout, case.units) for layout in (possible.plan.after, case.before))
    event = InstanceReforming(
        _HOME,
        1,
        1,
        f"{len(case.lost)} ranks lost: {possible.way.value}",
        possible.ready_s,
        dict.fromkeys(_streams(case), _pages(case)),
        _page_s(case, after.rows / before.rows),
        after.weights / before.weights,
        after.rows / before.rows,
        token_s,
        dict.fromkeys(_streams(case), 1),
    )
    policy = _policy(case)
    decided = [each for each in policy.handle(event, 1.0) if isinstance(each, Recovered)]
    return WayOn(
        way=possible.way.value,
        ranks=len(possible.plan.after.ranks),
        ready_s=possible.ready_s,
        step_factor=event.decode_factor,
        is_chosen=possible.way is chosen.way,
        options=_options(decided),
        waiting=case.requests - len(decided),
    )


def _options(decided: Sequence[Recovered]) -> tuple[OptionTaken, ...]:
    taken = Counter(each.option for each in decided)
    first, last = (_least_s(decided[at]) for at in (0, -1)) if decided else ({}, {})
    return tuple(
        OptionTaken(option, taken[option], first.get(option), last.get(option))
        for option in Option
        if option in taken or option in first or option in last
    )


def _least_s(action: Recovered) -> dict[Option, float]:
    least_s: dict[Option, float] = {}
    for each in action.estimates:
        least_s[each.option] = min(each.next_token_s, least_s.get(each.option, each.next_token_s))
    return least_s


def _streams(case: ElasticCase) -> list[StreamId]:
    return [StreamId(f"s{number}") for number in range(case.requests)]


def _pages(case: ElasticCase) -> int:
    return case.context_tokens // catalog.kv_geometry(case.profile).page_size_tokens


def _page_s(case: ElasticCase, prefill_factor: float) -> float:
    """Of a page of which the lost ranks had a part: read from the host by the ranks side by side,
    or computed.
    """
    geometry, ranks = catalog.kv_geometry(case.profile), len(case.before.ranks)
    if case.has_backup:
        lost_bytes = geometry.page_bytes * len(case.lost) / ranks
        return lost_bytes / (ranks - len(case.lost)) / case.rates.host_bytes_per_s
    table = catalog.prefill_table(case.profile)
    return prefill_factor * table.seconds_for(case.context_tokens) / max(1, _pages(case))


def _policy(case: ElasticCase) -> RecoveryPolicy:
    """With all streams at `home`, and its like on the other node."""
    mode = BackupMode.LOCAL if case.has_backup else BackupMode.OFF
    backup = BackupSettings(mode=mode, capacity_bytes=_ROOM_BYTES)
    policy = RecoveryPolicy(_SETTINGS, SloSettings(), backup)
    if case.has_backup:
        host_bytes_per_s = case.rates.host_bytes_per_s * len(case.before.ranks)
        policy.handle(HolderUp(_AGENT, _HERE, 1, _ROOM_BYTES, host_bytes_per_s), 0.0)
    for one, other in ((_HERE, _THERE), (_THERE, _HERE)):
        policy.handle(LinkMeasured(one, other, case.bytes_per_s), 0.0)
    policy.handle(InstanceUp(_instance(case, InstanceId("p0"), _HERE, Role.PREFILL)), 0.0)
    policy.handle(InstanceUp(_instance(case, _HOME, _HERE, Role.DECODE)), 0.0)
    streams, prompt_tokens = _streams(case), case.context_tokens
    for stream in streams:
        policy.handle(StreamArrived(stream, prompt_tokens), 0.0)
        policy.handle(PrefillDone(stream, 1, prompt_tokens), 0.0)
        policy.handle(StreamResumed(stream, 1), 0.0)
    if case.has_backup:
        held = dict.fromkeys(streams, _pages(case))
        policy.handle(CheckpointsReported(_AGENT, 1, 0, len(held), held), 0.0)
    for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        policy.handle(InstanceUp(_instance(case, InstanceId(name), _THERE, role)), 0.0)
    return policy


def _instance(case: ElasticCase, name: InstanceId, node: NodeId, role: Role) -> Instance:
    geometry = catalog.kv_geometry(case.profile)
    table = catalog.prefill_table(case.profile)
    return Instance(name, node, role, 1, geometry, table, frozenset(Capability))
