"""Random mixtures of experts, generated from a seed, of which some experts are chosen more often
than others, as in models that were trained.

The embeddings set the last hidden channel to one number, and no layer writes it. There the router's
row of expert n (from 1) has `-skew * log(n)`, so that the first experts are the most probable ones
for every token, by about n**-skew, and the rest of the row decides between them.

    python -m kvrs_testkit.random_experts [--experts 8] [--chosen 2] [--skew 1] DIR [SEED]
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrs.errors import ConfigError
from kvrs_engine.engine.model_fields import Fields
from kvrs_engine.engine.random_model import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCAB,
    llama_config,
    preference,
    random_tokenizer,
    write_model,
)

FAMILIES = ("mixtral", "qwen3_moe")
_NOTE = "kvrs_generated"  # In config.json: what no other field tells.
_MAX_EXPERTS, _MAX_SKEW = 512, 8.0


@dataclass(frozen=True, slots=True)
class ExpertsModel:
    """Sizes of a generated model."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int  # By each token.
    width: int  # Inner dimension of an expert.
    skew: float

    @classmethod
    def tiny(
        cls, family: str, *, experts: int = 8, chosen: int = 2, skew: float = 0.0
    ) -> "ExpertsModel":
        """Raises ConfigError: naming the option of the command line that is wrong."""
        width = INTERMEDIATE if family == "mixtral" else INTERMEDIATE // 4
        sizes = (LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM)
        return cls(family, *sizes, experts, chosen, width, skew)._checked()

    @classmethod
    def large(
        cls, family: str, *, experts: int = 8, chosen: int = 2, skew: float = 0.0
    ) -> "ExpertsModel":
        """1 GB of weights with 8 experts, each of several parts; raises ConfigError as well."""
        if family != "mixtral":
            raise ConfigError(f"--large: got family {family!r}; allowed: mixtral")
        return cls(family, 5, 512, 8, 4, 64, experts, chosen, 4096, skew)._checked()

    def _checked(self) -> "ExpertsModel":
        if not 1 <= self.experts <= _MAX_EXPERTS:
            raise ConfigError(f"--experts: got {self.experts}; allowed: 1 to {_MAX_EXPERTS}")
        if not 1 <= self.chosen <= self.experts:
            raise ConfigError(
                f"--chosen: got {self.chosen}; allowed: 1 to the number of experts ({self.experts})"
            )
        if not 0 <= self.skew <= _MAX_SKEW:
            raise ConfigError(f"--skew: got {self.skew}; allowed: 0 to {_MAX_SKEW:g}")
        return self


def write_experts_model(directory: Path, model: ExpertsModel, seed: int) -> None:
    """Write a Hugging Face directory: the same model and seed give the same bytes. Nothing is done
    where it is there.

    Raises:
        ConfigError: another model is there.
    """
    config = _config(model, seed)
    path = directory / "config.json"
    if path.is_file():
        found = Fields(path).values
        if any(found.get(name) != value for name, value in config.items()):
            raise ConfigError(
                f"{directory}: got the directory of another model; allowed: a new one"
            )
        return
    tokenizer = random_tokenizer(seed)
    weights = _weights(model, seed)
    weights["lm_head.weight"] *= preference(tokenizer)
    write_model(directory, tokenizer, weights, config)


def _config(model: ExpertsModel, seed: int) -> dict[str, Any]:
    is_mixtral = model.family == "mixtral"
    own: Mapping[str, Any] = (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": model.experts}
        if is_mixtral
        else {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": model.experts,
            "moe_intermediate_size": model.width,
            "norm_topk_prob": True,
        }
    )
    return {
        **llama_config(model.layers),
        "model_type": model.family,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.width if is_mixtral else INTERMEDIATE,
        "num_experts_per_tok": model.chosen,
        **own,
        _NOTE: {**asdict(model), "seed": seed},
    }


def _weights(model: ExpertsModel, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, width = model.hidden, model.width

    def matrix(rows: int, columns: int, gain: float) -> Tensor:
        """Gives sums of `columns` numbers around 1 that size."""
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    def unread(rows: Tensor) -> Tensor:
        """With no row for the last channel."""
        rows[-1] = 0.0
        return rows

    experts, names, router = "mlp.experts", ("gate_proj", "up_proj", "down_proj"), "mlp.gate"
    if model.family == "mixtral":
        names, experts = ("w1", "w3", "w2"), "block_sparse_moe.experts"
        router = "block_sparse_moe.gate"
    favour = -model.skew * torch.arange(1, model.experts + 1).log()
    embeddings = torch.randn(VOCAB, hidden, generator=generator)
    embeddings[:, -1] = 1.0
    weights = {"model.embed_tokens.weight": embeddings}
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(hidden)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(rows, hidden, 2.0)
        if model.family == "qwen3_moe":
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{name}.weight"] = torch.ones(model.head_dim)
        weights[f"{prefix}.self_attn.o_proj.weight"] = unread(matrix(hidden, queries, 0.5))
        gate = matrix(model.experts, hidden, 1.0)
        # Norms divide by what embeddings and layers have come to, and so do they here.
        gate[:, -1] = favour * math.sqrt(1 + layer)
        weights[f"{prefix}.{router}.weight"] = gate
        for expert in range(model.experts):
            at = f"{prefix}.{experts}.{expert}"
            up, other, down = (f"{at}.{name}.weight" for name in names)
            weights[up], weights[other] = matrix(width, hidden, 2.0), matrix(width, hidden, 2.0)
            weights[down] = unread(matrix(hidden, width, 0.5))
    weights["model.norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = matrix(VOCAB, hidden, 1.1)
    weights["lm_head.weight"][:, -1] = 0.0
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("seed", type=int, nargs="?", default=0, metavar="SEED")
    parser.add_argument("--experts", type=int, default=8, metavar="N", help="(default 8)")
    parser.add_argument("--chosen", type=int, default=2, metavar="N", help="of a token (default 2)")
    parser.add_argument("--skew", type=float, default=0.0, help="of the router (default 0)")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--large", action="store_true", help="with 1 GB of weights (mixtral)")
    given = parser.parse_args()
    make = ExpertsModel.large if given.large else ExpertsModel.tiny
    try:
        model = make(given.family, experts=given.experts, chosen=given.chosen, skew=given.skew)
        write_experts_model(given.directory, model, given.seed)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
