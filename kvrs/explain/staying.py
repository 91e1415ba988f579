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
class Situation:
    profile: str
    units: Units
    before: Layout
    lost: frozenset[int]
    requests: int
    context_tokens: int
    has_backup: bool  # Of KV, by the agent of the instance's node.
    rates: LinkRates
    bytes_per_s: float  # Between the nodes.


def ways_on(situation: Situation) -> tuple[WayOn, ...]:
    """All ways, the one that the instance would take first."""
    table = catalog.decode_table(situation.profile)
    tokens = situation.requests * situation.context_tokens
    token_s = table.seconds_for(situation.requests, tokens)
    full = shares(situation.before, situation.units).weights

    def step_s(layout: Layout) -> float:
        return token_s * shares(layout, situation.units).weights / full

    machine = Reforming(
        situation.units,
        situation.before,
        Room(capacity_bytes=_ROOM_BYTES, cell_bytes=0, pages=0),
        Costs(
            rates=situation.rates,
            join_s=0.0,
            restart_s=0.0,
            replace_s=0.0,
            lookahead_tokens=_SETTINGS.lookahead_tokens,
            step_s=step_s,
        ),
    )
    at_risk = StreamAtRisk(_pages(situation) * _page_s(situation, 1.0))
    lost = RanksLost(situation.lost, streams=(at_risk,) * situation.requests)
    (chosen,) = (each for each in machine.handle(lost) if isinstance(each, CarryOut))
    found = [_way_on(situation, each, token_s, chosen) for each in machine.choices()]
    return tuple(sorted(found, key=lambda each: not each.is_chosen))


def _way_on(situation: Situation, possible: PossibleWay, token_s: float, chosen: CarryOut) -> WayOn:
    after, before = (
        shares(layout, situation.units) for layout in (possible.plan.after, situation.before)
    )
    event = InstanceReforming(
        _HOME,
        1,
        1,
        f"{len(situation.lost)} ranks lost: {possible.way.value}",
        possible.ready_s,
        dict.fromkeys(_streams(situation), _pages(situation)),
        _page_s(situation, after.rows / before.rows),
        after.weights / before.weights,
        after.rows / before.rows,
        token_s,
        dict.fromkeys(_streams(situation), 1),
    )
    policy = _policy(situation)
    decided = [each for each in policy.handle(event, 1.0) if isinstance(each, Recovered)]
    return WayOn(
        way=possible.way.value,
        ranks=len(possible.plan.after.ranks),
        ready_s=possible.ready_s,
        step_factor=event.decode_factor,
        is_chosen=possible.way is chosen.way,
        options=_options(decided),
        waiting=situation.requests - len(decided),
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


def _streams(situation: Situation) -> list[StreamId]:
    return [StreamId(f"s{number}") for number in range(situation.requests)]


def _pages(situation: Situation) -> int:
    return situation.context_tokens // catalog.kv_geometry(situation.profile).page_size_tokens


def _page_s(situation: Situation, prefill_factor: float) -> float:
    """Of a page of which the lost ranks had a part: read from the host by the ranks side by side,
    or computed.
    """
    geometry, ranks = catalog.kv_geometry(situation.profile), len(situation.before.ranks)
    if situation.has_backup:
        lost_bytes = geometry.page_bytes * len(situation.lost) / ranks
        return lost_bytes / (ranks - len(situation.lost)) / situation.rates.host_bytes_per_s
    table = catalog.prefill_table(situation.profile)
    return prefill_factor * table.seconds_for(situation.context_tokens) / max(1, _pages(situation))


def _policy(situation: Situation) -> RecoveryPolicy:
    """With all streams at `home`, and its like on the other node."""
    mode = BackupMode.LOCAL if situation.has_backup else BackupMode.OFF
    backup = BackupSettings(mode=mode, capacity_bytes=_ROOM_BYTES)
    policy = RecoveryPolicy(_SETTINGS, SloSettings(), backup)
    if situation.has_backup:
        host_bytes_per_s = situation.rates.host_bytes_per_s * len(situation.before.ranks)
        policy.handle(HolderUp(_AGENT, _HERE, 1, _ROOM_BYTES, host_bytes_per_s), 0.0)
    for one, other in ((_HERE, _THERE), (_THERE, _HERE)):
        policy.handle(LinkMeasured(one, other, situation.bytes_per_s), 0.0)
    policy.handle(InstanceUp(_instance(situation, InstanceId("p0"), _HERE, Role.PREFILL)), 0.0)
    policy.handle(InstanceUp(_instance(situation, _HOME, _HERE, Role.DECODE)), 0.0)
    streams, prompt_tokens = _streams(situation), situation.context_tokens
    for stream in streams:
        policy.handle(StreamArrived(stream, prompt_tokens), 0.0)
        policy.handle(PrefillDone(stream, 1, prompt_tokens), 0.0)
        policy.handle(StreamResumed(stream, 1), 0.0)
    if situation.has_backup:
        held = dict.fromkeys(streams, _pages(situation))
        policy.handle(CheckpointsReported(_AGENT, 1, 0, len(held), held), 0.0)
    for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        policy.handle(InstanceUp(_instance(situation, InstanceId(name), _THERE, role)), 0.0)
    return policy


def _instance(situation: Situation, name: InstanceId, node: NodeId, role: Role) -> Instance:
    geometry = catalog.kv_geometry(situation.profile)
    table = catalog.prefill_table(situation.profile)
    return Instance(name, node, role, 1, geometry, table, frozenset(Capability))
