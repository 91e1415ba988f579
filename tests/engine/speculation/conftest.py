"""A model and its draft, for all tests of drafts: they run in one worker."""

from pathlib import Path

import pytest

from kvrs_engine.engine.speculation.pairs import write_pair
from kvrs_testkit.noted_prefill import note_prefill

ACCEPTANCE = 0.6


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `target` and `draft`, which takes four seconds to write. The prefill of the
    target is noted, which each instance would measure.
    """
    directory = tmp_path_factory.mktemp("pair")
    write_pair(directory, ACCEPTANCE, seed=0)
    note_prefill(directory / "target")
    return directory
