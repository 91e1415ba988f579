"""Which processes keep pages of which open streams, and when that is renewed.

One batched message per process and third of a lease, none per stream.
"""

from collections import defaultdict
from collections.abc import Iterable

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseUpdate


class Leases:
    """The leases of one proxy, at instances or at agents."""

    def __init__(self, lease_s: float, release_s: float | None = None) -> None:
        """Releases wait for the next renewal, or at most for `release_s`."""
        self.tick_s = min(lease_s / 3, release_s or lease_s)
        self._lease_s = lease_s
        self._renewed_s = 0.0
        self._held: defaultdict[InstanceId, dict[StreamId, None]] = defaultdict(dict)
        self._ended: defaultdict[InstanceId, dict[StreamId, None]] = defaultdict(dict)

    def hold(self, instance: InstanceId, stream: StreamId) -> None:
        self._held[instance][stream] = None
        # A release that has not been sent yet is withdrawn.
        self._ended[instance].pop(stream, None)

    def holds_any(self, instance: InstanceId) -> bool:
        """An open stream has KV at the instance."""
        return bool(self._held.get(instance))

    def release(self, instance: InstanceId, stream: StreamId) -> None:
        """The stream needs nothing there any more; the next batch says so."""
        self._held[instance].pop(stream, None)
        self._ended[instance][stream] = None

    def drop(self, instance: InstanceId, stream: StreamId) -> None:
        """The instance retains nothing of the stream, and knows it."""
        self._held[instance].pop(stream, None)

    def forget(self, instance: InstanceId) -> None:
        """The instance is gone, and what it retained with it."""
        self._held.pop(instance, None)
        self._ended.pop(instance, None)

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
