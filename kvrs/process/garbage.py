"""Control of Python's garbage collection in a process that runs for long."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = 100_000


def collect_nothing_yet() -> None:
    """Disable collections until `keep_what_is_there`: the modules and models that a start loads are
    no garbage, and collecting among them takes a tenth of the start. They are not collected at exit
    either, which would take a sixth of a second without torch and half a second with it.
    """
    gc.disable()
    atexit.register(gc.freeze)


def keep_what_is_there() -> None:
    """Exempt the objects that exist now, after the start, from later collections, which would spend
    tens of milliseconds on them.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # Collect once now, because that resets Python's count of old objects to zero.
    gc.enable()


@contextmanager
def collect_seldom() -> Iterator[None]:
    """Raise, within this block, the number of new objects that starts a collection from some
    hundred to 100,000, for work that makes many objects and few cycles.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_SELDOM, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
