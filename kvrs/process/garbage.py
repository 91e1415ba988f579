"""Garbage of a process that runs for long."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = 100_000


def collect_nothing_yet() -> None:
    """Until `keep_what_is_there`: modules and models that a start brings in are no garbage, and
    collections among them are a tenth of its work. Nor are they collected at the end, which would
    take a sixth of a second without torch and half a second with it.
    """
    gc.disable()
    atexit.register(gc.freeze)


def keep_what_is_there() -> None:
    """No later collection of garbage passes through the objects of the start, which takes tens of
    milliseconds. Nor does their number put collections off: Python does not look at old objects
    before a quarter as many new ones have grown old, some 20,000, so that what ends in a circle
    would pile up for hours.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # Counts how many are old, which are none now.
    gc.enable()


@contextmanager
def collect_seldom() -> Iterator[None]:
    """For what makes many objects that live for a while, and few circles: young ones are collected
    after a hundred thousand, not after some hundred.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_SELDOM, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
