"""Weighted fair queueing over the three classes of requests that wait for an engine.

LUMEN (section 5) divides the traffic of a recovering cluster into KV reuse, recomputation and new
requests, and leaves open how the three share an engine. Here they share it by these invariants:

1. Within a queue: first come, first served.
2. Between queues: reuse before recompute before new, while no queue has had more than its share.
   The client of a recovery sees a pause in its text; the client of a new request has no text yet.
   Reuse comes first because it needs the least compute time, and its pulls run beside the compute
   of other sequences.
3. No sequence starves under any number of recoveries. The shares are 8 : 4 : 1 in tokens to
   compute: later arrivals overtake a waiting new sequence by at most 8 tokens of reuse and 4 of
   recompute per token of new prompts up to and including its own (and a waiting recompute sequence
   by 2 tokens of reuse per token).

This is weighted fair queueing (Demers, Keshav and Shenker 1989) with the self-clocked virtual time
of Golestani (1994). On arrival a sequence of n tokens in queue q gets the virtual finish time

    F = max(F of the previous sequence in q, virtual time) + n * TOKEN_COST[q]

The virtual time is the highest F with a computed history, so that an empty queue accumulates no
credit. The sequence with the lowest F is next. F never changes: admission, prefill and preemption
use the same order, and two sequences never preempt each other in turns.
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
        self._last_finish = dict.fromkeys(Queue, 0)  # The latest finish time in each queue.
        self._virtual_time = 0  # The highest finish time with a computed history.
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def lengths(self) -> dict[Queue, int]:
        return {queue: len(waiting) for queue, waiting in self._queues.items()}

    def append(self, sequence: Sequence, tokens: int) -> None:
        """Append a new sequence, with the number of tokens that it is expected to compute."""
        assert tokens > 0, "a sequence without cost could be passed by any number"
        self._arrivals += 1
        sequence.arrival = self._arrivals
        start = max(self._last_finish[sequence.queue], self._virtual_time)
        sequence.virtual_finish = self._last_finish[sequence.queue] = (
            start + tokens * TOKEN_COST[sequence.queue]
        )
        self._queues[sequence.queue].append(sequence)

    def head(self) -> Sequence | None:
        """Return the next sequence to admit; None: no sequence waits."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=order) if heads else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted or has ended."""
        self._queues[sequence.queue].remove(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a preempted sequence back in its place."""
        insort(self._queues[sequence.queue], sequence, key=order)

    def advance(self, sequence: Sequence) -> None:
        """Advance the virtual time to the sequence, whose history is computed."""
        self._virtual_time = max(self._virtual_time, sequence.virtual_finish)

    def check(self) -> None:
        """Assert that each queue has its own sequences, ordered by finish time and by arrival.
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
