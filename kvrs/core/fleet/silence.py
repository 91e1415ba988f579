"""Limits of a source's silence, and what excuses it.

A source is an instance that reports its load, an agent, or an attempt that produces tokens.

To give up what is silent serves only what can go on elsewhere. Where no other instance could take
it, the longest limit applies: a process that was paused goes on with its streams when it is back.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvrs.core.fleet.known import Instances
from kvrs.core.model.member import Member
from kvrs.core.model.streams import LiveStream
from kvrs.ids import InstanceId

# The least silence that counts, however quick the source was before: machines pause.
SHORTEST_SILENCE_S = 2.0
# No watch of a process is ended by what others say of it before it was silent for so long: on a
# busy machine a healthy process, or this one, may lack a processor for many time slices.
SHORTEST_SUSPICION_S = 0.5
# Silence lasts for this many of a source's usual intervals, so that one which has become ten times
# as slow is not silent.
USUAL_INTERVALS = 20
# A look that is so late was delayed by a stall of this process's own event loop.
EVENT_LOOP_STALL_S = 0.25
# A prompt may take so many times its predicted prefill, and the whole wait this many times as long
# while the table of the prediction is a guess or an estimate.
_PREFILLS = 2.0
_GUESS = 4.0
# A killed process resets all its sockets at once, but they are read one after the other: wait this
# long for the news that the whole instance is gone, so that all its victims are decided together.
LOST_TOGETHER_S = 0.002


def silent_after_s(usual_s: float, longest_s: float) -> float:
    """Return how long a source with this usual interval may be silent, at most `longest_s`."""
    return min(longest_s, max(SHORTEST_SILENCE_S, USUAL_INTERVALS * usual_s))


@dataclass(slots=True, eq=False)
class SilenceTimer:
    """Notices silence with one timer that is re-armed when it fires, not per token."""

    heard_s: float
    next_s: float = inf  # When it is to be looked at, after the first look.

    def stalled(self, late_s: float, now_s: float) -> None:
        """Leave out the time in which this process stood still, until now: nothing could be heard
        in it.
        """
        self.heard_s = min(now_s, self.heard_s + late_s)

    def may_be_suspected(self, now_s: float) -> bool:
        """True if it has lasted longer than processes wait for a processor."""
        return now_s - self.heard_s >= SHORTEST_SUSPICION_S

    def look(self, now_s: float, limit_s: float, is_excused: Callable[[], bool]) -> float | None:
        """Return when to look again; None: the source was silent for `limit_s` without an excuse.

        The limit may become shorter meanwhile, so looks are at most SHORTEST_SILENCE_S apart.
        """
        # After a stall of this process's own event loop the timeout starts again: what came
        # meanwhile may be read after this.
        if now_s - self.next_s > EVENT_LOOP_STALL_S:
            self.heard_s = now_s
        if now_s >= self.heard_s + limit_s:
            if not is_excused():
                return None
            self.heard_s = now_s
        self.next_s = min(self.heard_s + limit_s, now_s + SHORTEST_SILENCE_S)
        return self.next_s


@dataclass(slots=True)
class Delivered:
    """The signs of progress of an instance: what it delivered here, and reports that moved."""

    last_s: float = -inf
    tokens: int = 0  # Of the streams of this process, as far as they are counted.
    report: tuple[float, int] | None = None  # The progress of its last report.
    stood_still_s: float = -inf  # When a stream was last given up for a silence between two tokens.

    def reported(self, progress: tuple[float, int], now_s: float) -> None:
        """Take a load report for a sign if its progress differs from that of the one before."""
        if self.report is not None and progress != self.report:
            self.last_s = max(self.last_s, now_s)
        self.report = progress

    @property
    def stands_still(self) -> bool:
        """A stream was given up there for its silence, and no sign of progress has come since."""
        return self.stood_still_s > self.last_s


class InstanceProgress:
    """When instances last delivered anything, and how long attempts may wait for them."""

    def __init__(
        self,
        instances: Instances,
        token_gap_s: float,
        has_others: Callable[[InstanceId, Callable[[InstanceId], bool]], bool],
    ) -> None:
        """`has_others`: whether those for which a function holds could take now what runs at an
        instance.
        """
        self._instances = instances
        self.longest_gap_s = token_gap_s
        self._has_others = has_others
        self._others_since_s: dict[InstanceId, float] = {}  # Of those that were alone.
        # One record for each instance, which what runs for each token holds.
        self.delivered: dict[InstanceId, Delivered] = defaultdict(Delivered)

    @property
    def tokens(self) -> int:
        """Tokens of all instances together."""
        return sum(each.tokens for each in self.delivered.values())

    def others_since_s(self, instance: InstanceId, now_s: float) -> float:
        """Return since when, as far as was asked, others could take what runs at the instance;
        infinite: none can now. Several that were paused together wake one after the other, so that
        silence from before counts no more.
        """
        if not self._has_others(instance, lambda other: self._instances.is_reporting(other, now_s)):
            self._others_since_s[instance] = inf
            return inf
        since_s = self._others_since_s.get(instance, -inf)
        if since_s == inf:
            since_s = self._others_since_s[instance] = now_s
        return since_s

    def is_alone(self, instance: InstanceId, now_s: float) -> bool:
        """No other instance could take now what runs there."""
        return self.others_since_s(instance, now_s) == inf

    def token_gap_s(
        self, live: LiveStream, instance: InstanceId, heard_s: float, now_s: float
    ) -> float:
        """Return how long after its last token an attempt there may be silent. Where nothing else
        could go on with the stream, it waits for its instance as long as a stream may wait.
        """
        usual_s = live.journal.token_interval_s
        if usual_s is None or self._instances.is_stalled(instance, now_s):
            return self.longest_gap_s
        alone_for_s = max(0.0, self.others_since_s(instance, now_s) - heard_s)
        silence_s = silent_after_s(usual_s, self.longest_gap_s)
        return min(self.longest_gap_s, alone_for_s + silence_s)

    def first_token_s(self, member: Member, predicted_s: float) -> float:
        """Return how long a call to the instance may be silent before its first token: the time
        between two tokens and twice the predicted prefill, behind what is queued there.
        """
        limit_s = self.longest_gap_s + _PREFILLS * max(predicted_s, member.work_s)
        if member.prefill.is_guess or member.prefill.is_estimated:
            limit_s *= _GUESS
        return limit_s + member.reported_wait_s

    def answer_s(self, instance: InstanceId, heard_s: float) -> float:
        """Return how long after `heard_s` a call may be silent that has no predicted time: without
        end, unless other streams of the instance stand still.
        """
        delivered = self.delivered[instance]
        if not delivered.stands_still:
            return inf
        return self.longest_gap_s + max(0.0, delivered.stood_still_s - heard_s)

    def counts(self, instance: InstanceId) -> bool:
        """The reports of the instance say what it computes."""
        report = self.delivered[instance].report
        return report is not None and report[0] > 0

    def restarted(self, instance: InstanceId) -> None:
        """Another process of the instance is up, and nothing is known of its streams."""
        self.delivered[instance].stood_still_s = -inf

    def moved_for_s(self, instance: InstanceId, heard_s: float) -> float:
        """Return how long after `heard_s` the instance has last shown progress."""
        return max(0.0, self.delivered[instance].last_s - heard_s)

    def is_making_progress(self, instance: InstanceId, now_s: float) -> bool:
        """The instance has more streams than it can run at a time, and delivers for some of them.

        To give up the others would only move them to the end of another queue. An engine that hangs
        has a queue as well, but delivers nothing.
        """
        return (
            now_s - self.delivered[instance].last_s < self.longest_gap_s
            and self._instances.queued(instance) > 0
            and self._instances.is_reporting(instance, now_s)
        )
