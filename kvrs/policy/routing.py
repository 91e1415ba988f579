"""Where work goes: new streams to the least predicted work, own pair first; recoveries to the least loaded."""

from itertools import islice

from kvrs.ids import InstanceId
from kvrs.policy.cluster_view import ClusterView, Member
from kvrs.policy.streams import Stream

# How many targets are looked at per victim: a decision takes the same time in a large cluster as in a small one.
TARGETS_MAX = 4


def pair_for(view: ClusterView, stream: Stream, *, barred_too: bool) -> tuple[Member, Member] | None:
    """Prefill and decode instance for a stream from its beginning; the same one twice where an instance does both."""
    prefill = least_work(view, stream, barred_too=barred_too)
    if prefill is None:
        return None
    decode = own_decode(view, prefill, stream, barred_too=barred_too) or next(
        iter(targets_for(view, stream, barred_too=barred_too)), None
    )
    return None if decode is None else (prefill, decode)


def least_work(view: ClusterView, stream: Stream, *, barred_too: bool) -> Member | None:
    """The prefill instance with the least predicted work; among equals the one whose own pair decodes least."""

    def burden(member: Member) -> tuple[float, int, InstanceId]:
        decode = own_decode(view, member, stream, barred_too=True)
        return member.queue_s, decode.streams if decode else 0, member.instance.id

    allowed = (member for member in view.prefillers() if barred_too or not stream.bars(member))
    return min(allowed, key=burden, default=None)


def own_decode(view: ClusterView, prefill: Member, stream: Stream, *, barred_too: bool) -> Member | None:
    """The least loaded decode instance on the node of `prefill`."""
    on_node = view.on_node(prefill.instance.node)
    allowed = (member for member in on_node if member.decodes and (barred_too or not stream.bars(member)))
    return min(allowed, key=lambda member: member.rank, default=None)


def targets_for(view: ClusterView, stream: Stream, *, barred_too: bool) -> list[Member]:
    """The few least loaded decode instances."""
    decoders = view.decoders()
    if not stream.barred or barred_too:
        return decoders[:TARGETS_MAX]
    return list(islice((member for member in decoders if not stream.bars(member)), TARGETS_MAX))


def prefill_for(view: ClusterView, target: Member, stream: Stream) -> Member:
    """Who computes a whole history for the target: its own pair, else the prefill instance with the least work.

    When none is left the target does it itself: every engine computes a prompt of which it is given no KV.
    """
    best: Member | None = None
    for member in view.on_node(target.instance.node):
        if member.prefills and not (stream.barred and stream.bars(member)) and (best is None or member.queue_s < best.queue_s):
            best = member
    return best or least_work(view, stream, barred_too=False) or target
