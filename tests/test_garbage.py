"""Garbage of processes that run for long."""

import subprocess
import sys

import pytest

PILED_UP = """
import gc
from kvrs.process.memory import keep_what_is_there

class Circle:
    collected = 0

    def __init__(self):
        self.own = self

    def __del__(self):
        Circle.collected += 1

gc.set_threshold(70, 10, 10)  # A tenth of Python's, as all numbers here.
at_start = [[] for _ in range(400_000)]
gc.collect()
if {keeps}:
    keep_what_is_there()
kept = []
for n in range(60_000):
    kept.append(Circle())  # For as long as a stream lasts: it grows old, and is garbage then.
    if len(kept) == 1_200:
        kept.clear()
print(n - Circle.collected)
"""


@pytest.mark.process
@pytest.mark.parametrize(("keeps", "piles_up"), [(True, False), (False, True)])
def test_the_objects_of_a_start_put_no_collection_off(*, keeps: bool, piles_up: bool) -> None:
    """Without this, circles of streams that have ended pile up by the number of those objects."""
    run = [sys.executable, "-c", PILED_UP.format(keeps=keeps)]

    left = int(subprocess.run(run, capture_output=True, check=True, text=True).stdout)

    assert (left > 20_000) == piles_up
