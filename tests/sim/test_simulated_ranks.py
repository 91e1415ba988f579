"""Instances that lose ranks while they serve, in virtual time, by the objects of `kvrs.elastic`."""

from collections import Counter
from typing import Any

import pytest

from kvrs.policy.event_log import rerun
from kvrs.sim.cluster import Outcome
from kvrs.sim.process import InvariantError
from kvrs.sim.ranks import SimRanks
from kvrs.sim.scenarios import ranked, too_few_ranks

SEEDS = 10


def outcomes() -> list[Outcome]:
    return [ranked(seed).run() for seed in range(SEEDS)]


def test_no_computation_reads_a_cell_that_is_gone() -> None:
    """Two ranks at once, one in mid-move of another, devices and processes, instances that take
    five times as long as they say: every stream ends complete, and most stay where they are.
    """
    found = outcomes()

    ended = sum((outcome.ended for outcome in found), Counter[str]())
    recoveries = sum((outcome.recoveries for outcome in found), Counter[str]())
    hit = {one.death for outcome in found for one in outcome.hits if one.streams}
    assert set(ended) == {"complete"}
    assert recoveries["in_place"] > 20
    assert len(hit) == 5


def test_streams_leave_an_instance_that_has_too_few_ranks() -> None:
    """It ends, as one process does; each stream goes on elsewhere and ends complete."""
    found = [too_few_ranks(seed).run() for seed in range(3)]

    assert all(one.streams for outcome in found for one in outcome.hits)
    assert {key for outcome in found for key in outcome.ended} == {"complete"}
    recoveries = sum((outcome.recoveries for outcome in found), Counter[str]())
    assert recoveries["in_place"] == 0
    assert recoveries.total() >= sum(one.streams for outcome in found for one in outcome.hits)


def test_the_law_notices_streams_that_compute_on_without_what_they_have_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An invariant that cannot be broken proves nothing."""

    def nothing(self: SimRanks, *given: Any) -> None:
        pass

    monkeypatch.setattr(SimRanks, "_begin_again", nothing)

    with pytest.raises(InvariantError, match="cells that are gone"):
        outcomes()


def test_a_log_with_ranks_can_be_run_again() -> None:
    world = ranked(3, keep_log=True)
    world.run()

    for proxy in world.cluster.proxies:
        assert proxy.log is not None
        assert rerun(proxy.log).difference is None
