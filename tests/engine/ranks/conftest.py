"""Fixtures of the tests of ranks."""

from dataclasses import replace

import pytest

from kvrs_engine.elastic import waiting
from kvrs_engine.engine.ranks.formation import RankFormation
from kvrs_engine.engine.ranks.stages import StageRanks, StartTimes

_SLOWER_S = 2.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that only is slow, on a busy machine, is not to be taken for one that hangs."""
    monkeypatch.setattr(waiting, "_HANG_S", 60.0)


@pytest.fixture(autouse=True)
def restarts_seem_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of the tiny model starts about as fast as others go on without it. They are to choose
    the same way on every machine.
    """
    start = StageRanks.start_ranks

    def start_ranks(own: StageRanks) -> tuple[RankFormation, StartTimes]:
        formation, times = start(own)
        slower = replace(
            times, alone_s=times.alone_s + _SLOWER_S, whole_s=times.whole_s + _SLOWER_S
        )
        return formation, slower

    monkeypatch.setattr(StageRanks, "start_ranks", start_ranks)
