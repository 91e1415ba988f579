"""Replaces the GPU below upstream's modules by a logical GPU."""

from functools import partial
from typing import Any

from distserve_patches.cpu import model
from distserve_patches.cpu.cuda import Torch
from kvrs_engine.scheduling.pace import Pace


def apply(logical_gpu_bytes: int, pace: str | None) -> None:
    import distserve.llm as llm
    import distserve.worker as worker

    worker.torch = Torch()
    worker.get_gpu_memory = lambda: logical_gpu_bytes
    worker.download_and_convert_weights = _directory_of
    if pace is not None:
        model.keep_pace(Pace(pace))
    # Upstream's command line has no flag for the type, and its default is half precision.
    llm.ModelConfig = partial(llm.ModelConfig, dtype="fp32")


def _directory_of(model_config: Any) -> str:
    """Return a Hugging Face directory without conversion."""
    return str(model_config.model)
