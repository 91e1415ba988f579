"""Memory that calls allocate, by which tests count the bytes that a call copies."""

import tracemalloc
from collections.abc import Callable, Iterable


def allocated_bytes(call: Callable[[bytes], object], pieces: Iterable[bytes]) -> int:
    """Call a function with each piece; return the sum of what single calls had allocated at most.
    A call that joins everything received so far allocates at least that much.
    """
    total_bytes = 0
    tracemalloc.start()
    try:
        for piece in pieces:
            before_bytes, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            call(piece)
            total_bytes += tracemalloc.get_traced_memory()[1] - before_bytes
    finally:
        tracemalloc.stop()
    return total_bytes
