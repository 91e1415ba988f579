"""The model of clusters."""

from pathlib import Path

import pytest

from kvrs.engine.random_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the model that `kvrs up` generates where none is given, which takes a
    process with torch each time.
    """
    directory: Path = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_model(directory, seed=0)
    return str(directory)
