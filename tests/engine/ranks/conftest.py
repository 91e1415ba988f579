"""Fixtures of the tests of ranks."""

import pytest

from kvrs.engine.ranks import stages


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that only is slow, on a busy machine, is not to be taken for one that hangs."""
    monkeypatch.setattr(stages, "_HANG_S", 60.0)
