"""Streams that kills of decode servers hit, as the experiment counts them."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from experiments.kill_spread.run import BAR, CASES, STREAMS, Trial, run
from kvrs_testkit.memory_loop import MemoryLoop


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each death is a warning."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_servers_killed_in_turn_share_the_streams() -> None:
    """A server that is back has its part of the streams before the next kill."""
    trial = Trial(CASES[0], "in turn", seed=1)
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        runner.run(run(trial, kills=15))

    assert trial.failed.total() == 0
    assert all(sum(kill.before.values()) >= STREAMS - 1 for kill in trial.kills)
    assert sum(kill.paused for kill in trial.kills) == 0
    assert trial.mean("hit") <= BAR
