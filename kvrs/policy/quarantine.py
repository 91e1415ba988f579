"""Quarantine: a request that may kill what it runs on brings down no third instance, and costs no
other stream more than a recovery.

A stream is suspected when an instance died from which it waited for its first token: streams that
had one there have shown that the instance can serve them, and one that was prefilled before, that
no prefill instance dies of it. A suspected stream runs apart: where no other stream waits for its
first token, and nothing else is sent meanwhile. So the next death has one suspect only. A stream
that is the only one at its second death is refused; any other has a token by then, and is suspected
no longer.

An instance that only fell silent may be frozen or cut off. A stream that would be refused for it
waits until that instance is up again: if its process had not ended, it was no death.

While a suspected stream runs apart on the last instance of a role, streams without a token wait:
one that came along would be a second suspect, and the killer would have a third instance.
"""

from collections.abc import Iterable

from kvrs.policy.model.cluster_view import ClusterView, Member
from kvrs.policy.model.streams import Stream
from kvrs.protocol.instance import Role

# A stream that was suspected once waits so long to run apart: most instances die of other causes,
# and of many with one such death in common the last ones would wait for all others.
FIRST_WAIT_S = 1.0
# How often a stream that waits to run apart looks for an instance.
LOOK_S = 0.05


def note_death(
    view: ClusterView, streams: Iterable[Stream], member: Member, wait_s: float, *, may_live: bool
) -> list[Stream]:
    """Suspect the streams that waited for their first token from an instance that has died, or has
    fallen silent (`may_live`).
    """
    instance, waiting = member.instance, member.health.awaited
    suspects = [
        stream
        for stream in streams
        if (stream.id in waiting or stream.recovery.broke_at(instance, view.now_s))
        and not (instance.role is Role.PREFILL and _was_prefilled(stream))
    ]
    for stream in suspects:
        stream.recovery.note_death(
            instance,
            view.now_s,
            first_wait_s(wait_s),
            wait_s / 2,
            is_alone=len(suspects) == 1,
            may_live=may_live,
        )
    return suspects


def _was_prefilled(stream: Stream) -> bool:
    """Whether an instance has computed, and survived, all that another one prefills again."""
    return stream.prefilled and stream.produced_tokens == 0


def first_wait_s(wait_s: float) -> float:
    """How long a stream that was suspected once waits to run apart."""
    return min(FIRST_WAIT_S, wait_s / 2)


def occupied(view: ClusterView, stream: Stream) -> frozenset[str]:
    """The instances where this stream would not be apart, or that others cannot spare."""
    names = {
        member.instance.id
        for member in view.members.values()
        if member.quarantined_for not in (None, stream.id)
        or any(other != stream.id for other in member.health.awaited)
    }
    for role in _roles(view):
        if not _can_spare(role):
            names.update(member.instance.id for member in role)
    return frozenset(names)


def reserve(view: ClusterView, stream: Stream) -> None:
    """Keep new work from the instances that are the next to be free for it."""
    prefillers, decoders = _roles(view)
    roles = [prefillers, decoders] if stream.is_fresh else [decoders]
    kept = [_next_free(view, stream, role) for role in roles]
    begin(stream, [member for member in kept if member is not None])


def begin(stream: Stream, members: Iterable[Member]) -> None:
    """Keep other streams from these instances until `end`, as long as there are others."""
    for member in members:
        member.quarantined_for = stream.id
        member.quarantined_until_s = stream.recovery.apart_until_s
        stream.reserved = (*stream.reserved, member)


def keeps_out(view: ClusterView, member: Member, stream: Stream) -> bool:
    """Whether a stream rather waits than goes there, since a suspected one runs there apart. A
    stream that flowed does not wait: it goes on elsewhere, and there if all else is lost.
    """
    return (
        member.quarantined_for not in (None, stream.id)
        and view.now_s < member.quarantined_until_s
        and not stream.first_token_sent
    )


def end(stream: Stream) -> None:
    for member in stream.reserved:
        if member.quarantined_for == stream.id:
            member.quarantined_for = None
    stream.reserved = ()


def _roles(view: ClusterView) -> tuple[list[Member], list[Member]]:
    return view.prefillers(), view.decoders()


def _can_spare(role: list[Member]) -> bool:
    """Never more than half of a role is in quarantine, but one always can be."""
    return 2 * (sum(member.quarantined_for is not None for member in role) + 1) <= max(2, len(role))


def _next_free(view: ClusterView, stream: Stream, role: list[Member]) -> Member | None:
    allowed = [
        member
        for member in role
        if member.quarantined_for is None and not stream.bars(member) and not view.is_busy(member)
    ]
    if not _can_spare(role):
        return None
    return min(allowed, key=lambda each: (len(each.health.awaited), each.rank), default=None)
