"""Quarantine: a request that may kill what it runs on runs where no other stream can be suspected,
and costs no other stream more than a recovery.

A stream is suspected when an instance died from which it waited for its first token: streams that
had one there have shown that the instance can serve them, and one that was prefilled before, that
no prefill instance dies of it. A suspected stream runs apart: where no other stream waits for its
first token, and nothing else is sent meanwhile. So the next death has one suspect only. What its
deaths mean, and when it is refused, says the book of incidents (`incident_book.py`).

While a suspected stream runs apart on the last instance of a role, streams without a token wait:
one that came along would be a second suspect, and the killer would have another instance.
"""

from collections.abc import Iterable

from kvrs.core.books.incident_book import IncidentBook
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.protocol.instance import Role

# How often a stream that waits to run apart looks for an instance.
LOOK_S = 0.05


def suspects_at(
    book: IncidentBook, streams: Iterable[Stream], member: Member, now_s: float
) -> list[Stream]:
    """The streams that waited for their first token from an instance which is lost. One that is a
    guest where a suspected stream ran apart is none, nor one whose prompt another instance has
    prefilled before.
    """
    answers = member.answers
    return [
        stream
        for stream in streams
        if (
            (answers.owes(stream.id) and not stream.attempt.is_guest)
            or book.broke_at(stream.id, member.id, member.epoch, now_s)
        )
        and not (member.role is Role.PREFILL and _was_prefilled(stream))
    ]


def _was_prefilled(stream: Stream) -> bool:
    """An instance has computed, and survived, all that another one prefills again."""
    return stream.prefilled and stream.produced_tokens == 0


def occupied(view: ClusterView, book: IncidentBook, stream: Stream) -> frozenset[str]:
    """The instances where this stream would not be apart, or that others cannot spare."""
    names: set[str] = set(book.in_doubt(stream.id))
    names |= {
        member.id
        for member in view.members.values()
        if member.quarantined_for not in (None, stream.id)
        or any(other != stream.id for other in (*member.answers.awaited, *member.answers.whole))
    }
    for role in _roles(view):
        if not _can_spare(role):
            names.update(member.id for member in role)
    return frozenset(names)


def reserve(view: ClusterView, stream: Stream, until_s: float) -> None:
    """Keep new work from the instances that are the next to be free for it."""
    prefillers, decoders = _roles(view)
    roles = [prefillers, decoders] if stream.is_fresh else [decoders]
    kept = [_next_free(view, stream, role) for role in roles]
    begin(view, stream, [member for member in kept if member is not None], until_s)


def begin(view: ClusterView, stream: Stream, members: Iterable[Member], until_s: float) -> None:
    """Keep other streams from these instances until `end`, as long as there are others; where they
    are the only ones, until then.
    """
    for member in members:
        member.quarantined_for = stream.id
        member.quarantined_until_s = until_s
        view.prefill_order.restrict(member)
        stream.reserved = (*stream.reserved, member)


def keeps_out(view: ClusterView, member: Member, stream: Stream) -> bool:
    """A stream waits rather than going there, since a suspected one runs there apart. A stream that
    flowed does not wait: it goes on elsewhere, and there if all else is lost.
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
    return view.prefillers, view.decoders


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
    return min(allowed, key=lambda each: (len(each.answers.awaited), each.rank), default=None)
