"""Where work goes: new streams to the least predicted work, own pair first; recoveries to the few targets worth weighing."""

from itertools import islice

from kvrs.ids import InstanceId
from kvrs.policy import handoff
from kvrs.policy.cluster_view import ClusterView, Member
from kvrs.policy.config import Dispatch, Handoff, PolicyName, PolicySettings
from kvrs.policy.dispatch import Victim
from kvrs.policy.streams import Stream

# How many targets are looked at per victim: a decision takes the same time in a large cluster as in a small one.
TARGETS_MAX = 4


def pair_for(view: ClusterView, stream: Stream, *, barred_too: bool) -> tuple[Member, Member] | None:
    """Prefill and decode instance for a stream from its beginning; the same one twice where an instance does both."""
    prefill = least_work(view, stream, barred_too=barred_too)
    if prefill is None:
        return None
    decode = own_decode(view, prefill, stream, barred_too=barred_too)
    if decode is not None:
        return prefill, decode
    allowed = [member for member in view.decoders() if barred_too or not stream.bars(member)]
    for decode in allowed:
        if decode.takes_from(prefill):
            return prefill, decode
    # All that are left have only the prefill of their own server.
    for decode in allowed:
        own = _own_prefill(view, decode)
        if own is not None and (barred_too or not stream.bars(own)):
            return own, decode
    return None


def least_work(view: ClusterView, stream: Stream, *, barred_too: bool) -> Member | None:
    """The prefill instance with the least predicted work; among equals the one whose own pair decodes least."""

    def burden(member: Member) -> tuple[float, int, InstanceId]:
        decode = own_decode(view, member, stream, barred_too=True)
        return member.queue_s, decode.streams if decode else 0, member.instance.id

    allowed = (member for member in view.prefillers() if barred_too or not stream.bars(member))
    return min(allowed, key=burden, default=None)


def own_decode(view: ClusterView, prefill: Member, stream: Stream, *, barred_too: bool) -> Member | None:
    """The least loaded decode instance on the node of `prefill` that can have its hand-off."""
    on_node = view.on_node(prefill.instance.node)
    allowed = (
        member
        for member in on_node
        if member.decodes and not member.is_drained and member.takes_from(prefill) and (barred_too or not stream.bars(member))
    )
    return min(allowed, key=lambda member: member.rank, default=None)


def victim_of(view: ClusterView, stream: Stream, *, barred_too: bool) -> Victim:
    """What the dispatcher has to know of a stream. Where it has just failed it goes only when there is nothing else."""
    barred: frozenset[InstanceId] = frozenset()
    if stream.barred:
        targets = view.targets()
        barred = frozenset(member.instance.id for member in targets if stream.bars(member))
        if barred_too and len(barred) == len(targets):
            barred = frozenset()
    # With equal pages an agent comes first: what it has survives the instances beside it.
    holders = [(kept.pages, kept.agent.node) for kept in stream.checkpoints.values() if kept.pages]
    holders += [(kept.pages, kept.member.instance.node) for kept in stream.holders.values() if kept.pages]
    holders.sort(key=lambda holder: holder[0], reverse=True)
    for pages, node in holders:
        open_ = (member for member in view.on_node(node) if member.decodes and not member.is_drained and view.is_whole(member))
        homes = tuple(member.instance.id for member in open_ if member.instance.id not in barred)
        if homes:
            return Victim(stream.id, homes, pages, barred)
    return Victim(stream.id, barred=barred)


def targets_for(view: ClusterView, stream: Stream, assigned: Member, limit: int, settings: PolicySettings) -> list[Member]:
    """Whom to weigh: the assigned target, and where the policy may choose the least loaded ones below the limit beside it.

    The limit holds for the assigned one as well, unless nobody is below it.
    """
    if settings.name is not PolicyName.AUTO or settings.dispatch is not Dispatch.REBALANCE:
        return [assigned]
    targets = [assigned] if assigned.streams < limit else []
    for member in view.decoders():
        if len(targets) == TARGETS_MAX or member.streams >= limit:
            break
        if member is not assigned and view.is_whole(member) and not (stream.barred and stream.bars(member)):
            targets.append(member)
    return targets or [assigned]


def hand_off_to(view: ClusterView, stream: Stream, prefill: Member, planned: Member, settings: PolicySettings) -> Member:
    """The decode instance that gets the hand-off of a prefill that is done."""
    if settings.handoff is Handoff.OWN_PAIR or planned.own_prefill == prefill.instance.id:
        return planned  # What is one call decodes already.
    geometry = prefill.instance.geometry
    others = (
        member
        for member in view.decoders()
        if member is not planned
        and member.instance.geometry == geometry
        and (member.pulls or member.own_prefill is None)
        and not stream.bars(member)
    )
    found = handoff.choose(
        settings.handoff,
        _candidate(view, prefill, planned),
        [_candidate(view, prefill, member) for member in islice(others, TARGETS_MAX)],
        stream.history_tokens * geometry.bytes_per_token,
        settings.handshake_s,
    )
    return view.members[found.instance]


def _candidate(view: ClusterView, prefill: Member, decode: Member) -> handoff.Candidate:
    link = view.link(prefill.instance.node, decode.instance.node)
    return handoff.Candidate(decode.instance.id, decode.queue_s, link.bytes_per_s, link.in_flight_bytes)


def prefill_for(view: ClusterView, target: Member, stream: Stream) -> Member:
    """Who computes a whole history for the target: its own pair, else the prefill instance with the least work.

    When none is left the target does it itself: every engine computes a prompt of which it is given no KV.
    """
    if target.own_prefill is not None:
        own = _own_prefill(view, target)
        if own is not None and not stream.bars(own):
            return own
        if not target.pulls:
            return target
    best: Member | None = None
    for member in view.on_node(target.instance.node):
        if not member.prefills or member.is_drained or (stream.barred and stream.bars(member)):
            continue
        if best is None or member.queue_s < best.queue_s:
            best = member
    return best or least_work(view, stream, barred_too=False) or target


def _own_prefill(view: ClusterView, decode: Member) -> Member | None:
    """The prefill instance of the same server, if it is up."""
    own = decode.own_prefill
    return None if own is None else view.members.get(own)
