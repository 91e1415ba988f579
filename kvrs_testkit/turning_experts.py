"""A mixture of experts of which other experts are popular where prompts have other tokens, and with
a token behind which nothing is a number.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvrs_testkit.random_experts import ExpertsModel, write_experts_model

FIRST_IDS, LAST_IDS = range(4, 256), range(256, 512)  # Of these the last experts are popular.
BAD_ID = 3  # Its embedding overflows. It is no token's likeliest successor.


def write_turning_model(directory: Path, seed: int = 0, model: ExpertsModel | None = None) -> None:
    """By itself a tiny Mixtral of 8 experts, of which each token takes 2."""
    write_experts_model(directory, model or ExpertsModel.tiny("mixtral", skew=2.0), seed)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    # By the last channel routers tell popular experts (`random_experts.py`).
    embeddings[LAST_IDS.start : LAST_IDS.stop, -1] *= -1
    embeddings[BAD_ID], head[BAD_ID] = torch.inf, 0.0
    save_file(tensors, path, metadata={"format": "pt"})
