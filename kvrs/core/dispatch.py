"""Targets of the victims of one event: the allowed ones (`victim_of`), the assigned one (LUMEN
section 4.3, locality-aware recovery scheduling: near the KV, then rebalanced away from overloaded
targets), and further ones to weigh.

The load of a target is its number of streams. The caller gives the loads; nothing is booked here.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter

import msgspec

from kvrs.config.policy import Dispatch
from kvrs.core.books.waiting import is_past
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.events import Promise
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.routing import may_have
from kvrs.ids import InstanceId, NodeId, StreamId

# Targets weighed per victim: a bound on the time of a decision.
TARGETS_MAX = 4


class Victim(msgspec.Struct, frozen=True):
    stream: StreamId
    homes: tuple[InstanceId, ...] = ()  # Targets on the node that has most of the stream's KV.
    held_pages: int = 0  # Pages of the history on that node.
    excluded_epochs: frozenset[InstanceId] = frozenset()  # Targets that the stream must not get.


def victim_of(view: ClusterView, stream: Stream, now_s: float) -> Victim:
    """Return a stream as the dispatcher sees it. After its pause the stream may return to an
    instance that failed it if there is no other target, and it goes to an instance with other
    tokens only if there is no better one.
    """
    excluded_epochs = _barred(view, stream, now_s) if stream.excluded_epochs else frozenset()
    excluded_epochs |= stream.recovery.avoided
    if stream.name:
        lacking = (each for each in view.targets() if not stream.is_served_at(each))
        excluded_epochs |= frozenset(member.id for member in lacking)
    is_bound = stream.tokens and (view.tokens_differ or stream.promise is not Promise.NONE)
    if is_bound or (view.has_doubted and not stream.tokens):
        excluded_epochs |= _foreign(view, stream, excluded_epochs)
    if stream.must_replay:
        unable = (each for each in view.targets(stream.name) if not stream.may_replay(each))
        excluded_epochs |= frozenset(member.id for member in unable)
    # Agents come first at equal pages: their checkpoints survive the instances beside them.
    holders: list[tuple[int, NodeId]] = []
    for stored in stream.checkpoints.values():
        holders.append((stored.pages, stored.agent.node))
    for held in stream.holders.values():
        holders.append((held.pages, held.member.node))
    if len(holders) > 1:
        holders.sort(key=itemgetter(0), reverse=True)
    homes: list[InstanceId] = []
    for pages, node in holders:
        for member in view.by_node.get(node, ()) if pages else ():
            if (
                member.decodes
                and not member.is_drained
                and member.id not in excluded_epochs
                and view.is_healthy(member)
                and stream.is_served_at(member)
            ):
                homes.append(member.id)
        if homes:
            return Victim(stream.id, tuple(homes), pages, excluded_epochs)
    return Victim(stream.id, excluded_epochs=excluded_epochs)


def _barred(view: ClusterView, stream: Stream, now_s: float) -> frozenset[InstanceId]:
    """Return the targets that failed the stream; none if they are all targets and its pause is
    over.
    """
    targets = view.targets(stream.name)
    if stream.promise is not Promise.NONE:  # Other targets could not keep the promise.
        targets = [each for each in targets if each.continues(stream.tokens, stream.promise)]
    barred = frozenset(member.id for member in targets if stream.bars(member))
    are_all = len(barred) == len(targets)
    return frozenset() if are_all and is_past(stream.recovery.retry_at_s, now_s) else barred


def _foreign(
    view: ClusterView, stream: Stream, excluded: frozenset[InstanceId]
) -> frozenset[InstanceId]:
    """Targets at which the stream would continue with other tokens, if there are better ones, or if
    other tokens would break a promise.
    """
    open_ = [member for member in view.targets(stream.name) if member.id not in excluded]
    foreign = [
        each
        for each in open_
        if not each.continues(stream.tokens, stream.promise)
        or (each.is_doubted and not stream.tokens)
    ]
    is_left = len(foreign) < len(open_) or stream.promise is not Promise.NONE
    return frozenset(member.id for member in foreign if is_left)


def assign(
    how: Dispatch, victims: Sequence[Victim], loads: Mapping[InstanceId, int]
) -> dict[StreamId, InstanceId]:
    """Assign a target to each victim that has any; `loads` has the targets, without the victims."""
    loads = dict(loads)
    assigned: dict[StreamId, InstanceId] = {}
    # Victims with a holder are placed first; the others fill the rest.
    for victim in victims if how is not Dispatch.LEAST_LOADED else ():
        if victim.homes and (target := _least(victim, victim.homes, loads)) is not None:
            assigned[victim.stream] = target
            loads[target] += 1
    for victim in victims:
        if victim.stream in assigned:
            continue
        if (target := _least(victim, loads, loads)) is not None:
            assigned[victim.stream] = target
            loads[target] += 1
    if how is Dispatch.REBALANCE:
        _rebalance(victims, assigned, loads)
    return assigned


def ceiling(victims: int, loads: Mapping[InstanceId, int]) -> int:
    """Mean load after placing `victims`, rounded up (LUMEN section 4.3); 0 without targets."""
    return -(-(sum(loads.values()) + victims) // len(loads)) if loads else 0


def _rebalance(
    victims: Sequence[Victim], assigned: dict[StreamId, InstanceId], loads: dict[InstanceId, int]
) -> None:
    """Move victims from the most loaded target, smallest checkpoint first, to the least loaded;
    each victim moves at most once.

    The moves end when no target with movable victims is above the ceiling of the mean, or no move
    helps.
    """
    limit = ceiling(0, loads)
    movable: dict[InstanceId, list[Victim]] = {}
    for victim in sorted(victims, key=attrgetter("held_pages"), reverse=True):
        if victim.stream in assigned:
            movable.setdefault(assigned[victim.stream], []).append(victim)
    while True:
        source, most = None, limit
        for each, there in movable.items():
            load = loads[each]
            if there and (load > most or (load == most and source is not None and each > source)):
                source, most = each, load
        if source is None:
            return
        victim = movable[source].pop()
        target = _least(victim, loads, loads)
        assert target is not None, victim
        if loads[target] + 1 < most:
            assigned[victim.stream] = target
            loads[source] -= 1
            loads[target] += 1


def _least(
    victim: Victim, among: Iterable[InstanceId], loads: Mapping[InstanceId, int]
) -> InstanceId | None:
    """The least loaded of these targets that the victim may have. A loop, because it runs for each
    victim and `min` with a key takes five times as long.
    """
    best: InstanceId | None = None
    least, excluded = 0, victim.excluded_epochs
    for target in among:
        load = loads.get(target)
        if load is None or target in excluded:
            continue
        if best is None or load < least or (load == least and target < best):
            best, least = target, load
    return best


def targets_for(view: ClusterView, stream: Stream, assigned: Member, limit: int) -> list[Member]:
    """Return up to `TARGETS_MAX` targets to weigh that have fewer than `limit` streams: the
    assigned one, then the least loaded others. If none has fewer, return the assigned one alone.
    """
    targets = [assigned] if assigned.streams < limit else []
    is_free, tokens, promise = stream.is_free, stream.tokens, stream.promise
    for member in view.decoders:
        if len(targets) == TARGETS_MAX or member.streams >= limit:
            break
        if (
            member is not assigned
            and (
                (is_free and member.info.own_prefill is None and member.is_clear(view.now_s))
                or (view.is_healthy(member) and may_have(view, member, stream, barred_too=False))
            )
            and (
                not tokens
                or member.continues(tokens, promise)
                or not assigned.continues(tokens, promise)
            )
        ):
            targets.append(member)
    return targets or [assigned]
