"""Batches in flight share out the sequences that are ready."""

import pytest

from kvrs_engine.scheduling.flights import Flights
from kvrs_engine.scheduling.sequences import Chunk
from tests.scheduling.batch_steps import sequence


@pytest.mark.parametrize(
    ("depth", "flying", "ready", "share"),
    [
        (1, 0, 7, 7),
        (2, 0, 7, 4),
        (2, 1, 3, 3),
        (4, 0, 9, 3),
        (4, 3, 5, 5),
        (4, 0, 1, 1),
        (2, 2, 5, 5),
    ],
)
def test_a_batch_leaves_as_many_to_each_that_may_follow(
    depth: int, flying: int, ready: int, share: int
) -> None:
    flights = Flights(depth)
    for _ in range(flying):
        flights.begin([(sequence(1), Chunk([1], 0, [0], logits=1))])

    assert flights.share(ready) == share


def test_nothing_ready_takes_nothing() -> None:
    assert Flights(3).share(0) == 0
