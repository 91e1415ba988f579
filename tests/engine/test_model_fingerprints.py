"""Fingerprints stay as they are while the code changes, for engines that are upgraded in turns."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine.layers.proofs import sample
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models import probe
from kvrs_engine.engine.models.digests import units_root
from kvrs_engine.engine.models.loading import read_decoder
from kvrs_engine.engine.worker import arithmetic_of, geometry_of

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 211,
    "max_position_embeddings": 64,
}
# Of each family a configuration, and the hash that it had at fa0f9ed0, or 0e36d06f (OPT, experts).
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (
        {"intermediate_size": 131, "num_key_value_heads": 2, "mlp_bias": True},
        "0d5b31f6a848b046a03168663c49777e",
    ),
    "opt": ({"ffn_dim": 200}, "96fd8a4efd0b9572b160f7c5f32b2133"),
    "qwen3_moe": (
        {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
        "0fc5f2980a4993fe68e0c8b1759ed064",
    ),
}


class MadeWeights:
    """Tensors of any name, the same on every machine."""

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return sample(1, torch.Size(shape).numel(), CPU).view(shape) + len(name)


def read(directory: Path, family: str, **fields: Any) -> ModelConfig:
    document = {"model_type": family, **COMMON, **fields}
    (directory / "config.json").write_text(json.dumps(document))
    return ModelConfig.from_directory(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_fingerprint_is_made_of_is_as_it_was(family: str, tmp_path: Path) -> None:
    """All of it but the names of the machine and of torch, and results of samples."""
    fields, expected = FAMILIES[family]
    config = read(tmp_path, family, **fields)
    geometry = geometry_of(config, EngineSettings())
    named = json.loads(arithmetic_of(config, geometry, CPU))[:4]
    decoder = read_decoder(config, MadeWeights(), 0, CPU)

    facts = [named, sorted(probe._shapes(config)), units_root(decoder).hex()]

    assert hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest() == expected


def test_routers_and_experts_are_part_of_a_fingerprint(tmp_path: Path) -> None:
    """Another number of chosen experts, or another router, gives other KV."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    one = read(tmp_path, "mixtral", **experts)
    other = read(tmp_path, "mixtral", **experts | {"num_experts_per_tok": 3})
    geometry = geometry_of(one, EngineSettings())
    decoder = read_decoder(one, MadeWeights(), 0, CPU)
    roots = {units_root(decoder)}
    for layer in decoder.layers:
        assert layer.experts is not None
        for weight in (layer.experts.router.weight, layer.mlp.up.weights[3]):
            weight[5, 1] += 1
            roots.add(units_root(decoder))

    assert arithmetic_of(one, geometry, CPU) != arithmetic_of(other, geometry, CPU)
    assert len(roots) == 5
