"""Weighted fair queueing over the three classes of requests that wait for an engine.

LUMEN (section 5) divides the traffic of a cluster that recovers into KV-reuse, recomputation and
new requests, and leaves open how the three share an engine. Here they share it by these invariants:

1. Within a queue: first come, first served.
2. Between queues: reuse before recompute before new, for as long as none of them has had more than
   its share. The client of a recovery is in the middle of its text and sees a pause; that of a new
   request has seen nothing yet. Among recoveries those that reuse KV go first: they need the least
   computing, and their pulls begin with admission and run beside the computing of others.
3. No sequence starves under any number of recoveries. The shares are 8 to 4 to 1, in tokens that
   must be computed: a waiting sequence is passed by at most 8 tokens of reuse and 4 of recompute
   that come later for each token of new prompts up to and including its own (and by 2 of reuse for
   each of recompute).

This is weighted fair queueing (Demers, Keshav and Shenker 1989) with the self-clocked virtual time
of Golestani (1994). On arrival a sequence of n tokens in queue q gets the virtual finish time

    F = max(F of the one before it in q, virtual time) + n * TOKEN_COST[q]

where the virtual time is the highest F whose history is computed, so that an empty queue saves
nothing up. The lowest F is next. F never changes, so everything that needs an order of all
sequences (admission, prefill, preemption) has one, and no two ever preempt each other in turns.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from kvrs_engine.scheduling.sequences import Queue, Sequence

# Virtual time per token: the inverse of a queue's share.
TOKEN_COST = {Queue.REUSE: 1, Queue.RECOMPUTE: 2, Queue.NEW: 8}


def order(sequence: Sequence) -> tuple[int, int]:
    """Sort key of the queue: virtual finish time, then arrival."""
    return sequence.virtual_finish, sequence.arrival


class FairQueue:
    """The waiting sequences in their three queues, and the virtual clock."""

    def __init__(self) -> None:
        self._queues: dict[Queue, deque[Sequence]] = {queue: deque() for queue in Queue}
        self._last_finish = dict.fromkeys(Queue, 0)  # The latest given in each queue.
        self._virtual_time = 0  # The highest finish time whose history is computed.
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def lengths(self) -> dict[Queue, int]:
        return {queue: len(waiting) for queue, waiting in self._queues.items()}

    def append(self, sequence: Sequence, tokens: int) -> None:
        """Append a new sequence, which is expected to compute that many tokens, to its queue."""
        assert tokens > 0, "a sequence without cost could be passed by any number"
        self._arrivals += 1
        sequence.arrival = self._arrivals
        start = max(self._last_finish[sequence.queue], self._virtual_time)
        sequence.virtual_finish = self._last_finish[sequence.queue] = (
            start + tokens * TOKEN_COST[sequence.queue]
        )
        self._queues[sequence.queue].append(sequence)

    def head(self) -> Sequence | None:
        """The next sequence to admit; None: none waits."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=order) if heads else None

    def remove(self, sequence: Sequence) -> None:
        """The sequence is admitted, or has ended."""
        self._queues[sequence.queue].remove(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a preempted sequence back, before all that came after it."""
        insort(self._queues[sequence.queue], sequence, key=order)

    def advance(self, sequence: Sequence) -> None:
        """The history of the sequence is computed: the virtual time moves up to it."""
        self._virtual_time = max(self._virtual_time, sequence.virtual_finish)

    def check(self) -> None:
        """Assert that each queue holds its own, in order of finish time and of arrival alike.
        O(waiting sequences).
        """
        for queue, waiting in self._queues.items():
            assert all(
                one.queue is queue and one.virtual_finish <= self._last_finish[queue]
                for one in waiting
            )
            assert all(
                one.virtual_finish < other.virtual_finish and one.arrival < other.arrival
                for one, other in pairwise(waiting)
            )
