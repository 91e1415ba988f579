"""A real tokenizer for the text machines: that of the generated model."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvrs.text.output import load_tokenizer
from kvrs_engine.engine.random_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)
