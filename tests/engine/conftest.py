"""Models for the engine's tests: generated, never downloaded."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrs_engine.engine import warm_up
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_testkit.noted_prefill import note_prefill
from kvrs_testkit.random_experts import ExpertsModel, write_experts_model

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its prefill is noted, which each instance would measure."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, seed=0)
    note_prefill(directory)
    return directory


@pytest.fixture(autouse=True, scope="session")
def measured_once() -> Iterator[None]:
    """An instance in this process notes its table, of any settings, however busy the machine is."""
    kept, warm_up._UNDISTURBED = warm_up._UNDISTURBED, float("inf")
    yield
    warm_up._UNDISTURBED = kept


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of which the first are chosen more often."""
    directory = tmp_path_factory.mktemp("models") / "experts"
    write_experts_model(directory, ExpertsModel.tiny("mixtral", skew=1.0), seed=0)
    return directory


@pytest.fixture(
    scope="session", params=[pytest.param("tiny_model", marks=pytest.mark.nightly), "tiny_experts"]
)
def dense_or_experts(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a Hugging Face directory with random weights of any configuration of a family, by
    Hugging Face's own code.
    """

    def write(family: str, seed: int = 0, max_shard_size: str = "5GB", **fields: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        directory = tmp_path_factory.mktemp("models") / "random"
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
        for name, weight in model.named_parameters():
            # Freshly made biases and norms are zeros and ones; those would hide that they are left
            # out.
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(weight, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return directory

    return write
