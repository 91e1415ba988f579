"""Pages of open streams that processes keep under leases, and attempts that may still run there."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from kvrs.core.model import actions as act
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseUpdate

Number = tuple[int, int]  # Owner epoch, attempt.


class Leases:
    """The leases of one proxy, at instances or at agents: which of them keep pages of which open
    streams, and when that is renewed. One batched message per process and third of a lease, none
    per stream.
    """

    def __init__(self, lease_s: float, release_s: float | None = None) -> None:
        """Releases wait for the next renewal, or at most for `release_s`."""
        self.tick_s = min(lease_s / 3, release_s or lease_s)
        self._lease_s = lease_s
        self._renewed_s = 0.0
        self._held: defaultdict[InstanceId, dict[StreamId, None]] = defaultdict(dict)
        self._ended: defaultdict[InstanceId, dict[StreamId, None]] = defaultdict(dict)
        # Called when there is something to renew or release again.
        self.has_work: Callable[[], None] | None = None

    def hold(self, instance: InstanceId, stream: StreamId) -> None:
        self._held[instance][stream] = None
        # A release that has not been sent yet is withdrawn.
        self._ended[instance].pop(stream, None)
        if self.has_work is not None:
            self._begin_work(self.has_work)

    def holds_any(self, instance: InstanceId) -> bool:
        """An open stream has KV at the instance."""
        return bool(self._held.get(instance))

    def release(self, instance: InstanceId, stream: StreamId) -> None:
        """The stream needs nothing there any more; the next batch says so."""
        self._held[instance].pop(stream, None)
        self._ended[instance][stream] = None
        if self.has_work is not None:
            self._begin_work(self.has_work)

    def _begin_work(self, has_work: Callable[[], None]) -> None:
        self.has_work = None
        has_work()

    def drop(self, instance: InstanceId, stream: StreamId) -> None:
        """The instance retains nothing of the stream, and knows it."""
        self._held[instance].pop(stream, None)

    def forget(self, instance: InstanceId) -> None:
        """The instance is gone, and what it retained with it."""
        self._held.pop(instance, None)
        self._ended.pop(instance, None)

    @property
    def is_empty(self) -> bool:
        """Nothing is to be renewed or released."""
        return not any(self._held.values()) and not any(self._ended.values())

    def begin(self, now_s: float) -> None:
        """Count the time until the first renewal from now on."""
        self._renewed_s = now_s

    def due(self, now_s: float) -> dict[InstanceId, LeaseUpdate]:
        """Return what is to be sent now, one message per process; ask every `tick_s`.

        Renewals go by the clock, not by the number of batches: one that is answered late must not
        put off the others' renewals.
        """
        renew = now_s + self.tick_s / 2 >= self._renewed_s + self._lease_s / 3
        if renew:
            self._renewed_s = now_s
        return self.batches(renew=renew)

    def batches(self, *, renew: bool) -> dict[InstanceId, LeaseUpdate]:
        """Return all messages with something in them; releases are in one message only."""
        found = {}
        for instance in sorted(self._held.keys() | self._ended.keys()):
            held = sorted(self._held[instance]) if renew else []
            ended = sorted(self._ended.pop(instance, ()))
            if held or ended:
                found[instance] = LeaseUpdate(self._lease_s, renew=held, release=ended)
        return found

    def unknown(self, instance: InstanceId, streams: Iterable[StreamId]) -> tuple[StreamId, ...]:
        """Drop what an answer says is not retained; return those that were still wanted.

        A stream may have ended while the answer was on its way.
        """
        held = self._held[instance]
        lost = tuple(stream for stream in streams if stream in held)
        for stream in lost:
            del held[stream]
        return lost


class FenceTable:
    """Attempts that may still run at an instance that does not answer; needed to build a fence
    request. Noted when an attempt is over before its stream: any other one ends with its
    connection.
    """

    def __init__(self) -> None:
        self.noted: dict[InstanceId, dict[StreamId, Number]] = {}

    def halted(self, plan: act.Plan, stream: StreamId, number: Number) -> None:
        """The attempt by this plan is over here; its instances may not know yet."""
        for instance in (plan.prefill, plan.decode):
            if instance is not None:
                self.noted.setdefault(instance, {})[stream] = number

    def ended(self, stream: StreamId, known: Mapping[InstanceId, Member]) -> None:
        """The stream is over. An instance that is up drops the attempt because its connection is
        closed; one that is cut off cannot know.
        """
        for instance, numbers in self.noted.items():
            if known[instance].health is Health.UP:
                numbers.pop(stream, None)

    def numbers(self, instance: InstanceId) -> dict[StreamId, Number]:
        """Return what a fence must name: one above every attempt that may still run there."""
        noted = self.noted.get(instance, {})
        return {stream: (epoch, attempt + 1) for stream, (epoch, attempt) in noted.items()}

    def fenced(self, instance: InstanceId) -> None:
        """Nothing runs there any more."""
        self.noted.pop(instance, None)
