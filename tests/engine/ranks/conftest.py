"""Fixtures of the tests of ranks."""

from dataclasses import replace

import pytest

from kvrs.engine.ranks import stages
from kvrs.engine.ranks.formation import RankFormation
from kvrs.engine.ranks.stages import StageRanks, StartTimes

_IMPORT_S = 2.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that only is slow, on a busy machine, is not to be taken for one that hangs."""
    monkeypatch.setattr(stages, "_HANG_S", 60.0)


@pytest.fixture(autouse=True)
def ranks_begin_with_their_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one instance, the first ranks of which wait until their nursery has imported
    everything. The process of tests has many, which are to choose the same ways.
    """
    start = StageRanks.start_ranks

    def start_ranks(own: StageRanks) -> tuple[RankFormation, StartTimes]:
        formation, times = start(own)
        return formation, replace(times, began_s=times.began_s - _IMPORT_S)

    monkeypatch.setattr(StageRanks, "start_ranks", start_ranks)
