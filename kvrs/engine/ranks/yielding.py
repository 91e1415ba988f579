"""Work that yields the processors to whatever else runs on the machine."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Against a thread of the usual priority it gets a quarter of a processor. The kernel derives the
# priority of its reads from that (ioprio_set(2)).
NICE = 5

Result = TypeVar("Result")


def yielding(work: Callable[[], Result]) -> Result:
    """Do it in a thread of its own, which ends: a lowered priority cannot be raised again."""
    with ThreadPoolExecutor(1, thread_name_prefix="yielding", initializer=_yield) as thread:
        return thread.submit(work).result()


def _yield() -> None:
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICE)
