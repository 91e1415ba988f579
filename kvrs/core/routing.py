"""Routes of new streams and hand-offs: a new stream goes to the prefill instance with the least
predicted work and its own pair, a hand-off to the decode instance that continues soonest.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf

import msgspec

from kvrs.config.policy import Handoff, PolicySettings
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import HANDSHAKE_S
from kvrs.core.model.events import Promise
from kvrs.core.model.member import Member, is_one_call
from kvrs.core.model.streams import Stream
from kvrs.core.prefix_routing import NO_LIMITS, StartLimits, with_prefix
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role

# Most instances weighed for a hand-off beside the planned one: it bounds the time of a decision.
_CANDIDATES_MAX = 4
# Most streams that may wait for their first token at a decode instance that computes new prompts.
# So each step of its batch has little of them, and running streams keep their pace; a second prompt
# is ready when the first is done.
PROMPTS_MAX = 2


def pair_for(
    view: ClusterView, stream: Stream, *, barred_too: bool, limits: StartLimits | None = NO_LIMITS
) -> tuple[Member, Member] | None:
    """Prefill and decode instance for a new stream; the same instance twice if it does both, or
    computes the prompt without a prefill instance; None: no pair may get the stream.

    `barred_too`: include instances that failed this stream. `limits`: limits on the waits at an
    instance that is chosen for its cached prefix; None: the load alone decides. Instances that a
    gateway has picked come first.
    """
    stream.cached, stream.load, is_free, pair = {}, None, stream.is_free, None
    picked, wanted = _picked(view, stream) if stream.picked else (None, None)
    prefill = picked or least_work(view, stream, is_free, barred_too=barred_too)
    if prefill is not None:
        by_prefix = picked is None and (stream.prefix.hashes or stream.recalled is not None)
        if limits is not None and by_prefix:
            prefill = _cheapest(view, stream, prefill, limits, barred_too=barred_too)
        if wanted is not None:
            for each in (prefill, *view.prefill_order.least_first()):
                if wanted.takes_from(each) and may_have(view, each, stream, barred_too=barred_too):
                    return each, wanted
        decode = own_decode(view, prefill, stream, is_free, barred_too=barred_too, closed_too=False)
        if decode is not None:
            return prefill, _or_unpaired(view, prefill, decode, stream, barred_too=barred_too)
        pair = _pair_apart(view, prefill, stream, is_free, barred_too=barred_too)
        if pair is None and view.formats_differ:
            pair = _pair_of_one_format(view, prefill, stream, is_free, barred_too=barred_too)
    if pair is None and (
        (alone := _least_prompts(view, stream, wanted, limits, barred_too=barred_too)) is not None
    ):
        return alone, alone
    return pair


def _picked(view: ClusterView, stream: Stream) -> tuple[Member | None, Member | None]:
    """Prefill and decode instance that the endpoint picker of a gateway has named; None: none that
    can take the stream now.
    """
    named = [
        member
        for name in stream.picked
        if (member := view.members.get(name)) is not None
        and not member.is_drained
        and may_have(view, member, stream, barred_too=False)
        and _takes(view, member, stream)
    ]
    prefill = next((member for member in named if member.abilities.prefills), None)
    return prefill, next((member for member in named if member.abilities.decodes), None)


def _cheapest(
    view: ClusterView, stream: Stream, first: Member, limits: StartLimits, *, barred_too: bool
) -> Member:
    """The instance with the least cost of the prompt, by its queue and its cached tokens."""

    def allows(member: Member) -> bool:
        return (
            member.is_placed  # A prefill instance gets prompts unless it is drained.
            and may_have(view, member, stream, barred_too=barred_too)
            and _takes(view, member, stream)
        )

    return with_prefix(view, stream, first, allows, limits) if allows(first) else first


def _pair_of_one_format(
    view: ClusterView, but: Member, stream: Stream, is_free: bool, *, barred_too: bool
) -> tuple[Member, Member] | None:
    """A pair with another prefill instance than `but`, between which NIXL can carry a hand-off;
    least work first.
    """
    for prefill in view.prefill_order.least_first():
        if prefill is but or not may_have(view, prefill, stream, barred_too=barred_too):
            continue
        decode = own_decode(view, prefill, stream, is_free, barred_too=barred_too, closed_too=False)
        if decode is not None:
            return prefill, decode
        pair = _pair_apart(view, prefill, stream, is_free, barred_too=barred_too)
        if pair is not None:
            return pair
    return None


def computing_prompts(view: ClusterView) -> list[Member]:
    """Decode instances that compute prompts of new streams now, because no prefill instance is up
    that they take hand-offs from.
    """
    if view.prefillers and not view.formats_differ:
        return []
    return [
        each
        for each in view.decoders
        if each.abilities.computes_prompts and not any(map(each.takes_from, view.prefillers))
    ]


def missing_roles(view: ClusterView) -> list[Role]:
    """Roles that no instance has or can stand in for."""
    does = {
        Role.PREFILL: view.prefillers or computing_prompts(view),
        Role.DECODE: view.decoders,
    }
    return [role for role, members in does.items() if not members]


def has_room_for_prompt(member: Member) -> bool:
    """Return whether the instance has room for a new prompt: fewer than `PROMPTS_MAX` streams wait
    there. Interrupted streams count too, since their histories are computed first.
    """
    return len(member.answers.awaited) < PROMPTS_MAX


def _least_prompts(
    view: ClusterView,
    stream: Stream,
    wanted: Member | None,
    limits: StartLimits | None,
    *,
    barred_too: bool,
) -> Member | None:
    allowed = {
        member
        for member in computing_prompts(view)
        if has_room_for_prompt(member) and may_have(view, member, stream, barred_too=barred_too)
    }
    if wanted in allowed:
        return wanted
    first = min(
        allowed,
        key=lambda each: (not _takes(view, each, stream), len(each.answers.awaited), each.rank),
        default=None,
    )
    if first is None or limits is None or not _takes(view, first, stream):
        return first
    return with_prefix(
        view,
        stream,
        first,
        lambda member: member in allowed and _takes(view, member, stream),
        limits,
    )


def _pair_apart(
    view: ClusterView, prefill: Member, stream: Stream, is_free: bool, *, barred_too: bool
) -> tuple[Member, Member] | None:
    """A pair of this prefill instance with a decode instance, other than its own ones, that is open
    to the stream; else with a closed one.
    """
    pair = _pair_of(view, prefill, stream, barred_too=barred_too, closed_too=False)
    if pair is not None:
        return pair
    decode = own_decode(view, prefill, stream, is_free, barred_too=barred_too, closed_too=True)
    if decode is not None:
        return prefill, decode
    return _pair_of(view, prefill, stream, barred_too=barred_too, closed_too=True)


def _pair_of(
    view: ClusterView, prefill: Member, stream: Stream, *, barred_too: bool, closed_too: bool
) -> tuple[Member, Member] | None:
    """A pair with this prefill instance, or else with a decode instance's own prefill.

    `closed_too`: include decode instances whose answers close them to new requests.
    """
    # A list of all allowed instances would be as long as the cluster; the first is enough.
    allowed: list[Member] = []
    for decode in view.decoders:
        if may_have(view, decode, stream, barred_too=barred_too) and (
            closed_too or _takes(view, decode, stream)
        ):
            if decode.takes_from(prefill):
                return prefill, decode
            allowed.append(decode)
    # Other decode instances take hand-offs only from their own server's prefill.
    for decode in allowed:
        own = own_prefill_of(view, decode)
        if own is not None and may_have(view, own, stream, barred_too=barred_too):
            return own, decode
    return None


def least_work(
    view: ClusterView, stream: Stream, is_free: bool, *, barred_too: bool
) -> Member | None:
    """The prefill instance with the least predicted work; among equals the one with the fewest
    streams at its own pair; None: none may get the stream. An instance that fails at once is idle
    for that reason, and comes last.

    Only instances that could be the best are weighed: few, unless own pairs closed to the stream
    make all instances of equal work possible.
    """
    order = view.prefill_order
    are_pairs_open = is_free and not (order.restricted and order.has_restricted())
    members = order.least_first()
    if are_pairs_open and members and members[0].is_clear(view.now_s):
        return members[0]  # The order is by work, then by streams at the own pair.
    best: Member | None = None
    best_work, best_pair = (True, inf), (0, InstanceId(""))
    for member in members:
        queue_s, *pair = member.place
        if best is not None and not best_work[0]:
            if queue_s > best_work[1]:
                break  # No later instance can be better.
            if are_pairs_open and queue_s == best_work[1] and tuple(pair) > best_pair:
                break
        if is_free and member.is_clear(view.now_s):
            work = False, queue_s
        elif may_have(view, member, stream, barred_too=barred_too):
            work = not _takes(view, member, stream), queue_s
        else:
            continue
        if best is not None and work > best_work:
            continue
        decode = own_decode(view, member, stream, is_free, barred_too=True, closed_too=True)
        found = decode.streams if decode else 0, member.id
        if best is None or (work, found) < (best_work, best_pair):
            best, best_work, best_pair = member, work, found
    return best


def own_decode(
    view: ClusterView,
    prefill: Member,
    stream: Stream,
    is_free: bool,
    *,
    barred_too: bool,
    closed_too: bool,
) -> Member | None:
    """The least loaded decode instance on the node of `prefill` that can take its hand-off; None:
    none can. `barred_too`: see `pair_for`; `closed_too`: see `_pair_of`.
    """
    best: Member | None = None
    is_quick = is_free and not closed_too
    for member in prefill.own_decoders:
        if best is not None and best.rank < member.rank:
            continue
        if (is_quick and member.is_clear(view.now_s)) or (
            may_have(view, member, stream, barred_too=barred_too)
            and (closed_too or _takes(view, member, stream))
        ):
            best = member
    return best


def _or_unpaired(
    view: ClusterView, prefill: Member, own: Member, stream: Stream, *, barred_too: bool
) -> Member:
    """The least loaded decode instance on nodes without a prefill instance, if it has fewer streams
    than `own`: it gets no stream otherwise. Else `own`.
    """
    for member in view.decoders if view.unpaired else ():
        if member.streams >= own.streams:
            break
        if (
            member in view.unpaired
            and member.takes_from(prefill)
            and may_have(view, member, stream, barred_too=barred_too)
            and _takes(view, member, stream)
        ):
            return member
    return own


def has_others(view: ClusterView, member: Member, is_heard: Callable[[InstanceId], bool]) -> bool:
    """Return whether the instance's streams could continue at others: heard, staying,
    not ejected.
    """

    def is_left(other: Member) -> bool:
        return (
            other is not member
            and not other.must_drain
            and not other.answers.is_ejected
            and is_heard(other.id)
        )

    def prefills(other: Member) -> bool:
        return other.abilities.prefills or other.abilities.computes_prompts

    def decodes(other: Member) -> bool:
        return other.abilities.decodes and view.has_prefill(other)

    others = view.members.values()
    return (
        not member.abilities.prefills or any(prefills(each) and is_left(each) for each in others)
    ) and (not member.abilities.decodes or any(decodes(each) and is_left(each) for each in others))


class HandoffCandidate(msgspec.Struct, frozen=True):
    """A decode instance that could take a hand-off once prefill is done (DESIGN section 4).

    The queue of the own decode instance is weighed against the transfer to another one and its
    queue. The crossover of seed KVRS follows: with more than `q* = (KV bytes / bandwidth) / service
    time` requests in the own queue, an idle remote instance is sooner.
    """

    instance: InstanceId
    queue_s: float
    bytes_per_s: float  # Bandwidth from the prefill instance.
    bytes_ahead: int = 0  # Bytes already on that link.
    is_near: bool = False  # The candidate is on the prefill instance's node.


def choose_hand_off(
    how: Handoff,
    planned: HandoffCandidate,
    others: Sequence[HandoffCandidate],
    kv_bytes: int,
    handshake_s: float,
) -> HandoffCandidate:
    """The candidate that continues the stream soonest; ties go to the planned one."""
    if how is Handoff.OWN_PAIR or not others:
        return planned
    return min((planned, *others), key=lambda each: hand_off_s(how, each, kv_bytes, handshake_s))


def hand_off_s(
    how: Handoff, candidate: HandoffCandidate, kv_bytes: int, handshake_s: float
) -> float:
    """Seconds until the candidate continues the stream: by seed KVRS (`rom`), or by all terms."""
    if how is Handoff.ROM:
        # The own pair's link counts as free: NVLink in seed KVRS.
        is_free = candidate.is_near
        return candidate.queue_s + (0.0 if is_free else kv_bytes / candidate.bytes_per_s)
    # Transfers ahead on the link drain while the stream queues.
    wait_s = max(candidate.queue_s, candidate.bytes_ahead / candidate.bytes_per_s)
    return wait_s + handshake_s + kv_bytes / candidate.bytes_per_s


def starts_at(
    view: ClusterView, stream: Stream, prefill: Member, planned: Member, settings: PolicySettings
) -> Member:
    """The decode instance of a stream that begins with one call for both stages, or two at once:
    its hand-off cannot be redirected later, so it is chosen now.
    """
    can_differ = prefill.abilities.retains or planned.info.joins_prefill
    if _keeps_pair(stream, planned, settings) or not can_differ:
        return planned
    others = (
        member for member in _able(view, stream, prefill, planned) if _takes(view, member, stream)
    )
    return _soonest(view, stream, prefill, planned, others, settings.handoff)


def hand_off_to(
    view: ClusterView, stream: Stream, prefill: Member, planned: Member, settings: PolicySettings
) -> Member | None:
    """The decode instance for a completed prefill's hand-off; None: the planned one has unloaded
    the stream's adapter, and no other has it.
    """
    if is_one_call(planned, prefill.id):
        return planned  # A single call for both stages decodes already.
    is_left = planned.reforming is not None and planned.is_drained
    is_own = _keeps_pair(stream, planned, settings)
    if (
        is_own
        and (not stream.name or stream.is_served_at(planned))
        and not is_left
        and planned.is_clear(view.now_s)
    ):
        return planned
    others = (
        member
        for member in _able(view, stream, prefill, planned)
        if member.continues(stream.tokens, stream.promise) and view.is_healthy(member)
    )
    if not stream.is_served_at(planned):
        return next(others, None)
    if is_left or (view.is_busy(planned) and planned.answers.tried_by != stream.id):
        return next(others, planned)
    if is_own:
        return planned
    return _soonest(view, stream, prefill, planned, others, settings.handoff)


def _keeps_pair(stream: Stream, planned: Member, settings: PolicySettings) -> bool:
    """Return whether a hand-off stays with the planned instance, by the settings or because a
    gateway has picked it.
    """
    return settings.handoff is Handoff.OWN_PAIR or planned.id in stream.picked


def _able(view: ClusterView, stream: Stream, prefill: Member, planned: Member) -> Iterator[Member]:
    """Other decode instances that could take this stream's hand-off, least loaded first."""
    geometry = prefill.info.geometry
    for member in view.decoders:
        if (
            member is not planned
            and member.info.geometry == geometry
            and (member.abilities.pulls or member.info.own_prefill is None)
            and member.reads_format_of(prefill)
            and may_have(view, member, stream, barred_too=False)
        ):
            yield member


def _soonest(
    view: ClusterView,
    stream: Stream,
    prefill: Member,
    planned: Member,
    others: Iterable[Member],
    how: Handoff,
) -> Member:
    found = choose_hand_off(
        how,
        _candidate(view, prefill, planned),
        [_candidate(view, prefill, member) for member in islice(others, _CANDIDATES_MAX)],
        prefill.info.geometry.sent_bytes(stream.history_tokens),
        HANDSHAKE_S,
    )
    return view.members[found.instance]


def _candidate(view: ClusterView, prefill: Member, decode: Member) -> HandoffCandidate:
    link = view.link(prefill.node, decode.node)
    return HandoffCandidate(
        decode.id,
        decode.queue_s,
        link.bytes_per_s,
        link.in_flight_bytes,
        is_near=decode.node == prefill.node,
    )


def may_have(view: ClusterView, member: Member, stream: Stream, *, barred_too: bool) -> bool:
    """Return whether the instance may get this stream, regardless of its health: it serves the
    name, has asked for no pause, has not failed the stream (unless `barred_too`), the stream need
    not avoid it (`poison.py`), and its weights are not doubted while others serve.
    """
    if stream.name and not stream.is_served_at(member):
        return False
    busy_until_s = member.answers.busy_until_s
    if busy_until_s is not None and view.now_s < busy_until_s:
        return False
    if member.id in stream.recovery.avoided:
        return False
    is_promised = stream.promise is not Promise.NONE
    # A stream of known tokens goes on by these, but what computes its prompt has none.
    if (member.is_doubted and not (stream.tokens and member.abilities.decodes)) and (
        is_promised or view.has_better(member, stream.name)
    ):
        return False
    return barred_too or not stream.excluded_epochs or not stream.bars(member)


def _takes(view: ClusterView, member: Member, stream: Stream) -> bool:
    """Return whether the instance's recent answers allow this stream. Only a stream without an
    attempt probes an instance that failed others.
    """
    if stream.attempt.number:
        return view.takes_recovery(member)
    return view.takes_start(member)


def own_prefill_of(view: ClusterView, decode: Member) -> Member | None:
    """The prefill instance of the same server, if it is up."""
    own = decode.info.own_prefill
    return None if own is None else view.members.get(own)
