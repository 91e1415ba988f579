"""Published traces in part: how experiments draw from them."""

import random
from dataclasses import replace

from kvrs.errors import TraceError
from kvrs_lab.traces.mooncake import Trace, window


def sample(trace: Trace, count: int, seed: int) -> Trace:
    """`count` requests at random, in their order and at their times: the load falls with their
    number.
    """
    if count > len(trace.requests):
        raise TraceError(f"the trace has {len(trace.requests)} requests, {count} were asked for")
    chosen = sorted(random.Random(seed).sample(range(len(trace.requests)), count))
    return window(
        replace(trace, requests=tuple(trace.requests[number] for number in chosen)), count
    )
