"""Limits on a source's silence, and excuses for silence.

A source is an instance that reports its load, an agent, or an attempt that produces tokens.

Giving up a silent source only helps streams that can go on elsewhere. If no other instance could
take them, the longest limit applies: a paused process continues its streams when it is back.

Lateness of this process's own event loop, during which silence is no evidence against another
process.

| state   | the loop                                  | what counts as another's silence           |
| ------- | ----------------------------------------- | ------------------------------------------ |
| calm    | runs on time                              | all time but the delays of the loop itself |
| starved | was late for more than a quarter of the   | nothing; but of one spell of starvation at |
|         | last second or so, or by `STARVED_S` once | most `EXCUSED_S` of time in which it ran   |

A starved process shares its CPU with whatever starves it, and often with the processes that it
watches, so it blames no instance and no peer for silence. Sockets that the kernel closes or refuses
are evidence as ever. The bound keeps a hung instance from being waited for as long as a machine is
overloaded.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvrs.core.fleet.known import Instances
from kvrs.core.model.member import Member
from kvrs.core.model.streams import LiveStream
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId

# A loop is starved while this many seconds of delay are in the bucket.
STARVED_S = 0.25
# Delay that leaves the bucket in each second in which the loop runs.
_LEAK = 0.25
_FULL_S = 0.75  # Most delay in the bucket, so a spell ends 2 s after its last delay at the latest.
EXCUSED_S = 10.0
# A delay from which on the process counts as paused, not only busy.
_PAUSE_S = 1.0
# Time before a pause in which data may have arrived that is read after it.
_BEFORE_PAUSE_S = 0.05


@dataclass(slots=True, eq=False)
class Lateness:
    """Sums the delays of an event loop, which calls `looked` at each of its timers."""

    looked_s: float  # Time of the last look.
    late_s: float = 0.0  # Sum of all delays.
    # Sum of the time that is no process's silence: delays, and starved time within its bound.
    excused_s: float = 0.0
    spells: int = 0  # Number of spells of starvation.
    spell_late_s: float = 0.0  # Sum of the delays of the last spell.
    starved_s: float | None = None  # Time of the last delay of a spell; None: no spell yet.
    # Start and end of the last pause; None: no pause yet.
    pause: tuple[float, float] | None = None
    _bucket_s: float = field(default=0.0, init=False)
    _may_excuse_s: float = field(default=0.0, init=False)

    def looked(self, due_s: float, now_s: float) -> None:
        """Note a timer that was due at `due_s`. Timers may overlap: no delay counts twice."""
        passed_s = max(0.0, now_s - self.looked_s)
        late_s = min(passed_s, max(0.0, now_s - due_s))
        ran_s, was_starved = passed_s - late_s, self.is_starved
        self.looked_s = max(self.looked_s, now_s)
        self._bucket_s = max(0.0, self._bucket_s - _LEAK * ran_s)
        if was_starved:
            excused_s = min(ran_s, self._may_excuse_s)
            self._may_excuse_s -= excused_s
            self.excused_s += excused_s
        if late_s <= 0.0:
            return
        self.late_s += late_s
        self.excused_s += late_s
        self._bucket_s = min(_FULL_S, self._bucket_s + late_s)
        if late_s > _PAUSE_S:
            self.pause = due_s - _BEFORE_PAUSE_S, now_s
        if self.is_starved:
            if not was_starved:
                self.spells, self.spell_late_s, self._may_excuse_s = self.spells + 1, 0.0, EXCUSED_S
            self.spell_late_s, self.starved_s = self.spell_late_s + late_s, now_s

    @property
    def is_starved(self) -> bool:
        return self._bucket_s >= STARVED_S

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return the starvation as plain data. `late_s` is of the last spell."""
        ago_s = None if self.starved_s is None else now_s - self.starved_s
        found = {"now": self.is_starved, "spells": self.spells, "late_s": self.spell_late_s}
        return {**found, "ago_s": ago_s}

    def awake_since_s(self, due_s: float | None, now_s: float) -> float:
        """Return the time since which the process runs: now, or the start of a pause that has just
        ended. `due_s`: time of the next timer, which has not looked yet (None: no timer).
        """
        if due_s is not None and now_s - due_s > _PAUSE_S:
            return due_s - _BEFORE_PAUSE_S
        if self.pause is not None and now_s - self.pause[1] < _PAUSE_S:
            return self.pause[0]
        return now_s


# Shortest silence that counts, even for a fast source: machines pause.
SHORTEST_SILENCE_S = 2.0
# Shortest silence after which others' suspicion ends a watch of a process: on a busy machine a
# healthy process, or this one, may wait for a CPU for many time slices.
SHORTEST_SUSPICION_S = 0.5
# A source is silent after this many of its usual intervals, so a source ten times as slow as before
# is not silent.
USUAL_INTERVALS = 20
# Multiple of the predicted prefill that a prompt may take, and the factor on the whole wait if the
# prediction is a guess or an estimate.
_PREFILLS = 2.0
_GUESS = 4.0
# A killed process resets all its sockets at once, but they are read one by one: wait this long for
# news of the whole instance's end, so that all its victims are decided together. The end of an
# instance that is being given up for silence may take a turn of a busy event loop.
LOST_TOGETHER_S = 0.002
GIVEN_UP_TOGETHER_S = 0.25


def silent_after_s(usual_s: float, longest_s: float) -> float:
    """Return how long a source with this usual interval may be silent, at most `longest_s`."""
    return min(longest_s, max(SHORTEST_SILENCE_S, USUAL_INTERVALS * usual_s))


@dataclass(slots=True, eq=False)
class SilenceTimer:
    """Notices silence with one timer that is re-armed when it fires, not per token."""

    heard_s: float

    def excused(self, excused_s: float, now_s: float) -> None:
        """Leave time out of the silence that this process's own lateness excuses."""
        self.heard_s = min(now_s, self.heard_s + excused_s)

    def may_be_suspected(self, now_s: float) -> bool:
        """Return whether the silence has lasted longer than a healthy process may wait
        for a CPU.
        """
        return now_s - self.heard_s >= SHORTEST_SUSPICION_S

    def look(self, now_s: float, limit_s: float, is_excused: Callable[[], bool]) -> float | None:
        """Return when to look again; None: the source was silent for `limit_s` without an excuse.

        Looks are at most SHORTEST_SILENCE_S apart, because the limit may become shorter.
        """
        if now_s >= self.heard_s + limit_s:
            if not is_excused():
                return None
            self.heard_s = now_s
        return min(self.heard_s + limit_s, now_s + SHORTEST_SILENCE_S)


@dataclass(slots=True)
class Delivered:
    """Signs of an instance's progress: tokens delivered here, and reports with changed progress."""

    last_s: float = -inf
    tokens: int = 0  # Tokens that the instance has sent to this process's streams.
    report: tuple[float, int] | None = None  # Progress in the last report; None: no report.
    # Time when a stream was last given up for silence between two tokens.
    stood_still_s: float = -inf

    def reported(self, progress: tuple[float, int] | None, now_s: float) -> None:
        """Count a load report as a sign of progress if its progress has changed. None: the report
        has no figures.
        """
        if self.report is not None and progress is not None and progress != self.report:
            self.last_s = max(self.last_s, now_s)
        self.report = progress

    @property
    def stands_still(self) -> bool:
        """Return whether a stream of the instance was given up for silence and no progress has
        followed.
        """
        return self.stood_still_s > self.last_s


class InstanceProgress:
    """Times of the instances' last progress, and the resulting limits on attempts' silence."""

    def __init__(self, instances: Instances, token_gap_s: float, policy: RecoveryPolicy) -> None:
        self._instances = instances
        self.longest_gap_s = token_gap_s
        self._policy = policy
        # Time since which each instance is no longer alone; infinite: it is alone.
        self._others_since_s: dict[InstanceId, float] = {}
        # One record per instance, to which the code that runs per token holds a reference.
        self.delivered: dict[InstanceId, Delivered] = defaultdict(Delivered)

    @property
    def tokens(self) -> int:
        """Number of tokens that all instances have delivered to this process."""
        return sum(each.tokens for each in self.delivered.values())

    def others_since_s(self, instance: InstanceId, now_s: float) -> float:
        """Return the time since which others could take the instance's streams, as seen by these
        calls; infinite: none can now. Instances that were paused together wake one by one, so
        earlier silence does not count.
        """
        if not self._policy.has_others(instance, lambda other: self.is_heard(other, now_s)):
            self._others_since_s[instance] = inf
            return inf
        since_s = self._others_since_s.get(instance, -inf)
        if since_s == inf:
            since_s = self._others_since_s[instance] = now_s
        return since_s

    def is_heard(self, instance: InstanceId, now_s: float) -> bool:
        """Return whether the instance has just reported or delivered tokens."""
        return self._instances.is_reporting(instance, now_s, self.delivered[instance].last_s)

    def is_alone(self, instance: InstanceId, now_s: float) -> bool:
        """Return whether no other instance could take this instance's streams now."""
        return self.others_since_s(instance, now_s) == inf

    def token_gap_s(
        self, live: LiveStream, instance: InstanceId, heard_s: float, now_s: float
    ) -> float:
        """Return how long after its last token an attempt may be silent. A stream that nothing else
        could continue waits as long as any stream may wait.
        """
        usual_s = live.journal.token_interval_s
        if usual_s is None or self._instances.is_stalled(instance, now_s):
            return self.longest_gap_s
        alone_for_s = max(0.0, self.others_since_s(instance, now_s) - heard_s)
        silence_s = silent_after_s(usual_s, self.longest_gap_s)
        return min(self.longest_gap_s, alone_for_s + silence_s)

    def first_token_s(self, member: Member, predicted_s: float) -> float:
        """Return how long a call may be silent before its first token: the longest gap between
        tokens plus twice the predicted prefill, plus the instance's queue.
        """
        limit_s = self.longest_gap_s + _PREFILLS * max(predicted_s, member.work_s)
        if member.times.table.is_guess or member.times.table.is_estimated:
            limit_s *= _GUESS
        return limit_s + member.reported_wait_s

    def answer_s(self, instance: InstanceId, heard_s: float) -> float:
        """Return how long after `heard_s` a call may be silent whose time cannot be predicted: for
        ever (inf); but if the instance has stood still since another stream was given up, until the
        longest gap between tokens has passed after that.
        """
        delivered = self.delivered[instance]
        if not delivered.stands_still:
            return inf
        return self.longest_gap_s + max(0.0, delivered.stood_still_s - heard_s)

    def counts(self, instance: InstanceId) -> bool:
        """Return whether the instance's load reports count its progress."""
        report = self.delivered[instance].report
        return report is not None and report[0] > 0

    def restarted(self, instance: InstanceId) -> None:
        """Forget stalled streams of the former process."""
        self.delivered[instance].stood_still_s = -inf

    def moved_for_s(self, instance: InstanceId, heard_s: float) -> float:
        """Return how long after `heard_s`, a stream's last output, the instance last showed
        progress with any stream; 0.0: it has shown none since.
        """
        return max(0.0, self.delivered[instance].last_s - heard_s)

    def is_making_progress(self, instance: InstanceId, now_s: float) -> bool:
        """Return whether the instance has more streams than it can run at a time, and delivers
        tokens for some of them.

        Giving up the others would only move them to the end of another queue. A hanging engine has
        a queue as well, but delivers nothing.
        """
        return (
            now_s - self.delivered[instance].last_s < self.longest_gap_s
            and self._instances.queued(instance) > 0
            and self._instances.is_reporting(instance, now_s)
        )
