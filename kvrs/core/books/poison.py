"""Poisoned requests: a request that ends what it runs on is refused after
`recovery.poison_deaths` deaths.

A death counts against every stream that waited there for its first token, until the stream has a
token. It does not count where a cause from outside is known: the instance was about to end, drained
or on a failing GPU; its node was lost, or its process was ended from outside, as its supervisor
says; or it was only cut off or frozen.

Nothing tells a poisoned request from one that waited beside it at each death. So two streams whose
deaths together are as many as refuse one do not wait at the same instance, as long as a stream can
wait for another one.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter

from kvrs.core.books.waiting import is_past
from kvrs.core.model.member import Member
from kvrs.core.model.recovery_state import LOST_TOGETHER_S, Death
from kvrs.core.model.streams import Stream
from kvrs.ids import InstanceId, NodeId, StreamId

# A death becomes known within this time of a connection that broke.
_KNOWN_S = 2.0
# So long exits are kept.
_KEPT_S = 120.0


class PoisonCounter:
    """Writes the deaths in the recovery of each stream, and which instances it avoids for them."""

    def __init__(self, streams: Mapping[StreamId, Stream]) -> None:
        self._streams = streams
        # All streams that may have met a death, and some that have had a token since.
        self.counted: dict[StreamId, Stream] = {}
        # By process and by node: when it became known that it was ended from outside, or lost.
        self._ended_s: dict[tuple[InstanceId, int], float] = {}
        self._nodes_lost_s: dict[NodeId, float] = {}

    def lost(self, member: Member, now_s: float) -> list[Stream]:
        """An instance is lost; returns the streams that its death counts against."""
        death = _death_of(member, now_s)
        is_external = self._has_cause(member, now_s)
        counted: list[Stream] = []
        concerned = {*member.answers.awaited, *member.answers.whole, *self.counted}
        streams = [self._streams[each] for each in concerned]
        for stream in sorted(streams, key=attrgetter("order")):
            recovery = stream.recovery
            broken = [each for each in recovery.broken if each.is_same(death)]
            if broken:
                recovery.forget_deaths(broken.__contains__)
            was_there = member.answers.owes(stream.id) or any(
                now_s - each.lost_s < _KNOWN_S for each in broken
            )
            if was_there and not is_external:
                counted.append(stream)
        for stream in counted:
            stream.recovery.note_death(death)
        known = (*self.counted.values(), *counted)
        self.counted = {stream.id: stream for stream in known if stream.recovery.is_counted}
        return counted

    def _has_cause(self, member: Member, now_s: float) -> bool:
        node_lost_s = self._nodes_lost_s.get(member.node)
        return (
            member.must_drain
            or (member.id, member.epoch) in self._ended_s
            or (node_lost_s is not None and now_s - node_lost_s < LOST_TOGETHER_S)
        )

    def broke(self, stream: Stream, member: Member, now_s: float) -> None:
        """An attempt that had brought nothing broke there: the instance may have died of it."""
        stream.recovery.note_broken(_death_of(member, now_s))
        self.counted[stream.id] = stream

    def exited(self, instance: InstanceId, epoch: int, now_s: float) -> None:
        """A process was ended from outside, as its supervisor says."""
        known = self._ended_s.items()
        self._ended_s = {key: at_s for key, at_s in known if now_s - at_s < _KEPT_S}
        self._ended_s[instance, epoch] = now_s
        self._excuse(lambda death: (death.instance, death.epoch) == (instance, epoch))

    def node_lost(self, node: NodeId, now_s: float) -> None:
        """No request ends an agent: what dies with it on its node dies with the node."""
        self._nodes_lost_s[node] = now_s
        self._excuse(lambda each: each.node == node and now_s - each.lost_s < LOST_TOGETHER_S)

    def had_not_ended(self, instance: InstanceId) -> None:
        """The process is up again that was taken for lost."""
        self._excuse(lambda death: death.instance == instance)

    def _excuse(self, is_external: Callable[[Death], bool]) -> None:
        for stream in self.counted.values():
            stream.recovery.forget_deaths(is_external)

    def separate(self, stream: Stream, allowed: int, until_s: float, now_s: float) -> None:
        """Have a stream avoid the instances where others wait that have, together with it, as many
        deaths as refuse one. From `until_s` on it waits beside them: else it would be given up.
        """
        deaths = _possible_deaths(stream, now_s)
        others = self.counted.values() if deaths and not is_past(until_s, now_s) else ()
        stream.recovery.avoid(
            name
            for other in others
            if other is not stream and 0 < _possible_deaths(other, now_s) >= allowed - deaths
            for name in _places(other, now_s)
        )


def _places(stream: Stream, now_s: float) -> list[InstanceId]:
    """Where a stream waits for its first token, or has waited: those may have died."""
    attempt = stream.attempt
    members = [each for each in (attempt.runs_on, attempt.decodes_on) if each is not None]
    return [each.id for each in members] + [each.instance for each in _unknown(stream, now_s)]


def _possible_deaths(stream: Stream, now_s: float) -> int:
    return len(stream.recovery.deaths) + len(_unknown(stream, now_s))


def _unknown(stream: Stream, now_s: float) -> list[Death]:
    """Deaths that a connection which broke may be the sign of."""
    return [each for each in stream.recovery.broken if now_s - each.lost_s < _KNOWN_S]


def is_poison(stream: Stream, allowed: int) -> bool:
    return len(stream.recovery.deaths) >= allowed


def news_until_s(stream: Stream, allowed: int, now_s: float) -> float | None:
    """Until when a stream waits for news of instances to which its connections broke: their deaths
    would refuse it. None: it does not wait.
    """
    unknown = _unknown(stream, now_s)
    if not unknown or _possible_deaths(stream, now_s) < allowed:
        return None
    return max(each.lost_s for each in unknown) + _KNOWN_S


def _death_of(member: Member, now_s: float) -> Death:
    server = member.own_prefill or member.id
    return Death(member.id, member.epoch, server, member.node, now_s)
