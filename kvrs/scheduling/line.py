"""The line in front of an engine: three queues, and whose turn it is.

LUMEN (section 5) parts the traffic of a cluster that recovers into KV-reuse, recomputation and new requests, and leaves
open how the three share an engine. Here they share it by these laws:

1. Within a queue: first come, first served.
2. Between them: reuse before recompute before new, for as long as none of them has had more than its share. A recovery's
   client is in the middle of its text and looks at a pause; a new one has seen nothing yet. Among recoveries those that
   reuse KV go first: they need the least computing, and their pulls begin with admission and run beside everybody's computing.
3. Nobody starves, however many recoveries come. The shares are 8 to 4 to 1, in tokens that must be computed: whoever stands
   in line is passed by at most 8 tokens of reuse and 4 of recompute that come later for each token of new prompts up to and
   with its own (and by 2 of reuse for each of recompute).

This is weighted fair queueing (Demers, Keshav and Shenker 1989; its clock is Golestani's of 1994). On arrival a sequence gets
a *place*: that of the one before it in its own queue, or the furthest place served so far if that is further (who did not come
saves nothing up), plus 1, 2 or 8 for each of its tokens. The lowest place is next. A place never changes, so everything that
needs an order of all sequences (admission, prefill, preemption) has one, and no two ever take turns in preempting each other.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from kvrs.scheduling.sequences import Queue, Sequence

PLACES_PER_TOKEN = {Queue.REUSE: 1, Queue.RECOMPUTE: 2, Queue.NEW: 8}


def order(sequence: Sequence) -> tuple[int, int]:
    """The key by which sequences stand in line."""
    return sequence.place, sequence.arrival


class Line:
    """Those who wait, in three queues; and the places of all who ever came."""

    def __init__(self) -> None:
        self._queues: dict[Queue, deque[Sequence]] = {queue: deque() for queue in Queue}
        self._last_place = dict.fromkeys(Queue, 0)  # Given in each queue.
        self._served_place = 0  # The furthest whose history is computed.
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def lengths(self) -> dict[Queue, int]:
        return {queue: len(waiting) for queue, waiting in self._queues.items()}

    def join(self, sequence: Sequence, tokens: int) -> None:
        """Give a newcomer, which is expected to compute that many tokens, its place at the end of its queue."""
        assert tokens > 0, "a place of no width would let any number pass"
        self._arrivals += 1
        sequence.arrival = self._arrivals
        start = max(self._last_place[sequence.queue], self._served_place)
        sequence.place = self._last_place[sequence.queue] = start + tokens * PLACES_PER_TOKEN[sequence.queue]
        self._queues[sequence.queue].append(sequence)

    def head(self) -> Sequence | None:
        """Whose turn it is."""
        return min((queue[0] for queue in self._queues.values() if queue), key=order, default=None)

    def leave(self, sequence: Sequence) -> None:
        """It is admitted, or gone."""
        self._queues[sequence.queue].remove(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It was preempted: back to its place, before all that came after it."""
        insort(self._queues[sequence.queue], sequence, key=order)

    def served(self, sequence: Sequence) -> None:
        """Its history is computed."""
        self._served_place = max(self._served_place, sequence.place)

    def check(self) -> None:
        """Assert that each queue holds its own, by place and by arrival alike. O(those who wait)."""
        for queue, waiting in self._queues.items():
            assert all(one.queue is queue and one.place <= self._last_place[queue] for one in waiting)
            assert all(one.place < other.place and one.arrival < other.arrival for one, other in pairwise(waiting))
