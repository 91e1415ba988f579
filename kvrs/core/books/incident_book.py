"""The book of incidents: which losses speak against a request, and which for an outside cause.

A stream is suspected of the loss of an instance from which it waited for its first token. A token
anywhere acquits it. It is refused after `recovery.poison_deaths` deaths in a row, if no other
stream is as likely to have caused the last one.

An outage ends several instances at once, and looks the same to a stream that happens to be at two
of them. So a death is excused where, within the same storm, another instance was lost in which the
stream had no part, and which nothing explains: no suspect was there, or all have had a token
since. Excused deaths of one trial count as one. An attack by several requests excuses none of them:
each loss has a suspect, and stays open until that one is acquitted or refused.

Losses that nothing explains also raise the number of deaths that a refusal needs, for a while. What
a supervisor says of an exit comes before all of that: one from outside suspects no stream, and one
that the process caused itself is never excused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import msgspec

from kvrs.config.policy import RecoverySettings
from kvrs.core.books.waiting import is_past
from kvrs.ids import InstanceId, NodeId, StreamId

# Losses within this time of each other are one storm.
STORM_S = 2.0
# From its second death on a stream waits so long for news of what else has died,
NEWS_S = 0.5
# and one that would be refused, until the suspects of other losses of the storm are decided.
OTHERS_DECIDED_S = 5.0
# A death becomes known within this time of the first connection that broke. A stream that is hit
# again waits so long for it; a report of the instance ends the wait.
_DEATH_KNOWN_S = 2.0
# A report shows that an instance lives if it comes so long after the connection broke; an earlier
# one may have been on its way.
_ALIVE_AFTER_S = 0.3
# An instance and the agent of its node that are lost within this time are lost with the node.
_LOST_WITH_ITS_NODE_S = 2.0
# A loss that nothing explains raises the deaths that a refusal needs for so long, up to so many.
UNEXPLAINED_S = 60.0
MAX_DEATHS = 5
# So long losses and exits are kept.
KEPT_S = 120.0
# A stream that was suspected once waits so long to run apart: most instances die of other causes,
# and of many with one such death in common the last ones would wait for all others.
FIRST_WAIT_S = 5.0


class LostInstance(msgspec.Struct, frozen=True, gc=False):
    """One epoch of an instance. Instances of the same server have one `server`: its loss is one."""

    instance: InstanceId
    epoch: int
    server: InstanceId
    node: NodeId


class Ruling(Enum):
    FREE = "free"  # It is not suspected.
    APART = "apart"  # It may run where no other stream can be suspected.
    WAIT = "wait"  # Until news, or until the storm is over.
    REFUSE = "refuse"


class Verdict(msgspec.Struct, frozen=True, gc=False):
    ruling: Ruling
    until_s: float = inf  # The wait ends, or it may run beside others again.


_FREE, _REFUSE = Verdict(Ruling.FREE), Verdict(Ruling.REFUSE)


@dataclass(slots=True, eq=False)
class _Loss:
    process: LostInstance
    lost_s: float
    may_live: bool  # It has only fallen silent.
    is_internal: bool  # Its process ended itself, as its supervisor says.
    # Streams that waited there for their first token, and others that ran there; those that have
    # had a token since are left out.
    suspects: set[StreamId] = field(default_factory=set)
    others: set[StreamId] = field(default_factory=set)
    is_explained: bool = False  # By a request that was refused.
    is_undecided: bool = False  # A suspect has left without a token.


@dataclass(slots=True, eq=False)
class _Death:
    """A loss that a stream is suspected of."""

    loss: _Loss
    broke_s: float  # When the stream's attempt broke there; the loss may have been known later.
    is_alone: bool  # No other stream is as likely to have caused it.
    trial: int
    is_excused: bool = False


@dataclass(slots=True, eq=False)
class _Case:
    """One stream, from its first suspicion until its next token."""

    deaths: list[_Death] = field(default_factory=list)
    # Instances where an attempt broke that had brought nothing, and when: they may have died of it.
    broken: dict[tuple[InstanceId, int], float] = field(default_factory=dict)
    # The same of instances that have reported since; the report may have been under way for long.
    doubted: dict[tuple[InstanceId, int], float] = field(default_factory=dict)
    isolated_until_s: float = -inf
    hit_s: float = -inf  # The last time that an instance died or a connection broke.
    trial: int = 0
    is_in_storm: bool = False  # It waits for its end.

    @property
    def is_open(self) -> bool:
        return bool(self.deaths or self.broken)

    def doubt_reports(self, now_s: float) -> None:
        """It is hit again. That an instance has reported since says less now than before."""
        recent = {key: at_s for key, at_s in self.doubted.items() if now_s - at_s < _DEATH_KNOWN_S}
        self.broken.update(recent)
        self.doubted.clear()

    def news_until_s(self, longest_wait_s: float) -> float:
        """Until then it waits for news of what else has died, and of what broke."""
        if len(self.deaths) + len(self.broken) < 2:
            return -inf
        return self.hit_s + min(_DEATH_KNOWN_S if self.broken else NEWS_S, longest_wait_s)


class _Evidence:
    """The relations between the losses that are kept."""

    def __init__(self, losses: list[_Loss], cases: Mapping[StreamId, _Case]) -> None:
        self._losses = losses
        self._cases = cases

    def deaths(self, stream: StreamId) -> int:
        case = self._cases.get(stream)
        return 0 if case is None else len(case.deaths)

    def unexplained(self, stream: StreamId, case: _Case, now_s: float) -> int:
        """Losses of late that nothing explains."""
        return sum(
            now_s - loss.lost_s < UNEXPLAINED_S
            and not loss.is_undecided
            and self.is_without_cause(loss)
            and not _has_part(stream, case, loss)
            for loss in self._losses
        )

    def is_excused(self, stream: StreamId, case: _Case, death: _Death) -> bool:
        return any(
            self.is_without_cause(loss) for loss in self.beside(stream, case, death.loss.lost_s)
        )

    def beside(self, stream: StreamId, case: _Case, at_s: float) -> Iterable[_Loss]:
        """The losses of the same storm in which it had no part."""
        return (
            loss
            for loss in self._losses
            if abs(loss.lost_s - at_s) <= STORM_S and not _has_part(stream, case, loss)
        )

    def is_without_cause(self, loss: _Loss) -> bool:
        return not (loss.is_internal or loss.is_explained or self.is_open(loss))

    def is_open(self, loss: _Loss) -> bool:
        """A stream that was there is still suspected. One that flowed there is, where it has met a
        death since.
        """
        return bool(loss.suspects) or any(self.deaths(stream) for stream in loss.others)


class IncidentBook:
    def __init__(self, settings: RecoverySettings) -> None:
        self.losses: list[_Loss] = []  # In their order.
        self.cases: dict[StreamId, _Case] = {}
        self._evidence = _Evidence(self.losses, self.cases)
        self._exits: dict[tuple[InstanceId, int], tuple[bool, float]] = {}
        self._nodes_lost_s: dict[NodeId, float] = {}
        self.reload(settings)

    def reload(self, settings: RecoverySettings) -> None:
        self._poison_deaths = settings.poison_deaths
        self._longest_wait_s = settings.wait_s / 2

    # News of instances.

    def lost(
        self,
        process: LostInstance,
        suspects: Mapping[StreamId, bool],
        others: Iterable[StreamId],
        now_s: float,
        *,
        may_live: bool = False,
    ) -> None:
        """An instance is lost. Each suspect maps to whether it has flowed: had a token anywhere."""
        self._forget_old(now_s)
        is_external, _ = self._exits.get((process.instance, process.epoch), (None, 0.0))
        loss = self._loss_of(process, now_s, may_live=may_live)
        loss.is_internal |= is_external is False
        loss.others.update(others)
        node_lost_s = self._nodes_lost_s.get(process.node, -inf)
        if is_external or now_s - node_lost_s < _LOST_WITH_ITS_NODE_S:
            self._free_broken(process.instance, process.epoch)
            return
        alone = self._most_likely(suspects) if suspects else None
        for stream in suspects:
            self._charge(stream, loss, now_s, is_alone=stream == alone)

    def _loss_of(self, process: LostInstance, now_s: float, *, may_live: bool) -> _Loss:
        for known in self.losses:
            is_other_part = (
                known.process.server == process.server
                and known.process.instance != process.instance
                and now_s - known.lost_s < STORM_S
            )
            if is_other_part:
                return known
        loss = _Loss(process, now_s, may_live, is_internal=False)
        self.losses.append(loss)
        return loss

    def _most_likely(self, suspects: Mapping[StreamId, bool]) -> StreamId | None:
        """The one that has met a death before, if only one has; else the one that never had a
        token, if only one has not.
        """
        ranked = [stream for stream in suspects if self._evidence.deaths(stream)] or list(suspects)
        if len(ranked) > 1:
            ranked = [stream for stream in ranked if not suspects[stream]]
        return ranked[0] if len(ranked) == 1 else None

    def _charge(self, stream: StreamId, loss: _Loss, now_s: float, *, is_alone: bool) -> None:
        case = self.cases.setdefault(stream, _Case())
        key = loss.process.instance, loss.process.epoch
        broke_s = case.broken.pop(key, case.doubted.pop(key, now_s))
        case.doubt_reports(now_s)
        if stream in loss.suspects:  # By another part of the same server.
            return
        loss.suspects.add(stream)
        is_first = not case.deaths
        case.deaths.append(_Death(loss, broke_s, is_alone, case.trial))
        case.hit_s = now_s
        wait_s = min(FIRST_WAIT_S, self._longest_wait_s) if is_first else self._longest_wait_s
        case.isolated_until_s = now_s + wait_s

    def exited(
        self, instance: InstanceId, epoch: int, now_s: float, *, is_external: bool
    ) -> list[StreamId]:
        """How the process ended; returns the streams whose cases that changes."""
        self._forget_old(now_s)
        self._exits[instance, epoch] = is_external, now_s
        found = [each for each in self.losses if _is_of(each, instance, epoch)]
        if not is_external:
            for loss in found:
                loss.is_internal = True
            return []
        return [*self._clear(found), *self._free_broken(instance, epoch)]

    def _free_broken(self, instance: InstanceId, epoch: int) -> list[StreamId]:
        """No stream whose attempt broke there caused that."""
        freed, key = [], (instance, epoch)
        for stream, case in self.cases.items():
            case.doubted.pop(key, None)
            if case.broken.pop(key, None) is not None:
                freed.append(stream)
        return freed

    def node_lost(self, node: NodeId, now_s: float) -> list[StreamId]:
        """Its instances died with the node, and not of a stream; returns those that were
        suspected.
        """
        self._nodes_lost_s[node] = now_s
        return self._clear(
            loss
            for loss in self.losses
            if loss.process.node == node and now_s - loss.lost_s < _LOST_WITH_ITS_NODE_S
        )

    def up(self, instance: InstanceId, *, had_not_ended: bool) -> None:
        """An instance is up. One that had fallen silent did not end, or another process runs in its
        place.
        """
        silent = [
            loss for loss in self.losses if loss.may_live and loss.process.instance == instance
        ]
        for loss in silent:
            loss.may_live = False
        if had_not_ended:
            self._clear(silent)
            self.losses[:] = [loss for loss in self.losses if loss not in silent]

    def alive(self, instance: InstanceId, epoch: int, now_s: float) -> list[StreamId]:
        """It reports; returns the streams whose connection broke there and that are suspected of
        nothing else. If the report was under way for long, the death still finds them.
        """
        freed, key = [], (instance, epoch)
        for stream, case in self.cases.items():
            broke_s = case.broken.get(key, inf)
            if now_s - broke_s >= _ALIVE_AFTER_S:
                case.doubted[key] = case.broken.pop(key)
                freed.append(stream)
        return freed

    def _clear(self, losses: Iterable[_Loss]) -> list[StreamId]:
        """No stream caused these."""
        cleared = []
        for loss in losses:
            cleared += sorted(loss.suspects)
            for stream in loss.suspects:
                case = self.cases[stream]
                case.deaths = [death for death in case.deaths if death.loss is not loss]
            loss.suspects.clear()
        return cleared

    # News of streams.

    def broke(self, stream: StreamId, instance: InstanceId, epoch: int, now_s: float) -> None:
        """An attempt that had brought nothing broke there, without an error."""
        case = self.cases.setdefault(stream, _Case())
        case.doubt_reports(now_s)
        case.broken[instance, epoch] = now_s
        wait_s = min(FIRST_WAIT_S, self._longest_wait_s)
        case.isolated_until_s = max(case.isolated_until_s, now_s + wait_s)
        case.hit_s = now_s

    def broke_at(self, stream: StreamId, instance: InstanceId, epoch: int, now_s: float) -> bool:
        """True if its attempt broke there, so shortly before that the instance died of it."""
        case = self.cases.get(stream)
        if case is None:
            return False
        key = instance, epoch
        broke_s = case.broken.get(key, case.doubted.get(key, -inf))
        return now_s - broke_s < _DEATH_KNOWN_S

    def progressed(self, stream: StreamId) -> None:
        """It has a token: no instance died of it."""
        if self.losses or self.cases:
            self.cases.pop(stream, None)
            for loss in self.losses:
                loss.suspects.discard(stream)
                loss.others.discard(stream)

    def left(self, stream: StreamId, *, is_refused: bool) -> None:
        """It has ended, without a token since the deaths that it is suspected of."""
        if not self.losses and not self.cases:
            return
        self.cases.pop(stream, None)
        for loss in self.losses:
            if stream in loss.suspects or stream in loss.others:
                loss.is_explained |= is_refused
                loss.is_undecided |= stream in loss.suspects
            loss.suspects.discard(stream)
            loss.others.discard(stream)

    # Questions.

    def is_suspect(self, stream: StreamId) -> bool:
        case = self.cases.get(stream)
        return case is not None and case.is_open

    def in_doubt(self, stream: StreamId) -> set[InstanceId]:
        """Instances where an attempt of another stream broke: they may have died of that."""
        return {
            instance
            for other, case in self.cases.items()
            if other != stream
            for instance, _ in case.broken
        }

    def judge(self, stream: StreamId, now_s: float) -> Verdict:
        """The ruling on a stream that has no attempt."""
        case = self.cases.get(stream)
        if case is None or not case.is_open:
            return _FREE
        if not is_past(until_s := case.news_until_s(self._longest_wait_s), now_s):
            return Verdict(Ruling.WAIT, until_s)
        for death in case.deaths:
            death.is_excused = not death.loss.is_internal and (
                death.is_excused or self._evidence.is_excused(stream, case, death)
            )
        if self._is_poison(stream, case, now_s):
            until_s = self._undecided_until_s(stream, case)
            return _REFUSE if is_past(until_s, now_s) else Verdict(Ruling.WAIT, until_s)
        if not is_past(until_s := self._storm_until_s(case), now_s):
            case.is_in_storm = True
            return Verdict(Ruling.WAIT, until_s)
        if case.is_in_storm:  # It is over: the deaths before count as one.
            case.is_in_storm, case.trial = False, case.trial + 1
            case.isolated_until_s = now_s + self._longest_wait_s
        return Verdict(Ruling.APART, case.isolated_until_s)

    def postpone(self, now_s: float) -> None:
        """The wait to run apart begins now: there was nowhere to run."""
        until_s = now_s + min(FIRST_WAIT_S, self._longest_wait_s)
        for case in self.cases.values():
            case.isolated_until_s = max(case.isolated_until_s, until_s)

    def _is_poison(self, stream: StreamId, case: _Case, now_s: float) -> bool:
        if not case.deaths:
            return False
        last = max(case.deaths, key=lambda death: (death.broke_s, death.loss.lost_s))
        excused = {death.trial for death in case.deaths if death.is_excused}
        counted = sum(not death.is_excused for death in case.deaths) + len(excused)
        internal = sum(death.loss.is_internal for death in case.deaths)
        most = max(self._poison_deaths, MAX_DEATHS)
        needed = min(most, self._poison_deaths + self._evidence.unexplained(stream, case, now_s))
        return last.is_alone and (counted >= needed or internal >= self._poison_deaths)

    def _undecided_until_s(self, stream: StreamId, case: _Case) -> float:
        """Until then a stream that would be refused waits for news that may speak for it."""
        until_s = -inf
        last_s = max(death.loss.lost_s for death in case.deaths)
        if any(death.loss.may_live for death in case.deaths):
            until_s = last_s + self._longest_wait_s
        can_change = any(
            not loss.is_internal and not loss.is_explained and self._evidence.is_open(loss)
            for death in case.deaths
            for loss in self._evidence.beside(stream, case, death.loss.lost_s)
        )
        if can_change:
            until_s = max(until_s, last_s + min(OTHERS_DECIDED_S, self._longest_wait_s))
        return until_s

    def _storm_until_s(self, case: _Case) -> float:
        """The end of the storm that excuses it, if it is hit a second time in it."""
        hit = [death for death in case.deaths if death.trial == case.trial and death.is_excused]
        if len(case.deaths) < 2 or not hit:
            return -inf
        own_s = hit[-1].loss.lost_s
        return min(self.losses[-1].lost_s + STORM_S, own_s + self._longest_wait_s)

    def _forget_old(self, now_s: float) -> None:
        if self.losses:
            self.losses[:] = [loss for loss in self.losses if now_s - loss.lost_s < KEPT_S]
        if exits := self._exits:
            self._exits = {key: each for key, each in exits.items() if now_s - each[1] < KEPT_S}


def _is_of(loss: _Loss, instance: InstanceId, epoch: int) -> bool:
    return (loss.process.instance, loss.process.epoch) == (instance, epoch)


def _has_part(stream: StreamId, case: _Case, loss: _Loss) -> bool:
    return stream in loss.others or any(death.loss is loss for death in case.deaths)
