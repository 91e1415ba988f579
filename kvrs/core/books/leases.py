"""Leases on the pages of open streams at instances and agents, and the attempts to fence there."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from kvrs.core.model import actions as act
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseUpdate

Number = tuple[int, int]  # An attempt's number: owner epoch, attempt; the greater is newer.


class Leases:
    """The leases of one proxy at instances or at agents. Each process gets one renewal message per
    third of a lease, for all its streams.
    """

    def __init__(
        self, lease_s: float, begun: Callable[[], None], release_s: float | None = None
    ) -> None:
        """`begun` is called at the first lease to renew or release while `is_idle`. `release_s`
        bounds the delay of a release; None: releases wait for the next renewal.
        """
        self.is_idle = False  # The sender waits, as there was nothing to renew or release.
        self._begun = begun
        self.tick_s = min(lease_s / 3, release_s or lease_s)
        self._lease_s = lease_s
        self._renewed_s = 0.0
        self._held: defaultdict[InstanceId, dict[StreamId, None]] = defaultdict(dict)
        self._ended: defaultdict[InstanceId, dict[StreamId, None]] = defaultdict(dict)

    def hold(self, instance: InstanceId, stream: StreamId) -> None:
        self._held[instance][stream] = None
        # A release that has not been sent yet is withdrawn.
        self._ended[instance].pop(stream, None)
        if self.is_idle:
            self._begin_work()

    def holds_any(self, instance: InstanceId) -> bool:
        """Return whether any open stream has KV at the instance."""
        return bool(self._held.get(instance))

    def release(self, instance: InstanceId, stream: StreamId) -> None:
        """Release the stream's pages with the next message to the instance."""
        self._held[instance].pop(stream, None)
        self._ended[instance][stream] = None
        if self.is_idle:
            self._begin_work()

    def _begin_work(self) -> None:
        self.is_idle = False
        self._begun()

    def drop(self, instance: InstanceId, stream: StreamId) -> None:
        """Stop renewing a lease that the instance has ended itself; no release is sent."""
        self._held[instance].pop(stream, None)

    def forget(self, instance: InstanceId) -> None:
        """Drop all leases at an instance that is gone."""
        self._held.pop(instance, None)
        self._ended.pop(instance, None)

    @property
    def is_empty(self) -> bool:
        """True if there is no lease to renew or release."""
        return not any(self._held.values()) and not any(self._ended.values())

    def begin(self, now_s: float) -> None:
        """Count the interval until the next renewal from now."""
        self._renewed_s = now_s

    def due(self, now_s: float) -> dict[InstanceId, LeaseUpdate]:
        """Return the messages to send now, one per process; call every `tick_s`.

        Renewals follow the clock, not the number of calls: a late answer to one renewal must not
        delay the others.
        """
        renew = now_s + self.tick_s / 2 >= self._renewed_s + self._lease_s / 3
        if renew:
            self._renewed_s = now_s
        return self.batches(renew=renew)

    def batches(self, *, renew: bool) -> dict[InstanceId, LeaseUpdate]:
        """Return the messages that are not empty, by process: all releases not yet returned, and
        with `renew` all renewals.
        """
        found = {}
        for instance in sorted(self._held.keys() | self._ended.keys()):
            held = sorted(self._held[instance]) if renew else []
            ended = sorted(self._ended.pop(instance, ()))
            if held or ended:
                found[instance] = LeaseUpdate(self._lease_s, renew=held, release=ended)
        return found

    def unknown(self, instance: InstanceId, streams: Iterable[StreamId]) -> tuple[StreamId, ...]:
        """Drop the leases that the instance does not know; return the streams that still need them.

        A stream may have ended before the answer came.
        """
        held = self._held[instance]
        lost = tuple(stream for stream in streams if stream in held)
        for stream in lost:
            del held[stream]
        return lost


class FenceTable:
    """Attempts that may still run at an instance that does not answer, for its fence request.

    An attempt is noted if it ends before its stream; any other attempt ends with its connection.
    """

    def __init__(self) -> None:
        self.noted: dict[InstanceId, dict[StreamId, Number]] = {}

    def halted(self, plan: act.Plan, stream: StreamId, number: Number) -> None:
        """Note an attempt that this proxy has ended and that the plan's instances may still run."""
        for instance in (plan.prefill, plan.decode):
            if instance is not None:
                self.noted.setdefault(instance, {})[stream] = number

    def ended(self, stream: StreamId, known: Mapping[InstanceId, Member]) -> None:
        """Forget the attempts of an ended stream at instances that are up: they drop an attempt
        when its connection closes. An instance that is cut off does not see that.
        """
        for instance, numbers in self.noted.items():
            if known[instance].health is Health.UP:
                numbers.pop(stream, None)

    def numbers(self, instance: InstanceId) -> dict[StreamId, Number]:
        """Return the fence of each stream: one above the last attempt that may still run there."""
        noted = self.noted.get(instance, {})
        return {stream: (epoch, attempt + 1) for stream, (epoch, attempt) in noted.items()}

    def fenced(self, instance: InstanceId) -> None:
        """Forget the attempts at an instance that has confirmed its fence."""
        self.noted.pop(instance, None)
