"""Refusal of poisoned requests: a request that kills its instances is refused after
`recovery.poison_deaths` deaths.

An instance's death counts against every stream that waited there for its first token, until the
stream has a token. A death with a known external cause does not count: the instance was about to
end, drained or on a failing GPU; its node was lost; its supervisor reports that its process was
ended from outside; or it was only cut off or frozen. Nor does it count in an outage: no instance of
the role is left, and one of them died lately although no stream waited there, which no request can
have caused.

A poisoned request looks like a request that waited beside it at each death. So two streams whose
deaths add up to the limit do not wait at the same instance, as long as a stream can wait for
another instance.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from kvrs.core.books.waiting import is_past
from kvrs.core.model.member import Member
from kvrs.core.model.streams import LOST_TOGETHER_S, Death, Stream
from kvrs.ids import InstanceId, NodeId, StreamId

# Time within which a death becomes known after a broken connection.
_KNOWN_S = 2.0
# Time for which reported exits of processes and losses of nodes are remembered.
_KEPT_S = 120.0
# Time around the death of an instance at which no stream waited, in which the deaths of all
# instances of its role are one outage.
OUTAGE_S = 10.0


class PoisonCounter:
    """Counts deaths in each stream's recovery, and sets the instances that the stream avoids."""

    def __init__(self, streams: Mapping[StreamId, Stream]) -> None:
        self._streams = streams
        # All streams that may have met a death, and some that have had a token since.
        self.counted: dict[StreamId, Stream] = {}
        # Times when the external end of a process, or the loss of a node, became known.
        self._ended_s: dict[tuple[InstanceId, int], float] = {}
        self._nodes_lost_s: dict[NodeId, float] = {}
        # Roles (prefill, decode) of each instance that was lost.
        self._roles: dict[InstanceId, tuple[bool, bool]] = {}
        # Recent deaths of instances at which no stream waited: time, roles, streams that ran there.
        self._unblamed: list[tuple[float, tuple[bool, bool], frozenset[StreamId]]] = []

    def lost(self, member: Member, now_s: float, *, is_last: bool = False) -> list[Stream]:
        """Count the loss of an instance; return the streams that it counts against. `is_last`: no
        instance of its role is up any more.
        """
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
        roles = self._roles[member.id] = member.abilities.prefills, member.abilities.decodes
        self._unblamed = [each for each in self._unblamed if now_s - each[0] < OUTAGE_S]
        if not counted and not is_external and not member.others_reported:
            self._unblamed.append((now_s, roles, frozenset(member.running)))
        known = (*self.counted.values(), *counted)
        if is_last:
            self._excuse_outage(known, roles, now_s)
        self.counted = {stream.id: stream for stream in known if stream.recovery.is_counted}
        return [stream for stream in counted if stream.recovery.deaths]

    def _excuse_outage(
        self, streams: Iterable[Stream], roles: tuple[bool, bool], now_s: float
    ) -> None:
        """Uncount the recent deaths of all instances with these roles, for each stream that was not
        at one of them that died without a waiting stream.
        """
        others = [running for _, of, running in self._unblamed if of == roles]
        for stream in streams:
            if any(stream.id not in running for running in others):
                stream.recovery.forget_deaths(
                    lambda death: (
                        self._roles.get(death.instance) == roles and now_s - death.lost_s < OUTAGE_S
                    )
                )

    def _has_cause(self, member: Member, now_s: float) -> bool:
        node_lost_s = self._nodes_lost_s.get(member.node)
        return (
            member.must_drain
            or (member.id, member.epoch) in self._ended_s
            or (node_lost_s is not None and now_s - node_lost_s < LOST_TOGETHER_S)
        )

    def broke(self, stream: Stream, member: Member, now_s: float) -> None:
        """Note a connection that broke before any data: the instance may have died."""
        stream.recovery.note_broken(_death_of(member, now_s))
        self.counted[stream.id] = stream

    def exited(self, instance: InstanceId, epoch: int, now_s: float) -> None:
        """Note a process that was ended from outside, by its supervisor's report."""
        known = self._ended_s.items()
        self._ended_s = {key: at_s for key, at_s in known if now_s - at_s < _KEPT_S}
        self._ended_s[instance, epoch] = now_s
        self._excuse(lambda death: (death.instance, death.epoch) == (instance, epoch))

    def node_lost(self, node: NodeId, now_s: float) -> None:
        """Note the loss of an agent. No request ends an agent, so instances that die with it die
        with the node.
        """
        self._nodes_lost_s[node] = now_s
        self._excuse(lambda each: each.node == node and now_s - each.lost_s < LOST_TOGETHER_S)

    def had_not_ended(self, instance: InstanceId) -> None:
        """Uncount the loss of an instance whose process had not ended."""
        self._excuse(lambda death: death.instance == instance)

    def _excuse(self, is_external: Callable[[Death], bool]) -> None:
        for stream in self.counted.values():
            stream.recovery.forget_deaths(is_external)

    def separate(self, stream: Stream, allowed: int, until_s: float, now_s: float) -> None:
        """Let a stream avoid the instances of other waiting streams whose deaths and its own add up
        to the limit `allowed`. From `until_s` on the stream may use these instances, rather than be
        given up.
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
    """Return the instances at which a stream waits for its first token, and those of its broken
    connections, which may have died.
    """
    attempt = stream.attempt
    members = [each for each in (attempt.runs_on, attempt.decodes_on) if each is not None]
    return [each.id for each in members] + [each.instance for each in _unknown(stream, now_s)]


def _possible_deaths(stream: Stream, now_s: float) -> int:
    return len(stream.recovery.deaths) + len(_unknown(stream, now_s))


def _unknown(stream: Stream, now_s: float) -> list[Death]:
    """Return the deaths that the stream's recent broken connections may turn out to be."""
    return [each for each in stream.recovery.broken if now_s - each.lost_s < _KNOWN_S]


def is_poison(stream: Stream, allowed: int) -> bool:
    return len(stream.recovery.deaths) >= allowed


def news_until_s(stream: Stream, allowed: int, now_s: float) -> float | None:
    """Return the time until which a stream waits for news of the instances of its broken
    connections, if their deaths would refuse it; None: no wait.
    """
    unknown = _unknown(stream, now_s)
    if not unknown or _possible_deaths(stream, now_s) < allowed:
        return None
    return max(each.lost_s for each in unknown) + _KNOWN_S


def _death_of(member: Member, now_s: float) -> Death:
    server = member.info.own_prefill or member.id
    return Death(member.id, member.epoch, server, member.node, now_s)
