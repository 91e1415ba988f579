"""Work at a lowered priority, which yields the processors to other work on the machine."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Loads get a quarter of a processor beside a thread of normal priority. Copies get a tenth, because
# they slow the steps of their own ranks. A large unit at the lowest priority could take so much
# time
# that its rank seems to hang. The kernel derives the priority of reads from these values
# (ioprio_set(2)).
LOAD_NICE, COPY_NICE = 5, 10

Result = TypeVar("Result")


def yielding(work: Callable[[], Result], nice: int) -> Result:
    """Run `work` at a lowered priority in a new thread: the priority cannot be raised again."""
    with ThreadPoolExecutor(
        1, thread_name_prefix="yielding", initializer=_yield, initargs=(nice,)
    ) as thread:
        return thread.submit(work).result()


def _yield(nice: int) -> None:
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + nice)
