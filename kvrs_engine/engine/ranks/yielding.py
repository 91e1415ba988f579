"""Work that yields the processors to whatever else runs on the machine."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Against a thread of the usual priority, loads get a quarter of a processor, and what comes while
# the same ranks compute gets a tenth, since it slows their own steps. At the lowest priority a
# large unit might take so long that its rank is taken to hang. The kernel derives the priority of
# reads from these (ioprio_set(2)).
LOAD_NICE, COPY_NICE = 5, 10

Result = TypeVar("Result")


def yielding(work: Callable[[], Result], nice: int) -> Result:
    """Do it in a thread of its own, which ends: a lowered priority cannot be raised again."""
    with ThreadPoolExecutor(
        1, thread_name_prefix="yielding", initializer=_yield, initargs=(nice,)
    ) as thread:
        return thread.submit(work).result()


def _yield(nice: int) -> None:
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + nice)
